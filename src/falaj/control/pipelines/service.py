"""Operations on pipelines: define how a model is retrained, start that, and run canaries."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Annotated

from sqlalchemy import insert, select, update

from falaj.control.tables import pipelines, work
from falaj.control.workflows.service import IntentQueue
from falaj.control.workflows.store import UNFINISHED, is_unfinished
from falaj.errors import Conflict, Denied
from falaj.governance import objects
from falaj.governance.blobs.contents import BlobContents
from falaj.governance.operations.call import Call, current_call
from falaj.governance.operations.gate import Gate
from falaj.governance.operations.operation import Mode, operation
from falaj.governance.operations.pagination import list_workspace_page
from falaj.ports.metadata import Transaction
from falaj.ports.workflows import JsonObject
from falaj.records.control.pipelines import Canary, Cause, Pipeline, PipelineRef, StoredPipeline
from falaj.records.control.workflows import WorkflowRun
from falaj.records.governance.objects import Cursor, Page, PageSize, StoredObject
from falaj.records.names import BlobRef, ObjectId, Reference, RefersTo, WorkspaceRef
from falaj.records.registry import AliasName, ModelVersionRef

EndpointRef = Annotated[Reference, RefersTo("endpoint")]


class Pipelines:
    """Pipelines retrain models; canaries try versions beside the one that serves."""

    def __init__(self, gate: Gate, blobs: BlobContents, intents: IntentQueue) -> None:
        self.gate = gate
        self._blobs = blobs
        self._intents = intents

    @operation("pipelines.apply", resource="workspace")
    def apply(
        self, pipeline: Pipeline, *, code: BlobRef | None = None, workspace: WorkspaceRef | None = None
    ) -> StoredPipeline:
        """Create or update a pipeline; `code` is the archive of its job's code.

        When drift or the schedule starts it, it acts on behalf of the user who applied it last.
        """
        call = current_call()
        _require_full_rights(call, pipeline)
        _require(call, pipeline)
        archive = None if code is None else call.object("code")
        if archive is not None:
            self._blobs.keep(call.tx, self._blobs.facts(call.tx, archive.id), now=call.now)
        row = {
            "definition": pipeline.model_dump(mode="json"),
            "code": None if archive is None else archive.id,
            "applied_by": call.caller.id,
        }
        found = objects.by_name(call.tx, workspace=call.target.id, kind="pipeline", name=pipeline.name)
        if found is None:
            found = call.create("pipeline", pipeline.name, workspace=call.target)
            call.tx.execute(insert(pipelines), {"id": found.id, **row})
        else:
            call.tx.execute(update(pipelines).where(pipelines.c.id == found.id).values(**row))
        return pipeline_record(call.tx, found)

    @operation("pipelines.list", resource="workspace", mode=Mode.READ)
    def list(
        self, *, workspace: WorkspaceRef | None = None, after: Cursor = "", limit: PageSize = 100
    ) -> Page[StoredPipeline]:
        """List the pipelines of a workspace, each with its last start."""
        return list_workspace_page(self.gate, "pipeline", pipeline_record, after=after, limit=limit)

    @operation("pipelines.show", resource="pipeline", mode=Mode.READ)
    def show(self, pipeline: PipelineRef) -> StoredPipeline:
        """Show a pipeline, and its last start."""
        return pipeline_record(current_call().tx, current_call().target)

    @operation("pipelines.start", resource="pipeline")
    def start(self, pipeline: PipelineRef, *, cause: Cause = "person") -> WorkflowRun:
        """Start a pipeline: training set, job, version, canary, then promotion or rollback."""
        call = current_call()
        row = _row(call.tx, call.target.id)
        if is_unfinished(call.tx, row.work):
            raise Conflict(
                f"pipeline {call.target.name} is at work already: falaj workflows watch {row.work}"
            )
        home = objects.by_id(call.tx, call.target.workspace)
        given = {
            "pipeline": row.definition,
            "code": row.code,
            "workspace": home.name if home else call.target.workspace,
            "cause": cause,
        }
        requested = self._intents.request(call, "pipelines.retrain", given)
        started = {"started_at": call.now, "cause": cause, "work": requested.id}
        call.tx.execute(update(pipelines).where(pipelines.c.id == call.target.id).values(**started))
        return requested

    @operation("pipelines.canary", resource="endpoint")
    def canary(
        self,
        endpoint: EndpointRef,
        *,
        model: ModelVersionRef,
        alias: AliasName | None = None,
        plan: Canary = Canary(),  # noqa: B008 - frozen
    ) -> WorkflowRun:
        """Serve a version to a share of requests; then route all to it and move `alias` to it, or roll back."""
        call = current_call()
        given = {
            "endpoint": call.target.id,
            "version": call.object("model").id,
            "alias": alias,
            "canary": plan.model_dump(mode="json"),
            "approval_within": Pipeline.model_fields["approval_within"].default.total_seconds(),
        }
        return self._intents.request(call, "pipelines.canary", given)


def pipeline_record(tx: Transaction, found: StoredObject) -> StoredPipeline:
    """Return the record of a pipeline."""
    row = _row(tx, found.id)
    person = objects.ever(tx, row.applied_by)
    return StoredPipeline(
        id=found.id,
        workspace=found.workspace,
        definition=Pipeline.model_validate(row.definition),
        code=row.code,
        applied_by=row.applied_by if person is None else person.name,
        started_at=row.started_at,
        cause=row.cause,
        work=row.work,
        created_at=found.created_at,
    )


def idle(tx: Transaction) -> list[tuple[StoredPipeline, ObjectId]]:
    """Return the pipelines that are not at work, and the user whom each acts for."""
    query = (
        select(pipelines.c.id, pipelines.c.applied_by)
        .select_from(pipelines.outerjoin(work, work.c.id == pipelines.c.work))
        .where(work.c.id.is_(None) | work.c.state.not_in(UNFINISHED))
    )
    rows = [(objects.by_id(tx, ident), behalf) for ident, behalf in tx.execute(query).all()]
    return [(pipeline_record(tx, found), behalf) for found, behalf in rows if found is not None]


def _require_full_rights(call: Call, pipeline: Pipeline) -> None:
    """Raise Denied for a limited token: a triggered pipeline has all the rights of the user who applied it."""
    limited = call.caller.workspace is not None or call.caller.actions is not None
    if limited and (pipeline.on_drift or pipeline.every is not None):
        raise Denied(
            f"pipeline {pipeline.name} would start by itself, with more rights than this token has; "
            "apply it with a token without limits, or with on_drift off and without every"
        )


def _require(call: Call, pipeline: Pipeline) -> None:
    """Raise NotFound unless the objects that a pipeline names exist and are of the right kinds."""
    wanted = [("endpoint", pipeline.endpoint), ("view", pipeline.spine)]
    wanted += [("view", view) for view in pipeline.views]
    for kind, name in wanted:
        objects.resolve(call.tx, name, kind=kind, workspace=call.target.name)


@dataclass(frozen=True)
class PipelineRow:
    """A row of the table of pipelines."""

    id: ObjectId
    definition: JsonObject
    code: ObjectId | None
    applied_by: ObjectId
    started_at: datetime | None
    cause: Cause | None
    work: ObjectId | None


def _row(tx: Transaction, ident: ObjectId) -> PipelineRow:
    found = tx.execute(select(pipelines).where(pipelines.c.id == ident)).one()
    return PipelineRow(**found._asdict())
