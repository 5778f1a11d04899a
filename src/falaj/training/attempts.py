"""What is written down when an attempt at a job begins, ends or makes room, in the transaction of its operation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from falaj.errors import Conflict
from falaj.governance.operations.call import Call
from falaj.records.names import ObjectId
from falaj.records.scheduling.accounting import ResourceUsage
from falaj.records.scheduling.snapshot import Placement, Request
from falaj.records.training.jobs import JobOutput, JobSpec, JobState, Verdict
from falaj.training import store
from falaj.training.dependencies import Accounts, BlobSource, ExecutionBackend, TrackedRuns
from falaj.training.moves import finish_move
from falaj.training.queue import request_for


@dataclass(frozen=True)
class AttemptRecorder:
    """Everything that has to be told of an attempt: the job's row, its run, its blobs, and the accounts."""

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
    ) -> None:
        row = store.lock_job(call.tx, call.target.id)
        if row["state"] != JobState.QUEUED or row["attempt"] + 1 != attempt:
            raise Conflict(f"job {call.target.id} is {row['state']} after attempt {row['attempt']}")
        if decided is not None and row["request"] is not None:
            now = Request.model_validate(row["request"])
            if (now.each, now.affinity) != (decided.each, decided.affinity):
                raise Conflict(f"job {call.target.id} was moved: it asks for something else now")
        store.add_attempt(
            call.tx, call.target.id, attempt, placements=placements, borrows=borrows, now=call.now
        )
        self.accounts.begin(
            call.tx,
            self._request(call, row),
            attempt=attempt,
            user=row["behalf"],
            placements=tuple(placements),
            gpu_models=self._models(placements),
            borrows=borrows,
            now=call.now,
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
        used: ResourceUsage,
    ) -> None:
        row = self._running(call, attempt)
        following = next_state(row, verdict, reason)
        kept = {name: found[0].id for name in ("log", "environment") if (found := call.referred[name])}
        self._end_attempt(call, row, verdict, reason, exit_code, log=kept.get("log"))
        self.accounts.end(call.tx, call.target.id, attempt=attempt, verdict=verdict, used=used, now=call.now)
        made_room = row["preemptions"] + (verdict == "preempted")
        over: dict[str, Any] = {"leaving": False, "borrows": False, "preemptions": made_room}
        store.update_job(call.tx, call.target.id, exit_code=exit_code, failures=following.failures, **over)
        finish_move(call, row, ended=following.state.ended)
        notes = {"environment.txt": kept.get("environment")}
        if following.state.ended:
            self._publish(call, row, outputs, notes | {"log.txt": kept.get("log")})
            self.end(call, row, following.state, following.reason)
            return
        self._publish(call, row, (), notes | {f"log.{attempt}.txt": kept.get("log")})
        due = None if following.pause is None else call.now + following.pause
        back = {"state": following.state, "reason": following.reason, "not_before": due}
        store.update_job(call.tx, call.target.id, **back, placements=None)
        store.record_queue_change(call.tx)

    def make_room(self, call: Call, leaving: Sequence[ObjectId]) -> None:
        """The job that is acted on gets a claim, and those that run in its place are told to leave; all or none."""
        rows = {ident: store.lock_job(call.tx, ident) for ident in sorted([call.target.id, *leaving])}
        if rows[call.target.id]["state"] != JobState.QUEUED:
            raise Conflict(f"job {call.target.id} does not wait any more")
        for ident in leaving:
            if rows[ident]["state"] != JobState.RUNNING or rows[ident]["leaving"]:
                raise Conflict(f"job {ident} does not run any more, or leaves already")
            store.update_job(call.tx, ident, leaving=True, evicted_for=call.target.id)
        store.update_job(call.tx, call.target.id, claim=True)
        store.record_queue_change(call.tx)

    def end(self, call: Call, row: Any, state: JobState, reason: str | None) -> None:
        """The job is over, and with it what it had a claim to."""
        over = {"cancelling": False, "claim": False, "leaving": False}
        ended_at = max(call.now, row["started_at"] or call.now)  # the clock may have been put back
        store.update_job(call.tx, row["id"], state=state, reason=reason, ended_at=ended_at, **over)
        store.record_queue_change(call.tx)
        self.runs.end(call, row["run"], status=RUN_STATUS[state])

    def _running(self, call: Call, attempt: int) -> Any:
        row = store.lock_job(call.tx, call.target.id)
        if row["state"] != JobState.RUNNING or row["attempt"] != attempt:
            raise Conflict(
                f"job {call.target.id} is {row['state']} at attempt {row['attempt']}, not {attempt}"
            )
        return row

    def _end_attempt(
        self,
        call: Call,
        row: Any,
        verdict: Verdict,
        reason: str | None,
        exit_code: int | None,
        *,
        log: ObjectId | None,
    ) -> None:
        ended = {"verdict": verdict, "reason": reason, "exit_code": exit_code, "log": log}
        ended_at = max(call.now, row["started_at"] or call.now)  # the clock may have been put back
        store.end_attempt(call.tx, row["id"], row["attempt"], **ended, ended_at=ended_at)

    def _publish(
        self, call: Call, row: Any, outputs: Sequence[JobOutput], notes: Mapping[str, ObjectId | None]
    ) -> None:
        """Make what an attempt left behind, and our notes on it, artifacts of the run. Its own names come first."""
        taken = {each.path for each in outputs}
        ours = {f"falaj-{name}" if name in taken else name: blob for name, blob in notes.items() if blob}
        named = {each.path: each.blob for each in outputs} | ours
        made = [(path, self.blobs.facts(call.tx, blob)) for path, blob in named.items()]
        for _, blob in made:
            self.blobs.keep(call.tx, blob, now=call.now)
        self.runs.attach(call, row["run"], made)
        store.update_job(call.tx, row["id"], outputs=[each.model_dump() for each in outputs])

    def _request(self, call: Call, row: Any) -> Request:
        spec, target = JobSpec.model_validate(row["spec"]), call.target
        return request_for(
            target.id,
            spec,
            workspace=target.workspace,
            submitted_at=target.created_at,
            label=target.label,
        )

    def _models(self, placements: Sequence[Placement]) -> tuple[str, ...]:
        """The models of the GPUs that were handed out."""
        wanted = [gpu for placed in placements for gpu in placed.gpus]
        if not wanted:
            return ()
        models = {gpu.id: gpu.model for node in self.backend.nodes() for gpu in node.gpus}
        return tuple(models.get(gpu, "unknown") for gpu in wanted)
