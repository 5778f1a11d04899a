"""Operations on runs: start, log, end, search, read, delete and restore them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Annotated, Any

from pydantic import AwareDatetime, Field, TypeAdapter

from falaj.errors import Conflict, Fault, InvalidInput, KeyReused, NotFound
from falaj.governance import objects
from falaj.governance.blobs.service import blob_record
from falaj.governance.lineage import graph
from falaj.governance.operations.call import Call, current_call
from falaj.governance.operations.gate import Gate
from falaj.governance.operations.operation import ArrowStream, ByteStream, Mode, operation
from falaj.governance.search.queries import search, search_scope
from falaj.ports.metadata import Transaction
from falaj.ports.parsers import ParserPool
from falaj.records.governance.identity import Role
from falaj.records.governance.objects import Cursor, Page, PageSize, StoredObject
from falaj.records.names import AnyRef, BlobRef, ObjectId, WorkspaceRef, ZoneName
from falaj.records.tracking import (
    CURVE_POINTS,
    HISTORY_POINTS,
    INT64_MAX,
    INT64_MIN,
    PREVIEW_ROWS,
    AnyPoints,
    Artifact,
    ArtifactEntry,
    ArtifactFolder,
    ArtifactPath,
    ArtifactTable,
    BatchId,
    BatchResult,
    DatasetInputs,
    ExperimentRef,
    ExperimentText,
    FilterText,
    Key,
    Keys,
    Lifecycle,
    ListedRun,
    LogResult,
    MetricCurve,
    MetricHistory,
    MetricPoint,
    ModelLinks,
    ModelText,
    Orders,
    Outcome,
    Params,
    Points,
    RemovedArtifacts,
    Run,
    RunCleanup,
    RunDetails,
    RunName,
    RunParts,
    RunRef,
    RunStatus,
    Step,
    Tags,
    UserName,
)
from falaj.tracking import histories, metrics, retention, store
from falaj.tracking.artifact_tables import read_preview
from falaj.tracking.artifacts import ArtifactBlobs, Artifacts, require_free
from falaj.tracking.experiments import find_or_create
from falaj.tracking.search import RUNS
from falaj.tracking.tables import runs as runs_table
from falaj.tracking.tables import tags as tags_table

Offset = Annotated[int, Field(ge=0, le=2**62)]
OtherRuns = Annotated[tuple[RunRef, ...], Field(max_length=99)]
HistorySize = Annotated[int, Field(ge=1, le=HISTORY_POINTS)]
CurveSize = Annotated[int, Field(ge=2, le=CURVE_POINTS)]

MOST_POINTS = 500_000
"""Points of all curves of one call."""

_points = TypeAdapter(tuple[MetricPoint, ...])
_ATTRIBUTED = {"model", "dataset", "dataset_digest"}


class Runs:
    """Runs of experiments, with their parameters, tags, metrics, datasets and artifacts."""

    def __init__(self, gate: Gate, blobs: ArtifactBlobs, *, parsers: ParserPool, kept: timedelta) -> None:
        """Deleted runs are removed for good once they were deleted for so long: `kept`."""
        self.gate = gate
        self._artifacts = Artifacts(gate, blobs)
        self._parsers = parsers
        self._kept = kept

    @operation("runs.start", resource="workspace")
    def start(
        self,
        experiment: ExperimentText,
        *,
        name: RunName | None = None,
        params: Params | None = None,
        tags: Tags | None = None,
        parent: RunRef | None = None,
        status: RunStatus = RunStatus.RUNNING,
        started_at: AwareDatetime | None = None,
        user: UserName | None = None,
        workspace: WorkspaceRef | None = None,
        sources: tuple[AnyRef, ...] = (),
    ) -> Run:
        """Start a run of an experiment, which is created if there is none of that name.

        `sources` are the objects that the run reads; their restrictions flow into it, as do those of its `parent`.
        """
        call = current_call()
        above = call.object("parent") if parent else None
        if status.ended:
            raise InvalidInput.at("status", given=status, allowed="running or scheduled")
        home = find_or_create(self.gate, call, experiment, home=call.target)
        new = call.create("run", workspace=_home_of(call, home))
        started = store.create_run(
            call.tx,
            new,
            experiment=home.id,
            name=name,
            status=status,
            parent=None if above is None else above.id,
            user=user,
            started_at=started_at,
        )
        store.add_params(call.tx, new.id, params or {})
        store.put_values(call.tx, tags_table, new.id, tags or {})
        return started

    @operation("runs.show", resource="run", mode=Mode.READ)
    def show(self, run: RunRef) -> RunDetails:
        """Show a run with its parameters, tags, datasets, artifacts and summaries of its metrics."""
        return store.details(current_call().tx, current_call().target)

    @operation("runs.list", resource="workspace", mode=Mode.READ)
    def list(
        self,
        *,
        experiments: tuple[ExperimentRef, ...] = (),
        where: FilterText = "",
        order_by: Orders = (),
        view: Lifecycle = "active",
        show: tuple[RunParts, ...] = (),
        metrics: tuple[Key, ...] = (),
        workspace: WorkspaceRef | None = None,
        after: Cursor = "",
        limit: PageSize = 100,
    ) -> Page[ListedRun]:
        """Search the runs of experiments, or of the whole workspace; the newest come first unless `order_by` is given.

        `where` is like "metrics.auc > 0.9 and params.lr = '0.1'". `show` adds parameters, tags and so on to each run;
        `metrics` adds these metrics only.
        """
        call = current_call()
        named = call.referred["experiments"] if experiments else []
        page = search(
            self.gate,
            RUNS,
            search_scope(RUNS, named, call.target, of=runs_table.c.experiment),
            where=where,
            order_by=order_by,
            view=view,
            after=after,
            limit=limit,
        )
        return Page(items=store.listed_runs(call.tx, page.items, show=show, keys=metrics), next=page.next)

    @operation("runs.update", resource="run")
    def update(
        self,
        run: RunRef,
        *,
        name: RunName | None = None,
        status: RunStatus | None = None,
        ended_at: AwareDatetime | None = None,
    ) -> Run:
        """Rename a run, or change its status: one that has ended may go on, unless it was the run of a job."""
        call = current_call()
        store.require_active(call.target.id, store.lock(call.tx, call.target.id))
        values: dict[str, Any] = {} if name is None else {"name": name}
        if status is not None:
            ended = (ended_at or call.now) if status.ended else None
            values |= {"status": status, "ended_at": ended}
        elif ended_at is not None:
            values |= {"ended_at": ended_at}
        if values:
            store.change_run(call.tx, call.target.id, **values)
        return store.run_record(call.tx, call.target)

    @operation("runs.end", resource="run")
    def end(self, run: RunRef, *, status: Outcome = "finished") -> Run:
        """End a run that has not ended."""
        call = current_call()
        state = store.require_active(call.target.id, store.lock(call.tx, call.target.id))
        if state.status.ended:
            raise Conflict(f"run {call.target.id} has ended: {state.status}; see runs.update")
        store.end_run(call.tx, call.target.id, status=status, now=call.now)
        return store.run_record(call.tx, call.target)

    @operation("runs.delete", resource="run", confirm=True)
    def delete(self, run: RunRef) -> Run:
        """Delete a run. It can be restored until it is removed for good."""
        call = current_call()
        state = store.lock(call.tx, call.target.id)
        if state is not None and state.deleted_at is None:
            store.change_run(call.tx, call.target.id, deleted_at=call.now)
        return store.run_record(call.tx, call.target)

    @operation("runs.restore", resource="run")
    def restore(self, run: RunRef) -> Run:
        """Restore a deleted run."""
        call = current_call()
        state = store.lock(call.tx, call.target.id)
        if state is not None and state.deleted_at is not None:
            store.change_run(call.tx, call.target.id, deleted_at=None)
        return store.run_record(call.tx, call.target)

    @operation("runs.cleanup", resource="platform", allow=Role.OPERATOR)
    def cleanup(self) -> RunCleanup:
        """Remove some of the runs, logged models and experiments for good that were deleted long ago.

        The controller calls this periodically; `tracking.keep_deleted` of falaj.toml is how long they are kept.
        """
        return retention.remove_deleted(current_call(), before=current_call().now - self._kept)

    # -------------------------------------------------------------------------------------- logging

    @operation("runs.log_batch", resource="run", mode=Mode.HOT, allow=Role.DEVELOPER)
    def log_batch(
        self,
        run: RunRef,
        *,
        metrics: AnyPoints = (),
        params: Params | None = None,
        tags: Tags | None = None,
        batch: BatchId | None = None,
    ) -> BatchResult:
        """Add metric points, parameters and tags to a run in one transaction: all of them, or none.

        A `batch` whose points are sent again gets its first answer for them.
        """
        call = current_call()
        ident = ObjectId(str(call.hot_id))

        def log(tx: Transaction) -> BatchResult:
            points = self._log_points(call, tx, run, ident, metrics, batch) if metrics else None
            if points is None:
                store.require_active(ident, store.lock(tx, ident))
            new_params = store.add_params(tx, ident, params or {})
            new_tags = store.put_run_tags(tx, ident, tags or {})
            stored = points.stored if points is not None else 0
            given = len(metrics) + len(params or {}) + len(tags or {})
            return BatchResult(
                run=ident,
                metrics=stored,
                params=new_params,
                tags=new_tags,
                repeated=given - stored - new_params - new_tags,
            )

        if params or tags:  # these rows are recorded one by one in the audit log
            return self.gate.commit(call, lambda: log(call.tx))
        with self.gate.database.write() as tx:
            return log(tx)

    @operation("runs.log_metrics", resource="run", mode=Mode.HOT, allow=Role.DEVELOPER)
    def log_metrics(self, run: RunRef, points: Points, *, batch: BatchId | None = None) -> LogResult:
        """Add up to 10,000 metric points to a run; they are durable once the call returns.

        A point that is equal to a stored one in key, step, timestamp and value is not stored again. A `batch` that is
        sent again gets its first answer: name batches whose points have no timestamps.
        """
        call = current_call()
        with self.gate.database.write() as tx:
            return self._log_points(call, tx, run, ObjectId(str(call.hot_id)), points, batch)

    def _log_points(
        self,
        call: Call,
        tx: Transaction,
        run: str,
        ident: ObjectId,
        points: Points,
        batch: str | None,
    ) -> LogResult:
        state = store.lock(tx, ident)
        if state is None:
            raise objects.unknown(run, "run")
        if batch is not None and (answer := _earlier(tx, ident, batch, points)) is not None:
            return answer
        store.require_active(ident, state)
        stored = metrics.add_points(tx, ident, points, now=call.now)
        named = [each for each in points if each.model is not None] if isinstance(points, tuple) else []
        if named:
            models = self._models(call, tx, [str(each.model) for each in named])
            metrics.add_model_metrics(tx, ident, named, models, now=call.now)
        logged = LogResult(run=ident, stored=stored, repeated=len(points) - stored)
        if batch is not None:
            counts = {"stored": logged.stored, "repeated": logged.repeated}
            metrics.add_batch(tx, ident, batch, digest=_digest(points), **counts)
        return logged

    def _models(self, call: Call, tx: Transaction, references: Sequence[str]) -> dict[str, ObjectId]:
        """Return the ids of logged models that the caller may see, by what they were called."""
        found = {}
        for reference in dict.fromkeys(references):
            model = objects.by_id(tx, reference)
            visible = model is not None and self.gate.authorizer.sees(tx, call.caller, model)
            if model is None or model.kind != "logged_model" or not visible:
                raise objects.unknown(reference, "logged_model")
            found[reference] = model.id
        return found

    @operation("runs.log_params", resource="run")
    def log_params(self, run: RunRef, params: Params) -> LogResult:
        """Add parameters to a run; a parameter that it has cannot be changed."""
        call = current_call()
        store.require_active(call.target.id, store.lock(call.tx, call.target.id))
        new = store.add_params(call.tx, call.target.id, params)
        return LogResult(run=call.target.id, stored=new, repeated=len(params) - new)

    @operation("runs.set_tags", resource="run")
    def set_tags(self, run: RunRef, tags: Tags) -> LogResult:
        """Set tags of a run; existing tags are replaced. The tag mlflow.runName is the name of the run."""
        call = current_call()
        state = store.lock(call.tx, call.target.id)
        require_not_deleted(call.target, state)
        new = store.put_run_tags(call.tx, call.target.id, tags)
        return LogResult(run=call.target.id, stored=new, repeated=len(tags) - new)

    @operation("runs.log_model", resource="run")
    def log_model(self, run: RunRef, model: ModelText) -> LogResult:
        """Add the description of a model, as JSON, to those that the run has in its tag mlflow.log-model.history."""
        call = current_call()
        require_not_deleted(call.target, store.lock(call.tx, call.target.id))
        store.add_to_history(call.tx, call.target.id, model)
        return LogResult(run=call.target.id, stored=1)

    @operation("runs.delete_tags", resource="run")
    def delete_tags(self, run: RunRef, keys: Keys) -> LogResult:
        """Delete tags of a run; NotFound if it has none of them."""
        call = current_call()
        require_not_deleted(call.target, store.lock(call.tx, call.target.id))
        return store.delete_tags(call, keys)

    @operation("runs.log_inputs", resource="run")
    def log_inputs(self, run: RunRef, *, datasets: DatasetInputs = (), models: ModelLinks = ()) -> LogResult:
        """Record datasets and logged models that a run read."""
        call = current_call()
        state = store.require_active(call.target.id, store.lock(call.tx, call.target.id))
        stored = store.add_inputs(call.tx, call.target.id, state.experiment, datasets)
        stored += self._link(call, models, role="read")
        given = len(datasets) + len(models)
        return LogResult(run=call.target.id, stored=stored, repeated=given - stored)

    @operation("runs.log_outputs", resource="run")
    def log_outputs(self, run: RunRef, models: ModelLinks) -> LogResult:
        """Record logged models that a run made."""
        call = current_call()
        store.require_active(call.target.id, store.lock(call.tx, call.target.id))
        stored = self._link(call, models, role="made")
        return LogResult(run=call.target.id, stored=stored, repeated=len(models) - stored)

    def _link(self, call: Call, links: ModelLinks, *, role: str) -> int:
        known = self._models(call, call.tx, [each.model for each in links])
        return sum(
            store.add_model_link(call.tx, call.target.id, known[each.model], role=role, step=each.step)
            for each in links
        )

    # ------------------------------------------------------------------------------------ histories

    @operation("runs.metrics", resource="run", mode=Mode.FREE)
    def metrics(self, run: RunRef, key: Key, *, from_step: Step = INT64_MIN) -> ArrowStream:
        """Stream the history of one metric by step and time: columns step, timestamp and value."""
        call = current_call()
        with self.gate.database.read() as tx:
            ident = metrics.series_id(tx, call.target.id, key)
        if ident is None:
            raise NotFound(f"run {call.target.id} has no metric {key!r}")
        return histories.stream(self.gate.database, ident, from_step=from_step)

    @operation("runs.history", resource="run", mode=Mode.READ, exports=True)
    def history(
        self,
        run: RunRef,
        key: Key,
        *,
        others: OtherRuns = (),
        from_step: Step = INT64_MIN,
        after: Cursor = "",
        limit: HistorySize = 1000,
    ) -> Page[MetricHistory]:
        """Return the points of one metric of a run, and of `others`, by step and time, one run after another."""
        call = current_call()
        idents = _several(call, call.referred["others"] if others else [])
        position = self.gate.cursors.read(call, after)
        points, following = histories.page(
            call.tx, idents, key, from_step=from_step, position=position, limit=limit
        )
        cursor = None if following is None else self.gate.cursors.write(call, following)
        return Page(items=points, next=cursor)

    @operation("runs.curves", resource="run", mode=Mode.READ, exports=True)
    def curves(
        self,
        run: RunRef,
        keys: Annotated[tuple[Key, ...], Field(min_length=1, max_length=100)],
        *,
        others: OtherRuns = (),
        points: CurveSize = 1000,
        from_step: Step = INT64_MIN,
        to_step: Step = INT64_MAX,
    ) -> tuple[MetricCurve, ...]:
        """Return metrics of a run, and of `others`, for a plot: each with at most so many points, and all its peaks."""
        call = current_call()
        idents = _several(call, call.referred["others"] if others else [])
        if len(idents) * len(keys) * points > MOST_POINTS:
            raise InvalidInput.at(
                "points",
                given=f"{len(idents)} runs × {len(keys)} metrics × {points}",
                allowed=f"at most {MOST_POINTS} points together",
            )
        return histories.curves(call.tx, idents, keys, limit=points, from_step=from_step, to_step=to_step)

    # ------------------------------------------------------------------------------------ artifacts

    @operation("runs.log_artifact", resource="run")
    def log_artifact(self, run: RunRef, path: ArtifactPath, blob: BlobRef) -> Artifact:
        """Attach a committed blob to a run, under a path.

        The blob must have the run among its sources, or be a source of the run, so that lineage is complete.
        """
        call = current_call()
        found, target = call.object("blob"), call.target
        store.require_active(target.id, store.lock(call.tx, target.id))
        if (earlier := store.artifact_at(call.tx, target.id, path)) is not None:
            if earlier.blob != found.id:
                raise Conflict(f"run {target.id} has another artifact at {path!r}: {earlier.blob}")
            return earlier
        require_free(call.tx, target.id, path)
        _require_related(call.tx, target, found)
        bytes_ = blob_record(call.tx, found)
        if not bytes_.committed:
            raise Conflict(f"blob {found.name} is staged, and would expire; give it a name with blobs.commit")
        new = Artifact(path=path, blob=found.id, size_bytes=bytes_.size_bytes, attached_at=call.now)
        store.add_artifact(call.tx, target.id, new)
        return new

    @operation("runs.upload_artifact", resource="run", mode=Mode.LATE)
    def upload_artifact(
        self, run: RunRef, path: ArtifactPath, data: ByteStream, *, zone: ZoneName | None = None
    ) -> Artifact:
        """Store bytes, encrypted, as an artifact of a run under a path; an earlier one there is replaced."""
        return self._artifacts.upload(current_call(), path, data)

    @operation("runs.artifacts", resource="run", mode=Mode.READ)
    def artifacts(
        self, run: RunRef, *, folder: ArtifactFolder = "", after: Cursor = "", limit: PageSize = 1000
    ) -> Page[ArtifactEntry]:
        """List the files and folders in a folder of a run's artifacts."""
        return self._artifacts.entries(current_call(), folder=folder, after=after, limit=limit)

    @operation("runs.read_artifact", resource="run", mode=Mode.FREE)
    def read_artifact(
        self, run: RunRef, path: ArtifactPath, *, offset: Offset = 0, length: Offset | None = None
    ) -> ByteStream:
        """The bytes of an artifact, or a range of them."""
        return self._artifacts.read(current_call(), path, offset=offset, length=length)

    @operation("runs.preview_artifact", resource="run", mode=Mode.FREE, exports=True)
    def preview_artifact(
        self, run: RunRef, path: ArtifactPath, *, rows: Annotated[int, Field(ge=1, le=PREVIEW_ROWS)] = 50
    ) -> ArtifactTable:
        """Show the first rows of an artifact that is a Parquet or Arrow file, as text."""
        call = current_call()
        source = self._artifacts.source(call, path)
        options = {"path": path, "rows": rows}
        found = self._parsers.parse("first_rows", [source], options, owner=call.caller.id)
        return read_preview(found, path=path, rows=rows)

    @operation("runs.delete_artifact", resource="run", confirm=True)
    def delete_artifact(self, run: RunRef, path: ArtifactPath) -> RemovedArtifacts:
        """Delete an artifact, or a folder of artifacts. A blob with a name of its own stays."""
        return self._artifacts.delete(current_call(), path)


