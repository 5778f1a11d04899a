"""The controller: holds the lease, turns work into workflows, and stops dead when the lease is lost."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, NoReturn

from falaj.control import lease
from falaj.control.authorization import controller_caller
from falaj.control.jobs.reconciler import JobReconciler
from falaj.control.pipelines import triggers
from falaj.control.services import Services
from falaj.control.workflows import service
from falaj.control.workflows.builtin import SELF_UNDOING, WORKFLOWS
from falaj.control.workflows.context import LONGEST_PAUSE_S, Workflow
from falaj.errors import Conflict, Denied, FalajError, Fenced, Unavailable
from falaj.governance import objects
from falaj.governance.identity.directory import is_still_valid
from falaj.governance.identity.tokens import caller_for
from falaj.governance.operations.caller import Caller, acting_as, on_terms, start_thread
from falaj.governance.operations.gate import Gate
from falaj.ports.workflows import JsonObject, WorkflowOutcome, Workflows, WorkflowSteps
from falaj.records.control.workflows import WorkflowState
from falaj.records.names import ROOT

log = logging.getLogger("falaj.controller")

LEASE_LOST = 75
"""The exit code of a controller that lost its lease; its parent starts it again, as a standby."""


@dataclass(frozen=True)
class ControllerTiming:
    """How long the lease lasts (it is renewed at a third), how often work is looked for, the house swept, and drift
    judged with what it starts."""

    lease: timedelta = timedelta(seconds=10)
    every_s: float = 0.1
    sweep: timedelta = timedelta(hours=1)
    judge: timedelta = timedelta(seconds=1)


def die() -> NoReturn:
    """Stop at once: nothing of this process may act any more."""
    os._exit(LEASE_LOST)


class Controller:
    """One of these acts at a time; the others stand by."""

    def __init__(
        self,
        gate: Gate,
        services: Services,
        engine: Callable[[], Workflows],
        *,
        holder: str,
        timing: ControllerTiming = ControllerTiming(),  # noqa: B008 - frozen
        workflows: Mapping[str, Workflow] = WORKFLOWS,
        on_lost: Callable[[], NoReturn] = die,
        jobs: Callable[[int, Callable[[], NoReturn]], JobReconciler] | None = None,
        wake: threading.Event | None = None,
    ) -> None:
        """`wake` is set by whoever has something to do, in this process, and does not want to wait for our look."""
        self._gate = gate
        self._services = services
        self._make_engine = engine
        self._holder = holder
        self._timing = timing
        self._workflows = dict(workflows)
        self._on_lost = on_lost
        self._make_jobs = jobs
        self._wake = wake
        self._engine: Workflows | None = None
        self._fence = 0
        self._started: set[str] = set()
        self._refusals: set[str] = set()
        self._resting: triggers.RetryTimes = {}
        self._stopping = threading.Event()

    def run(self, stop: threading.Event) -> None:
        """Stand by until the lease is free, then act until `stop` or until the lease is lost."""
        while not stop.is_set():
            fence = lease.acquire(
                self._gate.database, self._holder, now=self._gate.clock(), lasts=self._timing.lease
            )
            if fence is not None:
                log.info("controller acts", extra={"fence": fence, "holder": self._holder})
                self._act(fence, stop)
                return
            stop.wait(self._timing.every_s)

    def _act(self, fence: int, stop: threading.Event) -> None:
        self._fence = fence
        self._stopping = stop
        over = threading.Event()
        start_thread(self._keep_lease, over, name="lease")
        try:
            self._look_after_all(fence, stop)
        finally:
            try:
                if self._engine is not None:
                    self._engine.close()
            finally:
                over.set()
        lease.release(self._gate.database, fence, now=self._gate.clock())

    def _look_after_all(self, fence: int, stop: threading.Event) -> None:
        jobs = None if self._make_jobs is None else self._make_jobs(fence, self._on_lost)
        sweep_at = judge_at = self._gate.clock()
        while not stop.is_set():
            try:
                if jobs is not None:
                    jobs.tick()
                self._look_after_work()
                if _is_due(judge_at, self._timing.judge, now=self._gate.clock()):
                    judge_at = self._gate.clock() + self._timing.judge
                    self._attempt(self._judge)
                if _is_due(sweep_at, self._timing.sweep, now=self._gate.clock()):
                    sweep_at = self._gate.clock() + self._timing.sweep
                    self._attempt(self._sweep)
            except Fenced:
                self._on_lost()
            except Unavailable as error:
                log.warning("the controller waits for a backing service", extra={"reason": error.message})
            self._rest(stop)
        if jobs is not None:
            jobs.stop()

    def _rest(self, stop: threading.Event) -> None:
        """Until it is time to look again, or somebody wants it; whoever stops us sets both."""
        if self._wake is None:
            stop.wait(self._timing.every_s)
        elif self._wake.wait(self._timing.every_s) and not stop.is_set():
            self._wake.clear()

    def _keep_lease(self, stop: threading.Event) -> None:
        """Renew well before the lease ends; a lease that could not be renewed in time is lost."""
        good_until = self._gate.clock() + self._timing.lease
        while not stop.wait(self._timing.lease.total_seconds() / 3):
            now = self._gate.clock()
            with suppress(Unavailable):
                if not lease.renew(self._gate.database, self._fence, now=now, lasts=self._timing.lease):
                    log.error("the lease passed to another controller")
                    self._on_lost()
                good_until = now + self._timing.lease
            if self._gate.clock() > good_until:
                log.error("the lease could not be renewed in time")
                self._on_lost()

    def _look_after_work(self) -> None:
        with self._gate.database.read() as tx:
            rows = service.unfinished(tx)
        if not rows:
            return
        engine = self._launched()
        for row in rows:
            ended = engine.outcome(row["id"])
            if ended is not None:
                cancelled = row["cancelling"] and ended.error is not None
                self._settle(row["id"], ended._replace(cancelled=ended.cancelled or cancelled))
            elif row["cancelling"] and not _puts_back(row):
                self._cancel(engine, row)
            elif row["id"] not in self._started:
                self._note(row["id"], state=WorkflowState.RUNNING)
                engine.start(row["id"], row["workflow"], row["input"])
                self._started.add(row["id"])

    def _launched(self) -> Workflows:
        """The engine, made when there is work for the first time: it is large, and jobs do not need it."""
        if self._engine is None:
            engine = self._make_engine()
            try:
                engine.launch({name: self._body(workflow) for name, workflow in self._workflows.items()})
            except BaseException:
                engine.close()  # or there would be two at the next look
                raise
            self._engine = engine
        return self._engine

    def _cancel(self, engine: Workflows, row: Any) -> None:
        if row["id"] in self._started or row["state"] == WorkflowState.RUNNING:
            engine.cancel(row["id"])
        else:
            self._settle(row["id"], WorkflowOutcome(result=None, error="cancelled", cancelled=True))

    def _settle(self, ident: str, ended: WorkflowOutcome) -> None:
        failed = WorkflowState.CANCELLED if ended.cancelled else WorkflowState.FAILED
        state = WorkflowState.DONE if ended.error is None else failed
        with self._gate.database.write() as tx:
            service.end(
                tx,
                ident,
                fence=self._fence,
                state=state,
                now=self._gate.clock(),
                result=ended.result,
                error=ended.error,
            )
        self._started.discard(ident)

    def _note(self, ident: str, **values: Any) -> None:
        with self._gate.database.write() as tx:
            service.note(tx, ident, fence=self._fence, **values)

    def _body(self, workflow: Workflow) -> Callable[[WorkflowSteps, JsonObject], JsonObject]:
        def body(steps: WorkflowSteps, given: JsonObject) -> JsonObject:
            return workflow(self._services, _AuthorizedSteps(self, steps), given)

        return body

    def _attempt(self, duty: Callable[[], None]) -> None:
        """A duty of the house that is refused does not stop the work of others; why is said once."""
        try:
            duty()
        except (Fenced, Unavailable):
            raise
        except FalajError as error:
            if error.message not in self._refusals:
                self._refusals.add(error.message)
                log.error("the controller could not do its duty", extra={"reason": error.message})

    def _judge(self) -> None:
        """Look for drift, and start what it or a schedule calls for."""
        with self._as_controller():
            self._services.monitoring.evaluate()
        triggers.start_due(self._gate, self._services, fence=self._fence, resting=self._resting)

    def _sweep(self) -> None:
        with self._as_controller():
            self._services.blobs.cleanup()
            self._services.platform.cleanup()

    @contextmanager
    def _as_controller(self) -> Iterator[None]:
        """Operations inside are performed by the service that keeps the house."""
        with self._gate.database.read() as tx:
            me = objects.resolve(tx, "controller", kind="service", workspace=ROOT)
        with acting_as(caller_for(me, origin="controller")), on_terms(fence=self._fence):
            yield


def _is_due(at: datetime, every: timedelta, *, now: datetime) -> bool:
    """Whether `at` has come; also where the clock was put back, or nothing would be due for as long."""
    return not at - every <= now < at


def _puts_back(row: Any) -> bool:
    """Whether cancelled work is left to its own steps: the next one fails, and what it had begun is undone."""
    return row["workflow"] in SELF_UNDOING and row["state"] == WorkflowState.RUNNING


def poll_pause_s(every_s: float, *, waited_s: float, longest_s: float = LONGEST_PAUSE_S) -> float:
    """How long a wait rests before its next look: longer the longer it lasts, since every look is an audited read."""
    return max(every_s, min(every_s + waited_s / 20, longest_s))


class WorkflowSuspended(BaseException):
    """The controller stops while a workflow waits. Not an Exception, or the engine would take it for the step's end:
    the next controller waits on."""


class _AuthorizedSteps:
    """Steps performed for whoever asked for the work: authorized anew, once only, and only by the lease's holder."""

    def __init__(self, controller: Controller, steps: WorkflowSteps) -> None:
        self._controller = controller
        self._steps = steps
        self._done = 0

    @property
    def workflow(self) -> str:
        return self._steps.workflow

    def run(self, name: str, body: Callable[[], JsonObject]) -> JsonObject:
        self._done += 1
        return self._steps.run(name, lambda: self._perform(name, body))

    def wait(
        self,
        name: str,
        look: Callable[[], JsonObject | None],
        *,
        every_s: float = 1.0,
        longest_s: float = LONGEST_PAUSE_S,
    ) -> JsonObject:
        self._done += 1
        return self._steps.run(name, lambda: self._look(name, look, every_s, longest_s))

    def say(self, words: str, *, done: int = 0, of: int | None = None) -> None:
        counted = {} if of is None else {"step": done, "steps": of}
        self._controller._note(self.workflow, doing=words, **counted)

    def undo(self, name: str, body: Callable[[], JsonObject]) -> JsonObject:
        self._done += 1
        found = self._steps.run(name, lambda: self._perform(name, body, caller=self._controller_itself))
        with self._controller._gate.database.read() as tx:
            if service.by_id(tx, self.workflow)["cancelling"]:
                raise Conflict("cancelled; what it had begun was undone")
        return found

    def _controller_itself(self) -> Caller:
        itself = controller_caller(self._controller._gate.database)
        return replace(itself, origin=f"workflow:{self.workflow}")

    def _perform(
        self, name: str, body: Callable[[], JsonObject], *, caller: Callable[[], Caller] | None = None
    ) -> JsonObject:
        keeper = self._controller
        try:
            keeper._note(self.workflow, step=self._done - 1, doing=name)
            with (
                acting_as((caller or self._caller)()),
                on_terms(key=f"{self.workflow}:{name}", fence=keeper._fence),
            ):
                return body()
        except Fenced:
            keeper._on_lost()

    def _look(
        self, name: str, look: Callable[[], JsonObject | None], every_s: float, longest_s: float
    ) -> JsonObject:
        keeper = self._controller
        try:
            keeper._note(self.workflow, step=self._done - 1, doing=name)
            began = time.monotonic()
            while True:
                found = self._look_once(look)
                if found is not None:
                    return found
                waited_s = time.monotonic() - began
                if keeper._stopping.wait(poll_pause_s(every_s, waited_s=waited_s, longest_s=longest_s)):
                    raise WorkflowSuspended
        except Fenced:
            keeper._on_lost()

    def _look_once(self, look: Callable[[], JsonObject | None]) -> JsonObject | None:
        try:
            caller = self._caller()
        except Unavailable:  # the database is away for a moment, or for so long that the lease is lost
            return None
        with acting_as(caller), on_terms(fence=self._controller._fence):
            return look()

    def _caller(self) -> Caller:
        """Who asked for the work, as they stand now."""
        with self._controller._gate.database.read() as tx:
            row = service.by_id(tx, self.workflow)
            if row["cancelling"]:
                raise Conflict("cancelled before its next step")
            person = objects.by_id(tx, row["behalf"])
            if person is None:
                raise Denied("whoever asked for this work is gone")
            caller = replace(
                caller_for(person, origin=f"workflow:{self.workflow}"),
                workspace=row["scope"],
                actions=None if row["actions"] is None else tuple(row["actions"]),
                token=row["token"],
            )
            if not is_still_valid(tx, caller, None):
                raise Denied("whoever asked for this work may no longer act")
        return caller
