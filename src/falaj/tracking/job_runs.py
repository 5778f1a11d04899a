"""The runs of jobs: started, filled and ended in the transaction of the job's operation, without operations of runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from falaj.governance.operations.call import Call
from falaj.governance.operations.gate import Gate
from falaj.ports.metadata import Transaction
from falaj.records.governance.blobs import Blob
from falaj.records.governance.objects import StoredObject
from falaj.records.names import ObjectId
from falaj.records.tracking import Artifact, Outcome
from falaj.tracking import store
from falaj.tracking.experiments import find_or_create
from falaj.tracking.tables import params as params_table
from falaj.tracking.tables import tags as tags_table


class JobRuns:
    """The part of tracking that the job service uses."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def start(
        self,
        call: Call,
        workspace: StoredObject,
        *,
        experiment: str,
        name: str,
        params: Mapping[str, str],
        tags: Mapping[str, str],
    ) -> ObjectId:
        """Start a run; the sources of the call are its sources."""
        home = find_or_create(self._gate, call, experiment, home=workspace)
        new = call.create("run", workspace=workspace)
        store.create_run(call.tx, new, experiment=home.id, name=name)
        store.put_values(call.tx, params_table, new.id, params)
        store.put_values(call.tx, tags_table, new.id, tags)
        return new.id

    def params(self, tx: Transaction, run: ObjectId) -> Mapping[str, str]:
        """Return the parameters of a run by key."""
        return store.values_of(tx, params_table, run)

    def attach(self, call: Call, run: ObjectId, artifacts: Sequence[tuple[str, Blob]]) -> None:
        """Attach committed blobs to a run, unless it has ended or has an artifact at that path."""
        state = store.lock(call.tx, run)
        if state is None or state.status.ended:
            return
        for path, blob in artifacts:
            if store.artifact_at(call.tx, run, path) is None:
                new = Artifact(path=path, blob=blob.id, size_bytes=blob.size_bytes, attached_at=call.now)
                store.add_artifact(call.tx, run, new)

    def tag(self, call: Call, run: ObjectId, tags: Mapping[str, str]) -> None:
        """Set tags of a run; existing ones are replaced."""
        if store.lock(call.tx, run) is not None:
            store.put_values(call.tx, tags_table, run, tags)

    def end(self, call: Call, run: ObjectId, *, status: Outcome) -> None:
        """End a run, unless it has ended; it takes nothing any more."""
        before = store.lock(call.tx, run)
        if before is not None and not before.status.ended:
            store.end_run(call.tx, run, status=status, now=call.now, sealed=True)