def _several(call: Call, others: Sequence[StoredObject]) -> list[ObjectId]:
    """Return the ids of the run that the call acts on and of others, each once."""
    return [*dict.fromkeys(each.id for each in (call.target, *others))]


def require_not_deleted(found: StoredObject, state: store.RunState | None) -> None:
    if state is not None and state.deleted_at is not None:
        raise Conflict(f"run {found.id} is deleted; restore it first: runs.restore")


def _home_of(call: Call, experiment: StoredObject) -> StoredObject:
    """Return the workspace of an experiment; one that is named by its id must be in that of the call."""
    if experiment.workspace != call.target.id:
        raise InvalidInput.at(
            "experiment",
            given=experiment.id,
            allowed="an experiment of the workspace",
            fix="name its workspace",
        )
    return call.target


def _require_related(tx: Transaction, run: StoredObject, blob: StoredObject) -> None:
    comes_from_run = run.id in graph.walk(tx, blob.id, up=True, depth=None)
    if not comes_from_run and blob.id not in graph.walk(tx, run.id, up=True, depth=None):
        fault = Fault(
            where="blob",
            given=blob.address,
            allowed="a blob that derives from the run, or a source of the run",
            fix=f'upload it with sources=["{run.id}"]',
        )
        raise Conflict(f"lineage does not connect {blob.address} with run {run.id}", faults=[fault])


def _earlier(tx: Transaction, run: ObjectId, batch: str, points: Points) -> LogResult | None:
    """Return the answer that the batch got when it was sent before, or None."""
    row = metrics.batch(tx, run, batch)
    if row is None:
        return None
    if row.digest != _digest(points):
        raise KeyReused(f"batch {batch!r} of run {run} was sent before, with other points")
    return LogResult(run=run, stored=row.stored, repeated=row.repeated)


def _digest(given: Points) -> str:
    """Return the digest of a batch; without models it is as it was before points could name them."""
    points = tuple(given)
    named = any(each.model is not None or each.dataset is not None for each in points)
    exclude: Any = None if named else {"__all__": _ATTRIBUTED}
    return hashlib.sha256(_points.dump_json(points, exclude=exclude)).hexdigest()
