"""Records the start, the end and the preemption of attempts, and decides what state the job has afterwards."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from falaj.errors import Conflict
from falaj.governance.operations.call import Call
from falaj.records.names import ObjectId
from falaj.records.scheduling.accounting import ResourceUsage
from falaj.records.scheduling.snapshot import Node, Placement, Request
from falaj.records.tracking import Outcome
from falaj.records.training.jobs import JobOutput, JobSpec, JobState, Verdict
from falaj.training import store
from falaj.training.dependencies import Accounts, BlobSource, ExecutionBackend, TrackedRuns
from falaj.training.memory_check import gpu_matches
from falaj.training.moves import finish_move
from falaj.training.queue import LONGEST_PAUSE_S, request_of
from falaj.training.runs import IMAGE_TAG
from falaj.training.store import JobRow

FIRST_PAUSE_S = 1.0
CANCELLED = "cancelled: "
"""The beginning of the reason of a job whose cancellation was given one."""

RUN_STATUS: dict[JobState, Outcome] = {
    JobState.DONE: "finished",
    JobState.FAILED: "failed",
    JobState.CANCELLED: "killed",
}


class JobTransition(NamedTuple):
    """The state of a job after an attempt; `pause` is the backoff before the next attempt."""

    state: JobState
    reason: str | None
    failures: int
    pause: timedelta | None = None


def next_state(row: JobRow, verdict: Verdict, reason: str | None) -> JobTransition:
    """Return whether the job of `row` has ended or goes back to the queue, given the verdict on its attempt."""
    failures = row.failures + (verdict == "failed")
    if verdict == "done":
        return JobTransition(JobState.DONE, reason, failures)
    if verdict == "cancelled" or row.cancelling:
        given = row.reason if row.cancelling and (row.reason or "").startswith(CANCELLED) else None
        return JobTransition(JobState.CANCELLED, given or reason or "cancelled", failures)
    if verdict in ("interrupted", "preempted", "moved"):
        return JobTransition(JobState.QUEUED, reason or verdict, failures)
    if failures > row.spec.retries:
        return JobTransition(JobState.FAILED, reason, failures)
    seconds = min(FIRST_PAUSE_S * 2 ** (failures - 1), LONGEST_PAUSE_S)
    left = row.spec.retries - failures
    words = f"attempt {row.attempt} failed, it is tried again ({left} more after that): {reason}"
    return JobTransition(JobState.QUEUED, words, failures, timedelta(seconds=seconds))


def cancel_reason(given: str) -> str:
    """Return the reason of a job that is cancelled for what was `given`."""
    return f"{CANCELLED}{given}"[:2000]


@dataclass(frozen=True)
class AttemptRecorder:
    """Updates all that depends on an attempt: the row of its job, its run, its blobs and the accounts."""

    runs: TrackedRuns
    blobs: BlobSource
    accounts: Accounts
    backend: ExecutionBackend

    def begin(
        self,
        call: Call,
        attempt: int,
        placements: Sequence[Placement],
        *,
        borrows: bool,
        decided: Request | None,
        home: str | None,
        fence_s: int | None,
    ) -> None:
        """Record that `attempt` begins. Conflict if the job's request differs from the one that was `decided`."""
        row = self._new_attempt(call, attempt, decided=decided, home=home, fence_s=fence_s)
        self._start(call, row, attempt, placements, borrows=borrows, since=call.now)

    def hand_over(
        self, call: Call, attempt: int, *, decided: Request | None, home: str | None, fence_s: int | None
    ) -> None:
        """Record that `attempt` waits in the queue of a cluster, which decides when it runs; the job stays queued."""
        self._new_attempt(call, attempt, decided=decided, home=home, fence_s=fence_s)

    def start_handed_over(
        self, call: Call, attempt: int, hosts: Sequence[str], *, since: datetime | None
    ) -> None:
        """Record that an attempt that was handed over runs on `hosts` since then. It is charged from then on."""
        row = store.lock_job(call.tx, call.target.id)
        if not row.handed_over or row.attempt != attempt:
            raise Conflict(f"attempt {attempt} at job {call.target.id} was not handed over, or has started")
        store.record_queue_change(call.tx)  # one after the other: no GPU is counted twice
        placements = placements_on(hosts, row.spec, self.backend.nodes(), held=store.held_gpus(call.tx))
        handed_at = store.attempt_began_at(call.tx, row.id, attempt) or call.now
        started_at = min(
            max(since or call.now, handed_at), call.now
        )  # the clock of the cluster is another one
        self._start(call, row, attempt, placements, borrows=False, since=started_at)

    def _new_attempt(
        self, call: Call, attempt: int, *, decided: Request | None, home: str | None, fence_s: int | None
    ) -> JobRow:
        row = store.lock_job(call.tx, call.target.id)
        if row.state is not JobState.QUEUED or row.handed_over or row.attempt + 1 != attempt:
            raise Conflict(f"job {call.target.id} is {row.state} after attempt {row.attempt}")
        now = row.request
        if decided and now and _asked(now) != _asked(decided):
            raise Conflict(f"job {call.target.id} was moved: it asks for something else now")
        store.add_attempt(call.tx, call.target.id, attempt, home=home, fence_s=fence_s, now=call.now)
        return row

    def _start(
        self,
        call: Call,
        row: JobRow,
        attempt: int,
        placements: Sequence[Placement],
        *,
        borrows: bool,
        since: datetime,
    ) -> None:
        store.start_attempt(call.tx, row.id, attempt, placements=placements, borrows=borrows, now=since)
        self.accounts.begin(
            call.tx,
            request_of(call.target, row.spec),
            attempt=attempt,
            user=row.behalf,
            placements=tuple(placements),
            gpu_models=self._models(placements),
            borrows=borrows,
            now=since,
        )

    def settle(
        self,
        call: Call,
        attempt: int,
        verdict: Verdict,
        *,
        reason: str | None,
        exit_code: int | None,
        outputs: Sequence[JobOutput],
        log: ObjectId | None,
        environment: ObjectId | None,
        image: str | None = None,
        used: ResourceUsage,
    ) -> None:
        """Record the end of `attempt`, and publish its outputs, its log and its list of packages.

        `image` is what it ran in, on a cluster.
        """
        row = self._running(call, attempt)
        following = next_state(row, verdict, reason)
        self._end_attempt(call, row, verdict, reason, exit_code, log=log)
        self.accounts.end(call.tx, call.target.id, attempt=attempt, verdict=verdict, used=used, now=call.now)
        preemptions = row.preemptions + (verdict == "preempted")
        over: dict[str, Any] = {"leaving": False, "borrows": False, "handed_over": False}
        over["preemptions"] = preemptions
        store.update_job(call.tx, call.target.id, exit_code=exit_code, failures=following.failures, **over)
        finish_move(call, row, ended=following.state.ended)
        if image is not None:
            self.runs.tag(call, row.run, {IMAGE_TAG: image})
        notes = {"environment.txt": environment}
        if following.state.ended:
            self._publish(call, row, outputs, notes | {"log.txt": log})
            self.end(call, row, following.state, following.reason)
            return
        self._publish(call, row, (), notes | {f"log.{attempt}.txt": log})
        due = None if following.pause is None else call.now + following.pause
        back = {"state": following.state, "reason": following.reason, "not_before": due}
        store.update_job(call.tx, call.target.id, **back, placements=None)
        store.record_queue_change(call.tx)

    def make_room(self, call: Call, leaving: Sequence[ObjectId]) -> None:
        """Give the target job a claim, and mark the jobs in `leaving` for preemption; all or none."""
        rows = {ident: store.lock_job(call.tx, ident) for ident in sorted([call.target.id, *leaving])}
        if rows[call.target.id].state is not JobState.QUEUED:
            raise Conflict(f"job {call.target.id} is no longer queued")
        for ident in leaving:
            if rows[ident].state is not JobState.RUNNING or rows[ident].leaving:
                raise Conflict(f"job {ident} no longer runs, or is being preempted already")
            store.update_job(call.tx, ident, leaving=True, evicted_for=call.target.id)
        store.update_job(call.tx, call.target.id, claim=True)
        store.record_queue_change(call.tx)

    def end(self, call: Call, row: JobRow, state: JobState, reason: str | None) -> None:
        """Record the end of a job and of its run, and drop its claim."""
        over = {"cancelling": False, "claim": False, "leaving": False}
        ended_at = max(call.now, row.started_at or call.now)  # the clock may have been put back
        store.update_job(call.tx, row.id, state=state, reason=reason, ended_at=ended_at, **over)
        store.record_queue_change(call.tx)
        self.runs.end(call, row.run, status=RUN_STATUS[state])

    def _running(self, call: Call, attempt: int) -> JobRow:
        row = store.lock_job(call.tx, call.target.id)
        if not row.has_attempt or row.attempt != attempt:
            raise Conflict(f"job {call.target.id} is {row.state} at attempt {row.attempt}, not {attempt}")
        return row

    def _end_attempt(
        self,
        call: Call,
        row: JobRow,
        verdict: Verdict,
        reason: str | None,
        exit_code: int | None,
        *,
        log: ObjectId | None,
    ) -> None:
        ended = {"verdict": verdict, "reason": reason, "exit_code": exit_code, "log": log}
        ended_at = max(call.now, row.started_at or call.now)  # the clock may have been put back
        store.update_attempt(call.tx, row.id, row.attempt, **ended, ended_at=ended_at)

    def _publish(
        self, call: Call, row: JobRow, outputs: Sequence[JobOutput], notes: Mapping[str, ObjectId | None]
    ) -> None:
        """Attach outputs and notes to the run as artifacts. A note whose name an output has is renamed."""
        taken = {each.path for each in outputs}
        ours = {f"falaj-{name}" if name in taken else name: blob for name, blob in notes.items() if blob}
        named = {each.path: each.blob for each in outputs} | ours
        made = [(path, self.blobs.facts(call.tx, blob)) for path, blob in named.items()]
        for _, blob in made:
            self.blobs.keep(call.tx, blob, now=call.now)
        self.runs.attach(call, row.run, made)
        store.update_job(call.tx, row.id, outputs=[each.model_dump() for each in outputs])

    def _models(self, placements: Sequence[Placement]) -> tuple[str, ...]:
        """Return the models of the GPUs in `placements`."""
        wanted = [gpu for placed in placements for gpu in placed.gpus]
        if not wanted:
            return ()
        models = {gpu.id: gpu.model for node in self.backend.nodes() for gpu in node.gpus}
        return tuple(models.get(gpu, "unknown") for gpu in wanted)


def _asked(request: Request) -> tuple[object, ...]:
    """Return the parts of a request that a move can change."""
    return request.replicas, request.each, request.affinity


def placements_on(
    hosts: Sequence[str], spec: JobSpec, nodes: Sequence[Node], *, held: Collection[str]
) -> tuple[Placement, ...]:
    """Return a placement for each host; a node that is not known has no GPUs.

    The API server names no devices. GPUs that suit and are not `held` stand for them, so that they are counted right
    for each node and model.
    """
    by_name, taken = {node.name: node for node in nodes}, set(held)
    found = []
    for replica, host in enumerate(hosts):
        node = by_name.get(host)
        there = [] if node is None else [gpu for gpu in node.gpus if gpu_matches(spec, gpu)]
        free_first = sorted(there, key=lambda gpu: gpu.id in taken)
        own = tuple(gpu.id for gpu in free_first[: spec.gpus])
        taken |= set(own)
        found.append(Placement(replica=replica, node=host, gpus=own))
    return tuple(found)
