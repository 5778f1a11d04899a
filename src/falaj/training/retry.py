"""Queues a failed or cancelled job again, on behalf of the caller, as a new run that continues the last one."""

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
from falaj.training.inputs import require_token_scope, require_volume_zones, resolve_inputs
from falaj.training.queue import request_of
from falaj.training.runs import start_run
from falaj.training.store import JobRow


@dataclass(frozen=True)
class JobRetry:
    """Checks that a job may be retried, and queues it."""

    gate: Gate
    runs: TrackedRuns
    scheduler: Scheduler
    backend: ExecutionBackend
    accounts: Accounts
    unfinished_limit: int
    can_grow: bool = False

    def requeue(self, call: Call) -> None:
        """Queue the target of `call` again; Conflict unless it failed or was cancelled."""
        row = store.lock_job(call.tx, call.target.id)
        if row.state not in (JobState.FAILED, JobState.CANCELLED):
            raise Conflict(
                f"job {call.target.id} is {row.state}; only one that failed or was cancelled is retried"
            )
        home = objects.by_id(call.tx, call.target.workspace)
        if home is None:
            raise Conflict(f"the workspace of job {call.target.id} is gone")
        self._require_allowed(call, home, row)
        self._require_fit(call, row.spec)
        volumes = self.backend.volumes(row.spec.volumes, home.name)
        require_volume_zones(call.target.label, volumes, self.gate.zones)
        run = start_run(self.runs, call, home, call.target.id, row.spec, row.inputs, after=row.run)
        fresh: dict[str, Any] = dict.fromkeys(("reason", "exit_code", "ended_at", "not_before", "progress"))
        again = {"state": JobState.QUEUED, "failures": 0, "cancelling": False, "outputs": [], "run": run}
        store.update_job(call.tx, call.target.id, **fresh, **again, **requester_columns(call))
        store.record_queue_change(call.tx)

    def _require_allowed(self, call: Call, home: StoredObject, row: JobRow) -> None:
        """Raise Denied unless the caller may do all that submitting the job requires."""
        require_job_limit(call.tx, home.id, limit=self.unfinished_limit)
        self.accounts.require_open(call.tx, row.queue, home.id)
        inputs = resolve_inputs(self.gate, call, row.inputs)
        call.referred["inputs"] = [*inputs.values()]
        require_secrets(self.gate, call, row.spec.secrets, workspace=home)
        archive = None if row.code is None else objects.by_id(call.tx, row.code)
        if row.code is not None and archive is None:
            raise Conflict(f"the code of job {call.target.id} was deleted; submit it again")
        if archive is not None:
            self.gate.require(call, "blobs.read", archive)
        self.gate.require(call, "blobs.upload", home)
        require_token_scope(call.caller)

    def _require_fit(self, call: Call, spec: JobSpec) -> None:
        """Raise InvalidInput if the job could not run any more: nodes may have changed since it was submitted."""
        if spec.environment is not None:
            self.backend.require_environment(spec.environment)
        if spec.network:
            self.backend.require_network()
        request = request_of(call.target, spec)
        queues = self.accounts.queues(call.tx, now=call.now)
        nodes = self.backend.nodes()
        require_admissible(self.scheduler, spec, request, nodes, queues, can_grow=self.can_grow)


def requester_columns(call: Call) -> dict[str, Any]:
    """Return the columns that identify the requester, with the limits of their token."""
    caller = call.caller
    scope = {"scope": caller.workspace, "actions": caller.actions, "token": caller.token}
    return {"behalf": caller.id, **scope}
