"""The job reconciler: starts jobs as the scheduler decides, and supervises every attempt until its end is recorded.

An attempt is recorded before it starts, starting is idempotent, and its end is recorded in one transaction. So a
reconciler that is killed at any moment leaves enough for the next one to continue, and nothing runs twice. Likewise a
preemption is recorded before any job is told to stop. An attempt on a machine whose controller is no longer in charge
is given up when its supervisor has certainly stopped it (decision 0023).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Any, NoReturn

from falaj.control.authorization import acting, controller_caller
from falaj.control.jobs.agent_server import RemoteAgentServer
from falaj.control.jobs.attempts import Attempt
from falaj.control.jobs.context import ControllerContext, JobHost, RemoteHost, remove_attempt, secret_of
from falaj.control.jobs.staging import make_traversable
from falaj.control.services import Services
from falaj.errors import Conflict, FalajError, Fenced, Unavailable
from falaj.governance.operations.caller import start_thread
from falaj.governance.operations.gate import Gate
from falaj.ports.launcher import fence_wait_s
from falaj.records.names import ObjectId
from falaj.records.scheduling.snapshot import Decision, Evict, Node, Request, Start
from falaj.scheduling import Backlog, decide_from, hand_over
from falaj.training import store
from falaj.training.queue import QueueSnapshot, is_due
from falaj.training.store import JobRow, RunningJobRow

log = logging.getLogger("falaj.controller")

STOP_S = 8.0
FIRST_BACKOFF_S = 1.0
LOST_AFTER_S = 30.0
"""A node that was missing for so long is lost, and its jobs go back to the queue."""
LONGEST_BACKOFF_S = 60.0
RECONSIDER_S = 5.0
"""A queue in which jobs wait is decided on this often: shares decay, and people change budgets and quotas."""
QUICK_S = 0.05
"""A decision that took longer is followed by a pause as long, so that half of the time is left for other work."""


@dataclass
class AttemptThread:
    """A supervised attempt; `retry_at` is when it is resumed after its thread failed."""

    attempt: Attempt
    thread: threading.Thread
    retry_at: float | None = None


class JobReconciler:
    """Reconciles the jobs of the platform while the lease with `fence` holds."""

    def __init__(
        self, gate: Gate, services: Services, host: JobHost, *, fence: int, on_lost: Callable[[], NoReturn]
    ) -> None:
        service = controller_caller(gate.database)
        self._host = host
        self._context = ControllerContext(gate, services, service, fence, on_lost)
        if host.remote is not None:
            self._context = replace(self._context, agents=self._listen(host.remote, on_lost))
        self._attempts: dict[str, AttemptThread] = {}
        self._failed, self._refused = Backoff(first_s=FIRST_BACKOFF_S), Backoff(first_s=FIRST_BACKOFF_S)
        self._missing: dict[str, float] = {}
        self._in_charge_since = time.monotonic()
        self._awaited: set[tuple[str, int]] = set()
        self._trigger = DecisionTrigger()
        make_traversable(host.folder)
        try:
            self._remove_leftovers()
        except Fenced:
            on_lost()
        if host.remote is not None:
            start_thread(self._sweep, host.remote, name="sweep")

    def tick(self) -> None:
        """Supervise the running attempts, and decide on the queue if that is due."""
        nodes = self._host.nodes()
        with self._context.gate.database.read() as tx:
            version, running = store.queue_version(tx), store.running(tx)
        self._reconcile_all(running, nodes)
        if self._trigger.is_due(version, nodes, now=self._context.gate.clock()):
            self._decide(version, nodes)

    def stop(self) -> None:
        """Interrupt every attempt, so that its job is queued again; slow ones are left to the next controller."""
        for each in self._attempts.values():
            if each.attempt.is_handed_over:
                each.attempt.leave()  # it keeps its place in the queue of the cluster
            else:
                each.attempt.request_stop("interrupted")
        deadline = time.monotonic() + STOP_S
        for each in self._attempts.values():
            each.thread.join(max(0.0, deadline - time.monotonic()))
        if self._context.agents is not None:
            self._context.agents.close()

    def _listen(self, remote: RemoteHost, on_lost: Callable[[], NoReturn]) -> RemoteAgentServer:
        """Return the agents for workers and ranks on other machines."""
        return RemoteAgentServer(
            remote.listen,
            certificate=remote.certificate,
            key=remote.key,
            secret_of=lambda attempt: secret_of(self._host.agent_key, attempt),
            is_current=self._is_current,
            on_fenced=on_lost,
        )

    # ---------------------------------------------------------------------------------------- running jobs

    def _reconcile_all(self, running: Sequence[RunningJobRow], nodes: Sequence[Node]) -> None:
        here = {row.id for row in running}
        self._attempts = {
            job: each for job, each in self._attempts.items() if job in here or each.thread.is_alive()
        }
        self._failed.retain(self._attempts)
        self._update_missing(running, nodes)
        for row in running:
            try:
                self._reconcile(row)
            except (Fenced, Unavailable):
                raise
            except Exception:  # one job must not hold up the others
                log.exception("failed to reconcile job", extra={"job": row.id})

    def _reconcile(self, row: RunningJobRow) -> None:
        known = self._attempts.get(row.id)
        if self._is_elsewhere(row) and (left_s := self._fenced_in_s(row)) > 0:
            self._await_fence(row, left_s)
        elif known is None or known.attempt.number != row.attempt:
            self._supervise(row.id)
        elif known.thread.is_alive():
            self._forward(known.attempt, row, nodes=row.nodes)
        elif known.retry_at is None:
            self._back_off(known)
        elif time.monotonic() >= known.retry_at:
            self._supervise(row.id)

    def _supervise(self, job: str) -> None:
        """Start a thread that brings the job's attempt to its end."""
        with self._context.gate.database.read() as tx:
            row = store.job_row(tx, job)
        if not row.has_attempt:
            return
        attempt = Attempt(self._context, self._host, row)
        self._forward(attempt, row, nodes=tuple(placed.node for placed in row.placements))
        thread = start_thread(attempt.run, name=f"attempt {attempt.name}")
        self._attempts[job] = AttemptThread(attempt, thread)

    def _forward(self, attempt: Attempt, row: RunningJobRow | JobRow, *, nodes: Sequence[str]) -> None:
        """Tell an attempt on `nodes` that its job is to be cancelled or preempted, or has lost a node."""
        if row.cancelling:
            attempt.request_stop("cancelled")
        if row.leaving:
            attempt.request_stop("preempted")
        if row.handed_over and self._host.waiting_limit is None:
            attempt.request_stop("interrupted")  # the platform decides again
        if lost := self._lost_node(nodes):
            attempt.lose(lost)
        if self._is_elsewhere(row):
            attempt.lose(nodes[0] if nodes else "of the attempt")

    def _back_off(self, failed: AttemptThread) -> None:
        """Schedule the retry of an attempt whose thread failed before its end was recorded."""
        job, pause_s = failed.attempt.job, self._failed.start(failed.attempt.job)
        failed.retry_at = time.monotonic() + pause_s
        if failed.attempt.error is not None:
            words = f"attempt {failed.attempt.number} is resumed in {pause_s:.0f} s: {failed.attempt.error}"
            with suppress(Unavailable):
                self._context.update_job(job, reason=words[:2000])

    def _is_elsewhere(self, row: RunningJobRow | JobRow) -> bool:
        """Return whether another home, whose controller is not in charge, has started the attempt."""
        return row.home is not None and self._host.home is not None and row.home != self._host.home

    def _fenced_in_s(self, row: RunningJobRow) -> float:
        """Return the seconds until an attempt elsewhere has certainly ended.

        The controller there renewed its lease before this one was in charge.
        """
        waits_s = LOST_AFTER_S if row.fence_s is None else fence_wait_s(row.fence_s)
        return self._in_charge_since + waits_s - time.monotonic()

    def _await_fence(self, row: RunningJobRow, left_s: float) -> None:
        """Say once why an attempt elsewhere is left alone."""
        if (row.id, row.attempt) in self._awaited:
            return
        self._awaited.add((row.id, row.attempt))
        where = row.nodes[0] if row.nodes else "another machine"
        words = (
            f"attempt {row.attempt} ran on {where}, whose controller is gone; it has ended in {left_s:.0f} s"
        )
        self._context.update_job(row.id, reason=f"{words}, and then the job is queued again")

    def _update_missing(self, running: Sequence[RunningJobRow], nodes: Sequence[Node]) -> None:
        """Record since when nodes with attempts on them are missing."""
        there = {node.name for node in nodes}
        used = {name for row in running for name in row.nodes}
        gone = (name for name in used - there if not self._host.is_unseen(name))
        now = time.monotonic()
        self._missing = {name: self._missing.get(name, now) for name in gone}

    def _lost_node(self, nodes: Sequence[str]) -> str | None:
        now = time.monotonic()
        gone = {name for name, since in self._missing.items() if now - since >= LOST_AFTER_S}
        return next((name for name in nodes if name in gone), None)

    # ----------------------------------------------------------------------------------------- queued jobs

    def _decide(self, version: int, nodes: Sequence[Node]) -> None:
        gate, queue, began = self._context.gate, self._context.services.jobs.queue, time.monotonic()
        paused = self._refused.waiting()
        with gate.database.read() as tx:
            seen = queue.snapshot(tx, nodes, now=gate.clock(), without=paused)
        self._refused.retain(seen.attempts)
        if self._host.waiting_limit is not None:
            self._trigger.record_decision(
                version,
                nodes,
                next_due=seen.next_due,
                waits=bool(seen.snapshot.pending or paused),
                took_s=self._hand_over(seen, limit=self._host.waiting_limit),
            )
            return
        decisions = (
            decide_from(Backlog(seen.snapshot.pending), seen.snapshot) if seen.snapshot.pending else ()
        )
        waits = bool(seen.snapshot.pending or paused)
        took_s = time.monotonic() - began
        self._trigger.record_decision(version, nodes, next_due=seen.next_due, waits=waits, took_s=took_s)
        self._carry_out(decisions, seen)

    def _carry_out(self, decisions: Sequence[Decision], seen: QueueSnapshot) -> None:
        leaving: dict[ObjectId, list[ObjectId]] = {}
        requests = {each.job: each for each in seen.snapshot.pending} if decisions else {}
        for decision in decisions:
            if isinstance(decision, Start):
                self._begin(decision, seen.attempts[decision.job] + 1, requests[decision.job])
            elif isinstance(decision, Evict):
                leaving.setdefault(decision.by, []).append(decision.job)
        for job, victims in leaving.items():
            self._preempt(job, victims)

    def _begin(self, start: Start, number: int, request: Request) -> None:
        """Record the attempt, then start it."""
        begin = self._context.services.jobs.begin
        facts: dict[str, Any] = {
            "attempt": number,
            "placements": start.placements,
            "borrows": start.borrows,
            "home": self._host.home,
            "fence_s": self._host.fence_s,
        }
        if self._record(start.job, lambda: begin(start.job, **facts, decided=request)):
            self._supervise(start.job)

    def _hand_over(self, seen: QueueSnapshot, *, limit: int) -> float:
        """Hand over what Kueue may decide on, and return how many seconds the decision took."""
        began = time.monotonic()
        chosen = hand_over(seen.snapshot, seen.handed_over, limit=limit) if seen.snapshot.pending else []
        took_s = time.monotonic() - began
        record = self._context.services.jobs.hand_over
        for request in chosen:
            facts: dict[str, Any] = {
                "attempt": seen.attempts[request.job] + 1,
                "home": self._host.home,
                "fence_s": self._host.fence_s,
                "decided": request,
            }
            if self._record(request.job, partial(record, request.job, **facts)):
                self._supervise(request.job)
        return took_s

    def _preempt(self, job: ObjectId, victims: list[ObjectId]) -> None:
        """Record which jobs are preempted for `job`; their attempts are told at the next tick."""
        log.info("preempting jobs", extra={"job": job, "leaving": victims})
        self._record(job, lambda: self._context.services.jobs.preempt_for(job, leaving=tuple(victims)))

    def _record(self, job: ObjectId, write: Callable[[], object]) -> bool:
        """Return whether `write` took effect. After an error the job backs off, with the error as its reason."""
        try:
            with acting(self._context.service, fence=self._context.fence):
                write()
        except (Fenced, Unavailable):
            raise
        except Conflict:
            return False  # cancelled or moved meanwhile
        except FalajError as error:
            pause_s = self._refused.start(job)
            log.exception("failed to start job", extra={"job": job})
            words = f"it could not be started, and is tried again in {pause_s:.0f} s: {error.message}"
            self._context.update_job(job, reason=words[:2000])
            return False
        return True

    # ------------------------------------------------------------------------------------------ leftovers

    def _remove_leftovers(self) -> None:
        """Remove the files of ended attempts that an earlier controller did not remove."""
        with self._context.gate.database.read() as tx:
            running = {str(row.id): row.attempt for row in store.running(tx)}
        for home in sorted(self._host.folder.iterdir()):
            numbers = {path.name.lstrip(".").split(".")[0].split("-")[0] for path in home.iterdir()}
            for number in sorted(int(each) for each in numbers if each.isdigit()):
                if running.get(home.name) != number:
                    self._context.require_lease()  # else the next controller may have started it
                    self._remove(home.name, number)

    def _sweep(self, remote: RemoteHost) -> None:
        """Remove what earlier controllers left on other machines, once those answer."""
        while True:
            try:
                removed = remote.sweep(self._is_current)
            except Unavailable as error:
                log.warning("leftovers are not removed yet", extra={"reason": error.message})
                time.sleep(LONGEST_BACKOFF_S)
            except Exception:
                log.exception("failed to remove leftovers on other machines")
                return
            else:
                log.info("leftovers removed", extra={"attempts": removed})
                return

    def _is_current(self, attempt: str) -> bool:
        """Return whether an attempt is one of a running job."""
        job, _, number = attempt.rpartition("/")
        self._context.require_lease()
        with self._context.gate.database.read() as tx:
            return any(row.id == job and str(row.attempt) == number for row in store.running(tx))

    def _remove(self, job: str, number: int) -> None:
        """Remove the files of an attempt; a failure is logged, and does not stop the reconciler."""
        try:
            remove_attempt(self._host, job, number)
        except Exception:
            log.exception("failed to remove files of attempt", extra={"job": job})


