"""Operations on pipelines: define how a model is retrained, start that, and run canaries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Annotated, Any

from pydantic import Field
from sqlalchemy import insert, select, update

from falaj.control.pipelines.progress import CanaryReplays
from falaj.control.tables import pipelines, work
from falaj.control.workflows.service import IntentQueue
from falaj.control.workflows.store import UNFINISHED, is_unfinished, work_row
from falaj.errors import Conflict, Denied
from falaj.governance import objects
from falaj.governance.blobs.contents import BlobContents
from falaj.governance.operations.call import Call, current_call
from falaj.governance.operations.gate import Gate
from falaj.governance.operations.operation import Mode, operation
from falaj.governance.operations.pagination import list_workspace_page
from falaj.ports.metadata import Transaction
from falaj.ports.workflows import JsonObject
from falaj.records.control.pipelines import (
    Canary,
    CanaryPlan,
    CanaryProgress,
    CanaryTraffic,
    CanaryVerdict,
    Cause,
    Pipeline,
    PipelineRef,
    StoredPipeline,
)
from falaj.records.control.workflows import WorkflowRun
from falaj.records.governance.identity import Role
from falaj.records.governance.objects import Cursor, Page, PageSize, StoredObject
from falaj.records.names import BlobRef, ObjectId, Reference, RefersTo, WorkflowRef, WorkspaceRef
from falaj.records.registry import AliasName, ModelVersionRef
from falaj.serving.store import endpoint_record
from falaj.serving.store import stats as endpoint_stats

EndpointRef = Annotated[Reference, RefersTo("endpoint")]
Worse = Annotated[tuple[Annotated[float, Field(ge=0, le=1000)], ...], Field(min_length=1, max_length=20)]

_MARKS = (
    "SELECT p.id, p.work, w.state, w.step, w.doing FROM control_pipelines p "
    "LEFT JOIN control_work w ON w.id = p.work WHERE p.id"
)


class Pipelines:
    """Pipelines retrain models; canaries try versions beside the one that serves."""

    def __init__(self, gate: Gate, blobs: BlobContents, intents: IntentQueue) -> None:
        self.gate = gate
        self._blobs = blobs
        self._intents = intents
        self._replays = CanaryReplays()

    @operation("pipelines.apply", resource="workspace")
    def apply(
        self, pipeline: Pipeline, *, code: BlobRef | None = None, workspace: WorkspaceRef | None = None
    ) -> StoredPipeline:
        """Create or update a pipeline; `code` is the archive of its job's code.

        When drift or the schedule starts it, it acts on behalf of the user who applied it last.
        """
        call = current_call()
        _require_full_rights(call, pipeline)
        self._require(call, pipeline)
        archive = None if code is None else call.object("code")
        if archive is not None:
            self._blobs.keep(call.tx, self._blobs.facts(call.tx, archive.id), now=call.now)
        row = {
            "definition": pipeline.model_dump(mode="json"),
            "code": None if archive is None else archive.id,
            "applied_by": call.caller.id,
        }
        found = self.gate.named(call, "pipeline", pipeline.name, workspace=call.target)
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
        return list_workspace_page(
            self.gate,
            "pipeline",
            lambda tx, page: [pipeline_record(tx, each) for each in page],
            after=after,
            limit=limit,
        )

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
        """Serve a version to a share of requests; then route all to it and move `alias` to it, or keep the champion.

        It is promoted if it is shown to be within the margins of `plan`, rolled back if it is shown to be worse, and
        released as undecided if neither is shown in time. pipelines.plan_canary tells how long that takes.
        """
        call = current_call()
        given = {
            "endpoint": call.target.id,
            "version": call.object("model").id,
            "alias": alias,
            "canary": plan.model_dump(mode="json"),
            "approval_within": Pipeline.model_fields["approval_within"].default.total_seconds(),
        }
        return self._intents.request(call, "pipelines.canary", given)

    @operation("pipelines.conclude", resource="endpoint", allow=Role.OPERATOR, internal=True, emits=True)
    def conclude(
        self, endpoint: EndpointRef, *, model: ModelVersionRef, work: WorkflowRef, verdict: CanaryVerdict
    ) -> CanaryVerdict:
        """Record how the canary of a version ended. The controller calls this.

        The event tells the verdict, the person who requested the canary or applied the pipeline, and about how many
        more requests or labels would decide.
        """
        call = current_call()
        behalf = work_row(call.tx, call.object("work").id).behalf
        person = objects.ever(call.tx, behalf)
        told = verdict.model_dump(mode="json", include={"outcome", "words"})
        call.details["verdict"] = verdict.outcome.value
        call.event_data |= told | {
            "model": call.object("model").name,
            "responsible": behalf if person is None else person.name,
            "more": {each.metric: each.more for each in verdict.evidence if each.more is not None},
        }
        return verdict

    @operation("pipelines.canary_progress", resource="endpoint", mode=Mode.READ)
    def canary_progress(self, endpoint: EndpointRef) -> CanaryProgress:
        """Show the evidence on versions that answer side by side, and the verdict on the last canary."""
        call = current_call()
        home = objects.by_id(call.tx, call.target.workspace)
        return self._replays.progress(call.tx, call.target, "" if home is None else home.name)

    @operation("pipelines.plan_canary", resource="endpoint", mode=Mode.READ)
    def plan_canary(
        self,
        endpoint: EndpointRef,
        *,
        plan: Canary = Canary(),  # noqa: B008 - frozen
        traffic: CanaryTraffic = CanaryTraffic(),  # noqa: B008 - frozen
        worse: Worse = (0.0, 0.5, 1.0, 2.0, 4.0),
    ) -> CanaryPlan:
        """Compute how soon a canary would decide, and with which power; nothing is started.

        `worse`: how much worse the challenger is, in multiples of each margin; 0 is one that equals the champion.
        """
        from falaj.control.pipelines import power

        call = current_call()
        record = endpoint_record(call.tx, call.target)
        champion = max(record.routes, key=lambda route: route.weight).version
        since = max(call.now - timedelta(days=1), record.created_at)
        hours = max((call.now - since) / timedelta(hours=1), 1 / 60)
        recent = {each.version: each for each in endpoint_stats(call.tx, record.id, since=since)}
        hourly = sum(each.requests for each in recent.values()) / hours
        ever = {each.version: each for each in endpoint_stats(call.tx, record.id, since=None)}
        return power.plan_canary(
            record.name,
            plan,
            given=traffic,
            seen=power.seen_traffic(ever.get(champion), requests_per_hour=hourly),
            scoring=record.scoring,
            worse=worse,
        )

    def _require(self, call: Call, pipeline: Pipeline) -> None:
        """Raise NotFound unless the objects that a pipeline names are there, and the caller may see them."""
        wanted = [("endpoint", pipeline.endpoint), ("view", pipeline.spine)]
        wanted += [("view", view) for view in pipeline.views]
        if pipeline.predicting is not None:
            wanted += [
                ("view", view) for view in (pipeline.predicting.view, pipeline.predicting.into) if view
            ]
        for kind, name in wanted:
            found = objects.resolve(call.tx, name, kind=kind, workspace=call.target.name)
            if not self.gate.visible([found]):
                raise objects.unknown(name, kind)


def pipeline_record(tx: Transaction, found: StoredObject) -> StoredPipeline:
    """Return the record of a pipeline."""
    row = _row(tx, found.id)
    person = objects.ever(tx, row.applied_by)
    ended = tx.execute(select(work.c.result).where(work.c.id == row.work)).scalar_one_or_none()
    return StoredPipeline(
        id=found.id,
        workspace=found.workspace,
        definition=Pipeline.model_validate(row.definition),
        code=row.code,
        applied_by=row.applied_by if person is None else person.name,
        started_at=row.started_at,
        cause=row.cause,
        work=row.work,
        verdict=((ended or {}).get("verdict") or {}).get("words"),
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


def change_marks(tx: Transaction, idents: Sequence[str]) -> list[tuple[Any, ...]]:
    """Return, for each pipeline, what differs once its workflow is at another step or in another state."""
    return objects.rows_by_ids(tx, _MARKS, idents)


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
