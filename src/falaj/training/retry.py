"""Queues a job that has ended once more: for whoever asks, if it could run now, as a run that goes on from the last."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from falaj.errors import Conflict
from falaj.governance import objects
from falaj.governance.operations.call import Call
from falaj.governance.operations.gate import Gate
from falaj.governance.secrets.service import require_secrets
from falaj.records.governance.objects import StoredObject
from falaj.records.training.jobs import JobSpec, JobState
from falaj.training import store
from falaj.training.admission import require_admissible, require_job_limit
from falaj.training.dependencies import Accounts, ExecutionBackend, Scheduler, TrackedRuns
from falaj.training.inputs import require_action, require_token_scope, resolve_inputs
from falaj.training.queue import request_for
from falaj.training.runs import start_run


@dataclass(frozen=True)
class JobRetry:
    """What has to be asked and told for another try."""

    gate: Gate
    runs: TrackedRuns
    scheduler: Scheduler
    backend: ExecutionBackend
    accounts: Accounts
    unfinished_limit: int

    def requeue(self, call: Call) -> None:
        row = store.lock_job(call.tx, call.target.id)
        if row["state"] not in (JobState.FAILED, JobState.CANCELLED):
            raise Conflict(
                f"job {call.target.id} is {row['state']}; only one that failed or was cancelled is retried"
            )
        spec = JobSpec.model_validate(row["spec"])
        home = objects.by_id(call.tx, call.target.workspace)
        if home is None:
            raise Conflict(f"the workspace of job {call.target.id} is gone")
        self._require_allowed(call, home, row)
        self._require_fit(call, spec)
        run = start_run(self.runs, call, home, call.target.id, spec, row["inputs"], after=row["run"])
        fresh: dict[str, Any] = dict.fromkeys(("reason", "exit_code", "ended_at", "not_before", "progress"))
        again = {"state": JobState.QUEUED, "failures": 0, "cancelling": False, "outputs": [], "run": run}
        store.update_job(call.tx, call.target.id, **fresh, **again, **requester_columns(call))
        store.record_queue_change(call.tx)

    def _require_allowed(self, call: Call, home: StoredObject, row: Any) -> None:
        """Whoever has a job tried again must be allowed what whoever submitted it was."""
        require_job_limit(call.tx, home.id, limit=self.unfinished_limit)
        self.accounts.require_open(call.tx, row["queue"], home.id)
        inputs = resolve_inputs(self.gate, call, row["inputs"])
        call.referred["inputs"] = [*inputs.values()]
        require_secrets(self.gate, call, row["spec"].get("secrets", {}), workspace=home)
        packed = None if row["code"] is None else objects.by_id(call.tx, row["code"])
        if row["code"] is not None and packed is None:
            raise Conflict(f"the code of job {call.target.id} was deleted; submit it anew")
        if packed is not None:
            require_action(self.gate, call, "blobs.read", packed)
        require_action(self.gate, call, "blobs.upload", home)
        require_token_scope(call.caller)

    def _require_fit(self, call: Call, spec: JobSpec) -> None:
        """The machines may have changed since it was let in: it is asked again whether it could ever run."""
        target = call.target
        if spec.environment is not None:
            self.backend.require_environment(spec.environment)
        request = request_for(
            target.id, spec, workspace=target.workspace, submitted_at=target.created_at, label=target.label
        )
        queues = self.accounts.queues(call.tx, now=call.now)
        require_admissible(self.scheduler, spec, request, self.backend.nodes(), queues)


def requester_columns(call: Call) -> dict[str, Any]:
    """For whom the job runs: whoever asked, with the limits of the token that they came with."""
    caller = call.caller
    scope = {"scope": caller.workspace, "actions": caller.actions, "token": caller.token}
    return {"behalf": caller.id, **scope}
