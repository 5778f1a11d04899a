"""The controller: holds the lease, reconciles jobs, runs workflows, and exits when the lease is lost."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NoReturn

from falaj.control import lease
from falaj.control.authorization import acting, controller_caller, requester
from falaj.control.cluster_sync import ClusterSync
from falaj.control.events.delivery import WebhookDelivery
from falaj.control.jobs.reconciler import JobReconciler
from falaj.control.pipelines import triggers
from falaj.control.services import Services
from falaj.control.workflows import store
from falaj.control.workflows.builtin import SELF_UNDOING, WORKFLOWS
from falaj.control.workflows.context import LONGEST_PAUSE_S, Workflow
from falaj.control.workflows.store import WorkRow
from falaj.errors import Conflict, FalajError, Fenced, Unavailable
from falaj.governance.operations.caller import Caller, acting_as, on_terms, start_thread
from falaj.governance.operations.gate import Gate
from falaj.ports.machine.boot import boot_seconds
from falaj.ports.workflows import JsonObject, WorkflowEngine, WorkflowOutcome, WorkflowSteps
from falaj.records.control.workflows import WorkflowEnd, WorkflowState

log = logging.getLogger("falaj.controller")

LEASE_LOST = 75
"""The exit code of a controller that lost its lease; its parent restarts it as a standby."""


@dataclass(frozen=True)
class ControllerTiming:
    """Periods of the controller.

    `lease` is the duration of the lease, which is renewed after a third of it. `every_s` is the pause between ticks,
    `sweep` the period of cleanup, `judge` the period of drift checks, triggers and deliveries to webhooks, `announce`
    the period that one event about the predictions of an endpoint covers.
    """

    lease: timedelta = timedelta(seconds=10)
    every_s: float = 0.1
    sweep: timedelta = timedelta(hours=1)
    judge: timedelta = timedelta(seconds=1)
    announce: timedelta = timedelta(minutes=1)


def die() -> NoReturn:
    """Exit at once: this process may no longer act."""
    os._exit(LEASE_LOST)


class Controller:
    """Acts while it holds the lease, and stands by otherwise."""

    def __init__(
        self,
        gate: Gate,
        services: Services,
        engine: Callable[[], WorkflowEngine],
        *,
        holder: str,
        timing: ControllerTiming = ControllerTiming(),  # noqa: B008 - frozen
        workflows: Mapping[str, Workflow] = WORKFLOWS,
        on_lost: Callable[[], NoReturn] = die,
        jobs: Callable[[int, Callable[[], NoReturn]], JobReconciler] | None = None,
        wake: threading.Event | None = None,
        renewed: Callable[[float], None] | None = None,
    ) -> None:
        """`wake` is set by code in this process that has work for the controller, to shorten its pause.

        `renewed` is called whenever the lease was taken or renewed, with a reading of `boot_seconds` before that.
        """
        self._gate = gate
        self._services = services
        self._make_engine = engine
        self._holder = holder
        self._timing = timing
        self._workflows = dict(workflows)
        self._on_lost = on_lost
        self._make_jobs = jobs
        self._wake = wake
        self._renewed = renewed
        self._engine: WorkflowEngine | None = None
        self._fence = 0
        self._started: set[str] = set()
        self._refusals: set[str] = set()
        self._retry_times: triggers.RetryTimes = {}
        self._stopping = threading.Event()

    def run(self, stop: threading.Event) -> None:
        """Stand by until the lease is free, then act until `stop` or until the lease is lost."""
        while not stop.is_set():
            since = boot_seconds()
            fence = lease.acquire(
                self._gate.database, self._holder, now=self._gate.clock(), lasts=self._timing.lease
            )
            if fence is not None:
                log.info("controller holds the lease", extra={"fence": fence, "holder": self._holder})
                self._extend_attempts(since)
                self._act(fence, stop)
                return
            stop.wait(self._timing.every_s)

    def _act(self, fence: int, stop: threading.Event) -> None:
        self._fence = fence
        self._stopping = stop
        over = threading.Event()
        start_thread(self._renew_lease, over, name="lease")
        try:
            self._tick_until(fence, stop)
        finally:
            try:
                if self._engine is not None:
                    self._engine.close()
            finally:
                over.set()
        lease.release(self._gate.database, fence, now=self._gate.clock())

    def _tick_until(self, fence: int, stop: threading.Event) -> None:
        jobs = None if self._make_jobs is None else self._make_jobs(fence, self._on_lost)
        deliveries = WebhookDelivery(self._gate, self._services.webhooks, fence=fence)
        queues = ClusterSync(
            self._gate, self._services.queues.reconciler, fence=fence, what="queues of the cluster"
        )
        scale_up = ClusterSync(
            self._gate, self._services.nodes.autoscaling, fence=fence, what="requests for nodes"
        )
        sweep_at = judge_at = announce_at = self._gate.clock()
        while not stop.is_set():
            try:
                if jobs is not None:
                    jobs.tick()
                self._reconcile_work()
                if _is_due(judge_at, self._timing.judge, now=self._gate.clock()):
                    judge_at = self._gate.clock() + self._timing.judge
                    self._run_task(self._check_drift)
                    self._run_task(deliveries.tick)
                    queues.tick()
                    scale_up.tick()
                if _is_due(announce_at, self._timing.announce, now=self._gate.clock()):
                    announce_at = self._gate.clock() + self._timing.announce
                    self._run_task(self._announce_predictions)
                if _is_due(sweep_at, self._timing.sweep, now=self._gate.clock()):
                    sweep_at = self._gate.clock() + self._timing.sweep
                    self._run_task(self._sweep)
            except Fenced:
                self._on_lost()
            except Unavailable as error:
                log.warning("controller waits for a backing service", extra={"reason": error.message})
            self._pause(stop)
        deliveries.close()
        queues.close()
        scale_up.close()
        if jobs is not None:
            jobs.stop()

    def _pause(self, stop: threading.Event) -> None:
        """Wait for the next tick, or until `wake` is set. Setting `stop` requires setting `wake`."""
        if self._wake is None:
            stop.wait(self._timing.every_s)
        elif self._wake.wait(self._timing.every_s) and not stop.is_set():
            self._wake.clear()

    def _renew_lease(self, stop: threading.Event) -> None:
        """Renew the lease well before it ends; one that could not be renewed in time is lost."""
        good_until = self._gate.clock() + self._timing.lease
        while not stop.wait(self._timing.lease.total_seconds() / 3):
            now, since = self._gate.clock(), boot_seconds()
            with suppress(Unavailable):
                if not lease.renew(self._gate.database, self._fence, now=now, lasts=self._timing.lease):
                    log.error("lease taken by another controller")
                    self._on_lost()
                good_until = now + self._timing.lease
                self._extend_attempts(since)
            if self._gate.clock() > good_until:
                log.error("lease not renewed in time")
                self._on_lost()

    def _extend_attempts(self, since: float) -> None:
        """Extend the lease of the attempts on this machine, as the controller's own has been."""
        if self._renewed is None:
            return
        try:
            self._renewed(since)
        except OSError as error:  # tried again at the next renewal
            log.warning("lease of attempts not renewed", extra={"reason": str(error)})

    def _reconcile_work(self) -> None:
        with self._gate.database.read() as tx:
            rows = store.unfinished(tx)
        if not rows:
            return
        engine = self._launched()
        for row in rows:
            ended = engine.outcome(row.id)
            if ended is not None:
                cancelled = row.cancelling and ended.error is not None
                self._end(row.id, ended._replace(cancelled=ended.cancelled or cancelled))
            elif row.cancelling and not _undoes_itself(row):
                self._cancel(engine, row)
            elif row.id not in self._started:
                self._update(row.id, state=WorkflowState.RUNNING)
                engine.start(row.id, row.workflow, row.input)
                self._started.add(row.id)

    def _launched(self) -> WorkflowEngine:
        """Return the workflow engine, created when there is work for the first time: jobs do not need it."""
        if self._engine is None:
            engine = self._make_engine()
            try:
                engine.launch({name: self._body(workflow) for name, workflow in self._workflows.items()})
            except BaseException:
                engine.close()  # else the next tick would create a second one
                raise
            self._engine = engine
        return self._engine

    def _cancel(self, engine: WorkflowEngine, row: WorkRow) -> None:
        if row.id in self._started or row.state is WorkflowState.RUNNING:
            engine.cancel(row.id)
        else:
            self._end(row.id, WorkflowOutcome(result=None, error="cancelled", cancelled=True))

    def _end(self, ident: str, ended: WorkflowOutcome) -> None:
        failed = WorkflowState.CANCELLED if ended.cancelled else WorkflowState.FAILED
        state = WorkflowState.DONE if ended.error is None else failed
        end = WorkflowEnd.model_validate({"state": state, "result": ended.result, "error": ended.error})
        try:
            with acting(controller_caller(self._gate.database), fence=self._fence):
                self._services.workflows.finish(ident, end=end)
        except (Fenced, Unavailable):
            raise
        except FalajError as error:  # its workspace was deleted, say: nobody is left to be told
            log.warning("end of work not announced", extra={"work": ident, "reason": error.message})
            with self._gate.database.write() as tx:
                store.hold_lease(tx, fence=self._fence)
                store.end_work(tx, ident, end, now=self._gate.clock())
        self._started.discard(ident)

    def _update(self, ident: str, **values: Any) -> None:
        with self._gate.database.write() as tx:
            store.update_work(tx, ident, fence=self._fence, **values)

    def _body(self, workflow: Workflow) -> Callable[[WorkflowSteps, JsonObject], JsonObject]:
        def body(steps: WorkflowSteps, given: JsonObject) -> JsonObject:
            return workflow(self._services, _AuthorizedSteps(self, steps), given)

        return body

    def _run_task(self, task: Callable[[], None]) -> None:
        """Run a periodic task. A failure does not stop the tick; each reason is logged once."""
        try:
            task()
        except (Fenced, Unavailable):
            raise
        except FalajError as error:
            if error.message not in self._refusals:
                self._refusals.add(error.message)
                log.error("controller tick failed", extra={"reason": error.message})

    def _check_drift(self) -> None:
        """Evaluate monitors, and start the pipelines that drift or a schedule triggers."""
        with acting(controller_caller(self._gate.database), fence=self._fence):
            self._services.monitoring.evaluate()
        triggers.start_due(self._gate, self._services, fence=self._fence, retry_times=self._retry_times)

    def _announce_predictions(self) -> None:
        with acting(controller_caller(self._gate.database), fence=self._fence):
            self._services.endpoints.announce()

    def _sweep(self) -> None:
        with acting(controller_caller(self._gate.database), fence=self._fence):
            self._services.blobs.cleanup()
            self._services.features.cleanup()
            self._services.platform.cleanup()
            while self._services.runs.cleanup().more:
                pass


