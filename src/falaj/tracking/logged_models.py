"""Operations on logged models: the models that runs make, as MLflow 3 has them, before they are registered."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from falaj.errors import Conflict
from falaj.governance.operations.call import Call, current_call
from falaj.governance.operations.gate import Gate
from falaj.governance.operations.operation import ByteStream, Mode, operation
from falaj.governance.search.queries import search, search_scope
from falaj.records.governance.objects import Cursor, Page, PageSize, StoredObject
from falaj.records.names import WorkspaceRef, ZoneName, new_id
from falaj.records.tracking import (
    Artifact,
    ArtifactEntry,
    ArtifactFolder,
    ArtifactPath,
    ExperimentRef,
    FilterText,
    Keys,
    Lifecycle,
    LoggedModel,
    LoggedModelRef,
    LoggedModelStatus,
    LogResult,
    ModelType,
    Orders,
    Params,
    RemovedArtifacts,
    RunName,
    RunRef,
    Tags,
)
from falaj.tracking import store
from falaj.tracking.artifacts import ArtifactBlobs, Artifacts
from falaj.tracking.search import MODELS
from falaj.tracking.tables import models as models_table
from falaj.tracking.tables import tags as tags_table

Offset = Annotated[int, Field(ge=0, le=2**62)]


class LoggedModels:
    """Logged models of experiments, with their parameters, tags, metrics and files."""

    def __init__(self, gate: Gate, blobs: ArtifactBlobs) -> None:
        self.gate = gate
        self._artifacts = Artifacts(gate, blobs)

    @operation("loggedmodels.create", resource="experiment")
    def create(
        self,
        experiment: ExperimentRef,
        *,
        name: RunName | None = None,
        model_type: ModelType = "",
        source_run: RunRef | None = None,
        params: Params | None = None,
        tags: Tags | None = None,
    ) -> LoggedModel:
        """Create a logged model, which is pending until it is finalized; it derives from its `source_run`."""
        call = current_call()
        if store.experiment_deleted_at(call.tx, call.target.id) is not None:
            raise Conflict(f"experiment {call.target.name!r} is deleted; restore it first")
        run = call.object("source_run") if source_run else None
        home = store.workspace_of(call.tx, call.target)
        new = call.create("logged_model", workspace=home, ident=new_id("logged"))
        row = {
            "experiment": call.target.id,
            "name": name or new.id,
            "status": "pending",
            "type": model_type,
            "source_run": None if run is None else run.id,
        }
        store.create_model(call.tx, new, row)
        store.add_params(call.tx, new.id, params or {})
        store.put_values(call.tx, tags_table, new.id, tags or {})
        return _record(call, new)

    @operation("loggedmodels.show", resource="logged_model", mode=Mode.READ)
    def show(self, model: LoggedModelRef) -> LoggedModel:
        """Show a logged model with its parameters, tags and the newest values of its metrics."""
        return _record(current_call(), current_call().target)

    @operation("loggedmodels.list", resource="workspace", mode=Mode.READ)
    def list(
        self,
        *,
        experiments: tuple[ExperimentRef, ...] = (),
        where: FilterText = "",
        order_by: Orders = (),
        view: Lifecycle = "active",
        workspace: WorkspaceRef | None = None,
        after: Cursor = "",
        limit: PageSize = 100,
    ) -> Page[LoggedModel]:
        """Search the logged models of experiments, or of the whole workspace; the newest come first by default."""
        call = current_call()
        named = call.referred["experiments"] if experiments else []
        page = search(
            self.gate,
            MODELS,
            search_scope(MODELS, named, call.target, of=models_table.c.experiment),
            where=where,
            order_by=order_by,
            view=view,
            after=after,
            limit=limit,
        )
        found = store.model_records(call.tx, [found for found, _ in page.items])
        return Page(items=tuple(found), next=page.next)

    @operation("loggedmodels.finalize", resource="logged_model")
    def finalize(self, model: LoggedModelRef, *, status: LoggedModelStatus = "ready") -> LoggedModel:
        """Say that the files of a logged model are complete, or that it failed."""
        call = current_call()
        _require_active(call)
        store.change_model(call.tx, call.target.id, now=call.now, status=status)
        return _record(call, call.target)

    @operation("loggedmodels.log_params", resource="logged_model")
    def log_params(self, model: LoggedModelRef, params: Params) -> LogResult:
        """Add parameters to a logged model; a parameter that it has cannot be changed."""
        call = current_call()
        _require_active(call)
        new = store.add_params(call.tx, call.target.id, params)
        return LogResult(run=call.target.id, stored=new, repeated=len(params) - new)

    @operation("loggedmodels.set_tags", resource="logged_model")
    def set_tags(self, model: LoggedModelRef, tags: Tags) -> LoggedModel:
        """Set tags of a logged model; existing tags are replaced."""
        call = current_call()
        _require_active(call)
        store.put_values(call.tx, tags_table, call.target.id, tags)
        store.change_model(call.tx, call.target.id, now=call.now)
        return _record(call, call.target)

    @operation("loggedmodels.delete_tags", resource="logged_model")
    def delete_tags(self, model: LoggedModelRef, keys: Keys) -> LogResult:
        """Delete tags of a logged model; NotFound if it has none of them."""
        call = current_call()
        _require_active(call)
        store.change_model(call.tx, call.target.id, now=call.now)
        return store.delete_tags(call, keys)

    @operation("loggedmodels.delete", resource="logged_model", confirm=True)
    def delete(self, model: LoggedModelRef) -> LoggedModel:
        """Delete a logged model. Its files go when it is removed for good."""
        call = current_call()
        if store.model_row(call.tx, call.target.id)["deleted_at"] is None:
            store.change_model(call.tx, call.target.id, now=call.now, deleted_at=call.now)
        return _record(call, call.target)

    @operation("loggedmodels.restore", resource="logged_model")
    def restore(self, model: LoggedModelRef) -> LoggedModel:
        """Restore a deleted logged model."""
        call = current_call()
        store.change_model(call.tx, call.target.id, now=call.now, deleted_at=None)
        return _record(call, call.target)

    # ------------------------------------------------------------------------------------ artifacts

    @operation("loggedmodels.upload_artifact", resource="logged_model", mode=Mode.LATE)
    def upload_artifact(
        self, model: LoggedModelRef, path: ArtifactPath, data: ByteStream, *, zone: ZoneName | None = None
    ) -> Artifact:
        """Store bytes, encrypted, as a file of a logged model under a path; an earlier one there is replaced."""
        return self._artifacts.upload(current_call(), path, data)

    @operation("loggedmodels.artifacts", resource="logged_model", mode=Mode.READ)
    def artifacts(
        self,
        model: LoggedModelRef,
        *,
        folder: ArtifactFolder = "",
        after: Cursor = "",
        limit: PageSize = 1000,
    ) -> Page[ArtifactEntry]:
        """List the files and folders in a folder of a logged model."""
        return self._artifacts.entries(current_call(), folder=folder, after=after, limit=limit)

    @operation("loggedmodels.read_artifact", resource="logged_model", mode=Mode.FREE)
    def read_artifact(
        self, model: LoggedModelRef, path: ArtifactPath, *, offset: Offset = 0, length: Offset | None = None
    ) -> ByteStream:
        """The bytes of a file of a logged model, or a range of them. They are never opened by the platform."""
        return self._artifacts.read(current_call(), path, offset=offset, length=length)

    @operation("loggedmodels.delete_artifact", resource="logged_model", confirm=True)
    def delete_artifact(self, model: LoggedModelRef, path: ArtifactPath) -> RemovedArtifacts:
        """Delete a file of a logged model, or a folder of files."""
        return self._artifacts.delete(current_call(), path)


def _require_active(call: Call) -> None:
    if store.model_row(call.tx, call.target.id)["deleted_at"] is not None:
        raise Conflict(f"logged model {call.target.id} is deleted; restore it first: loggedmodels.restore")


def _record(call: Call, found: StoredObject) -> LoggedModel:
    return store.model_records(call.tx, [found])[0]