class Backoff:
    """Pauses after failures, twice as long each time; by the monotonic clock, which never jumps."""

    def __init__(self, *, first_s: float, longest_s: float = LONGEST_BACKOFF_S) -> None:
        self._first_s, self._longest_s = first_s, longest_s
        self._until: dict[str, tuple[int, float]] = {}

    def start(self, key: str) -> float:
        """Start a pause of `key`, longer than its last one. Return its length in seconds."""
        times = self._until.get(key, (0, 0.0))[0]
        seconds = min(self._first_s * float(1 << min(times, 30)), self._longest_s)
        self._until[key] = times + 1, time.monotonic() + seconds
        return seconds

    def waiting(self) -> list[str]:
        """Return the keys whose pauses are not over."""
        now = time.monotonic()
        return [key for key, (_, until) in self._until.items() if now < until]

    def retain(self, keys: Iterable[str]) -> None:
        """Forget all keys but these."""
        known = set(keys)
        self._until = {key: pause for key, pause in self._until.items() if key in known}


class DecisionTrigger:
    """Tells when a decision on the queue is due: an unchanged queue costs nothing, however long it is."""

    def __init__(self) -> None:
        self._version = -1
        self._nodes: tuple[Node, ...] = ()
        self._next_due: datetime | None = None
        self._waits = False
        self._pauses_until = self._decided_at = float("-inf")

    def is_due(self, version: int, nodes: Sequence[Node], *, now: datetime) -> bool:
        """Return whether to decide on this `version` of the queue and these `nodes`."""
        moment = time.monotonic()
        if moment < self._pauses_until:
            return False
        if version != self._version or tuple(nodes) != self._nodes:
            return True
        if self._next_due is not None and is_due(self._next_due, now=now):
            return True
        return self._waits and moment - self._decided_at >= RECONSIDER_S

    def record_decision(
        self, version: int, nodes: Sequence[Node], *, next_due: datetime | None, waits: bool, took_s: float
    ) -> None:
        """Remember what a decision saw: a queue at least as new as `version`, and whether any job still `waits`."""
        self._version, self._nodes, self._next_due = version, tuple(nodes), next_due
        self._waits = waits
        self._decided_at = time.monotonic()
        self._pauses_until = self._decided_at + (took_s if took_s > QUICK_S else 0.0)
