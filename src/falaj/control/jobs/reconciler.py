"""The keeper of the queue: admits jobs as the scheduler decides, and looks after every attempt until it is settled.

An attempt is written down before it starts, starting is idempotent, and it is settled in one transaction: so a keeper
that is killed at any moment leaves enough for the next one to go on, and nothing runs twice. In the same way it is
written down who makes room for whom before anybody is told to leave.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from falaj.control.authorization import acting, controller_caller
from falaj.control.jobs.attempts import Attempt
from falaj.control.jobs.context import ControllerContext, JobHost, remove_attempt
from falaj.control.jobs.staging import make_traversable
from falaj.control.services import Services
from falaj.errors import Conflict, FalajError, Fenced, Unavailable
from falaj.governance.operations.caller import start_thread
from falaj.governance.operations.gate import Gate
from falaj.records.names import ObjectId
from falaj.records.scheduling.snapshot import Decision, Evict, Node, Request, Start
from falaj.records.training.jobs import JobState
from falaj.scheduling import Backlog, decide_from
from falaj.training import store
from falaj.training.queue import QueueSnapshot

log = logging.getLogger("falaj.controller")

STOP_S = 8.0
AGAIN_S = 1.0
"""So long after an attempt broke off for the first time it is taken up again."""
LOST_AFTER_S = 30.0
"""A node that was not there for so long is lost, and what ran on it goes back to the queue."""


@dataclass
class AttemptThread:
    """An attempt that is looked after, and when it is taken up again, should it have broken off."""

    attempt: Attempt
    thread: threading.Thread
    again_at: float | None = None


class JobReconciler:
    """Keeps the jobs of the platform, for as long as the lease with `fence` holds."""

    def __init__(
        self, gate: Gate, services: Services, host: JobHost, *, fence: int, on_lost: Callable[[], NoReturn]
    ) -> None:
        service = controller_caller(gate.database)
        self._context = ControllerContext(gate, services, service, fence, on_lost)
        self._host = host
        self._attempts: dict[str, AttemptThread] = {}
        self._broken, self._refused = Backoff(first_s=AGAIN_S), Backoff(first_s=AGAIN_S)
        self._missing: dict[str, float] = {}
        self._occasions = DecisionTrigger()
        make_traversable(host.folder)
        try:
            self._clear_leftovers()
        except Fenced:
            on_lost()

    def tick(self) -> None:
        """Look after the attempts that there are, and start those that are due."""
        nodes = self._host.nodes()
        with self._context.gate.database.read() as tx:
            changes, running = store.queue_version(tx), store.running(tx)
        self._look_after_all(running, nodes)
        if self._occasions.has_come(changes, nodes, now=self._context.gate.clock()):
            self._decide(changes, nodes)

    def stop(self) -> None:
        """Have every attempt end and its job go back to the queue; what takes too long is left to the next keeper."""
        for kept in self._attempts.values():
            kept.attempt.ask("interrupted")
        deadline = time.monotonic() + STOP_S
        for kept in self._attempts.values():
            kept.thread.join(max(0.0, deadline - time.monotonic()))

    # ------------------------------------------------------------------------------------------ what runs

    def _look_after_all(self, running: Sequence[Any], nodes: Sequence[Node]) -> None:
        here = {row["id"] for row in running}
        self._attempts = {
            job: kept for job, kept in self._attempts.items() if job in here or kept.thread.is_alive()
        }
        self._broken.keep_only(self._attempts)
        self._note_missing(running, nodes)
        for row in running:
            try:
                self._look_after(row)
            except (Fenced, Unavailable):
                raise
            except Exception:  # one job must not hold up the others
                log.exception("a job cannot be looked after", extra={"job": row["id"]})

    def _look_after(self, row: Any) -> None:
        kept = self._attempts.get(row["id"])
        if kept is None or kept.attempt.number != row["attempt"]:
            self._take_up(row["id"])
        elif kept.thread.is_alive():
            self._pass_on(kept.attempt, row)
        elif kept.again_at is None:
            self._let_rest(kept)
        elif time.monotonic() >= kept.again_at:
            self._take_up(row["id"])

    def _take_up(self, job: str) -> None:
        with self._context.gate.database.read() as tx:
            row = store.job_row(tx, job)
        if row["state"] != JobState.RUNNING:
            return
        attempt = Attempt(self._context, self._host, row)
        self._pass_on(attempt, row)
        thread = start_thread(attempt.live, name=f"attempt {attempt.name}")
        self._attempts[job] = AttemptThread(attempt, thread)

    def _pass_on(self, attempt: Attempt, row: Any) -> None:
        """Tell an attempt what was asked of its job."""
        if row["cancelling"]:
            attempt.ask("cancelled")
        if row["leaving"]:
            attempt.ask("preempted")
        if lost := self._lost_node(row):
            attempt.lose(lost)

    def _let_rest(self, kept: AttemptThread) -> None:
        """An attempt broke off and is not settled: it is taken up again, later each time, and its job says so."""
        job, pause_s = kept.attempt.job, self._broken.begin(kept.attempt.job)
        kept.again_at = time.monotonic() + pause_s
        if kept.attempt.trouble is not None:
            words = (
                f"attempt {kept.attempt.number} is taken up again in {pause_s:.0f} s: {kept.attempt.trouble}"
            )
            with suppress(Unavailable):
                self._context.note(job, reason=words[:2000])

    def _note_missing(self, running: Sequence[Any], nodes: Sequence[Node]) -> None:
        """Remember since when a node with attempts on it has not been there."""
        there = {node.name for node in nodes}
        used = {placed["node"] for row in running for placed in row["placements"] or ()}
        now = time.monotonic()
        self._missing = {name: self._missing.get(name, now) for name in used - there}

    def _lost_node(self, row: Any) -> str | None:
        now = time.monotonic()
        gone = {name for name, since in self._missing.items() if now - since >= LOST_AFTER_S}
        return next((placed["node"] for placed in row["placements"] or () if placed["node"] in gone), None)

    # ---------------------------------------------------------------------------------------- what waits

    def _decide(self, changes: int, nodes: Sequence[Node]) -> None:
        gate, queue, began = self._context.gate, self._context.services.jobs.queue, time.monotonic()
        resting = self._refused.still()
        with gate.database.read() as tx:
            look = queue.look(tx, nodes, now=gate.clock(), without=resting)
        self._refused.keep_only(look.attempts)
        decisions = (
            decide_from(Backlog(look.snapshot.pending), look.snapshot) if look.snapshot.pending else ()
        )
        waits = bool(look.snapshot.pending or resting)
        self._occasions.decided(changes, nodes, look, waits=waits, took_s=time.monotonic() - began)
        self._carry_out(decisions, look)

    def _carry_out(self, decisions: Sequence[Decision], look: QueueSnapshot) -> None:
        leaving: dict[ObjectId, list[ObjectId]] = {}
        asked = {each.job: each for each in look.snapshot.pending} if decisions else {}
        for decision in decisions:
            if isinstance(decision, Start):
                self._begin(decision, look.attempts[decision.job] + 1, asked[decision.job])
            elif isinstance(decision, Evict):
                leaving.setdefault(decision.by, []).append(decision.job)
        for job, victims in leaving.items():
            self._make_room(job, victims)

    def _begin(self, start: Start, number: int, asked: Request) -> None:
        """Write the attempt down, then start it."""
        begin = self._context.services.jobs.begin
        facts: dict[str, Any] = {"attempt": number, "placements": start.placements, "borrows": start.borrows}
        if self._written(start.job, lambda: begin(start.job, **facts, decided=asked)):
            self._take_up(start.job)

    def _make_room(self, job: ObjectId, victims: list[ObjectId]) -> None:
        """Write down who leaves for whom; those that run are told at the next look."""
        log.info("jobs make room", extra={"job": job, "leaving": victims})
        self._written(job, lambda: self._context.services.jobs.preempt_for(job, leaving=tuple(victims)))

    def _written(self, job: ObjectId, write: Callable[[], object]) -> bool:
        """Whether something about a waiting job was written down. One that cannot be waits a while, and says so."""
        try:
            with acting(self._context.service, fence=self._context.fence):
                write()
        except (Fenced, Unavailable):
            raise
        except Conflict:
            return False  # cancelled or moved meanwhile
        except FalajError as error:
            pause_s = self._refused.begin(job)
            log.exception("a job could not be begun", extra={"job": job})
            words = f"it could not be begun, and is tried again in {pause_s:.0f} s: {error.message}"
            self._context.note(job, reason=words[:2000])
            return False
        return True

    # ------------------------------------------------------------------------------------- what is left

    def _clear_leftovers(self) -> None:
        """Remove what is left of attempts that were settled by a keeper which did not get to it."""
        with self._context.gate.database.read() as tx:
            running = {row["id"]: row["attempt"] for row in store.running(tx)}
        for home in sorted(self._host.folder.iterdir()):
            numbers = {path.name.lstrip(".").split(".")[0].split("-")[0] for path in home.iterdir()}
            for number in sorted(int(each) for each in numbers if each.isdigit()):
                if running.get(home.name) != number:
                    self._context.require_lease()  # else the next keeper may have begun it since
                    self._clear(home.name, number)

    def _clear(self, job: str, number: int) -> None:
        """What cannot be removed is left lying: it must not keep the keeper from its work."""
        try:
            remove_attempt(self._host, job, number)
        except Exception:
            log.exception("what is left of an attempt cannot be removed", extra={"job": job})