def _is_due(at: datetime, every: timedelta, *, now: datetime) -> bool:
    """Return whether `at` has come, or the clock was set back: else nothing would be due for that long."""
    return not at - every <= now < at


def _undoes_itself(row: WorkRow) -> bool:
    """Return whether cancelled work is left to its own steps: the next one fails, and earlier ones are undone."""
    return row.workflow in SELF_UNDOING and row.state is WorkflowState.RUNNING


def poll_pause_s(every_s: float, *, waited_s: float, longest_s: float = LONGEST_PAUSE_S) -> float:
    """Return the pause before the next poll. It grows with the wait, because each poll is an audited read."""
    return max(every_s, min(every_s + waited_s / 20, longest_s))


class WorkflowSuspended(BaseException):
    """The controller stops while a workflow waits; the next controller continues the wait.

    Not an Exception: the engine would take that for the end of the step.
    """


class _AuthorizedSteps:
    """Steps on behalf of the requester: each is authorized anew, takes effect once, and needs the lease."""

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
        poll: Callable[[], JsonObject | None],
        *,
        every_s: float = 1.0,
        longest_s: float = LONGEST_PAUSE_S,
    ) -> JsonObject:
        self._done += 1
        return self._steps.run(name, lambda: self._poll_until_found(name, poll, every_s, longest_s))

    def report(self, words: str, *, done: int = 0, of: int | None = None) -> None:
        counted = {} if of is None else {"step": done, "steps": of}
        self._controller._update(self.workflow, doing=words, **counted)

    def as_controller(self, name: str, body: Callable[[], JsonObject]) -> JsonObject:
        self._done += 1
        return self._steps.run(name, lambda: self._perform(name, body, caller=self._own_caller))

    def undo(self, name: str, body: Callable[[], JsonObject]) -> JsonObject:
        found = self.as_controller(name, body)
        with self._controller._gate.database.read() as tx:
            if store.work_row(tx, self.workflow).cancelling:
                raise Conflict("cancelled; what it had begun was undone")
        return found

    def _perform(
        self, name: str, body: Callable[[], JsonObject], *, caller: Callable[[], Caller] | None = None
    ) -> JsonObject:
        controller = self._controller
        try:
            controller._update(self.workflow, step=self._done - 1, doing=name)
            with (
                acting_as((caller or self._requester)()),
                on_terms(key=f"{self.workflow}:{name}", fence=controller._fence),
            ):
                return body()
        except Fenced:
            controller._on_lost()

    def _poll_until_found(
        self, name: str, poll: Callable[[], JsonObject | None], every_s: float, longest_s: float
    ) -> JsonObject:
        controller = self._controller
        try:
            controller._update(self.workflow, step=self._done - 1, doing=name)
            began = time.monotonic()
            while True:
                found = self._poll_once(poll)
                if found is not None:
                    return found
                waited_s = time.monotonic() - began
                if controller._stopping.wait(poll_pause_s(every_s, waited_s=waited_s, longest_s=longest_s)):
                    raise WorkflowSuspended
        except Fenced:
            controller._on_lost()

    def _poll_once(self, poll: Callable[[], JsonObject | None]) -> JsonObject | None:
        try:
            caller = self._requester()
        except Unavailable:  # the database is away for a moment, or for so long that the lease is lost
            return None
        with acting(caller, fence=self._controller._fence):
            return poll()

    def _requester(self) -> Caller:
        """Return who requested the work, authorized anew; Conflict if it was cancelled."""
        with self._controller._gate.database.read() as tx:
            row = store.work_row(tx, self.workflow)
            if row.cancelling:
                raise Conflict("cancelled before its next step")
            return requester(tx, row, origin=f"workflow:{self.workflow}")

    def _own_caller(self) -> Caller:
        return controller_caller(self._controller._gate.database, origin=f"workflow:{self.workflow}")
