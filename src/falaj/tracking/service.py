"""Operations on runs: start, log, end, list and read them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from pydantic import TypeAdapter

from falaj.errors import Conflict, Fault, KeyReused, NotFound
from falaj.governance import objects
from falaj.governance.blobs.service import blob_record
from falaj.governance.lineage import graph
from falaj.governance.operations.call import Call, current_call
from falaj.governance.operations.gate import Gate
from falaj.governance.operations.operation import ArrowStream, Mode, operation
from falaj.governance.operations.pagination import visible_page
from falaj.ports.metadata import Database, Transaction
from falaj.records.governance.identity import Role
from falaj.records.governance.objects import Cursor, Page, PageSize, StoredObject
from falaj.records.names import AnyRef, BlobRef, Name, ObjectId, WorkspaceRef, new_id
from falaj.records.tracking import (
    INT64_MIN,
    Artifact,
    ArtifactPath,
    BatchId,
    Condition,
    ExperimentRef,
    Key,
    LogResult,
    MetricPoint,
    Outcome,
    Params,
    Points,
    Run,
    RunDetails,
    RunName,
    RunRef,
    RunStatus,
    Step,
    Tags,
)
from falaj.tracking import store
from falaj.tracking.series import Point
from falaj.tracking.tables import params as params_table
from falaj.tracking.tables import tags as tags_table

_points = TypeAdapter(tuple[MetricPoint, ...])


class Runs:
    """Runs of experiments, with their parameters, tags, metrics and artifacts."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    @operation("runs.start", resource="workspace")
    def start(
        self,
        experiment: Name,
        *,
        name: RunName | None = None,
        params: Params | None = None,
        tags: Tags | None = None,
        workspace: WorkspaceRef | None = None,
        sources: tuple[AnyRef, ...] = (),
    ) -> Run:
        """Start a run of an experiment, which is created if it does not exist.

        `sources` are the objects that the run reads; their restrictions flow into it.
        """
        call = current_call()
        home = self._experiment(call, experiment, home=call.target)
        new = call.create("run", workspace=call.target)
        started = store.create_run(call.tx, new, experiment=home.id, name=name)
        store.put_values(call.tx, params_table, new.id, _as_text(params or {}))
        store.put_values(call.tx, tags_table, new.id, tags or {})
        return started

    @operation("runs.show", resource="run", mode=Mode.READ)
    def show(self, run: RunRef) -> RunDetails:
        """Show a run with its parameters, tags, artifacts and summaries of its metrics."""
        return store.details(current_call().tx, current_call().target)

    @operation("runs.list", resource="experiment", mode=Mode.READ)
    def list(
        self,
        experiment: ExperimentRef,
        *,
        status: RunStatus | None = None,
        where: tuple[Condition, ...] = (),
        after: Cursor = "",
        limit: PageSize = 100,
    ) -> Page[Run]:
        """List the runs of an experiment that meet every condition, newest first."""
        tx, target = current_call().tx, current_call().target
        page = visible_page(
            self.gate,
            lambda visible, position, count: store.matching(
                tx, target.id, [*visible], status=status, conditions=where, before=position, limit=count
            ),
            after=after,
            limit=limit,
            kinds=["run"],
            workspace=target.workspace,
        )
        return Page(items=tuple(store.listed_run(*each) for each in page.items), next=page.next)

    @operation("runs.log_params", resource="run")
    def log_params(self, run: RunRef, params: Params) -> LogResult:
        """Add parameters to a run that has not ended; a parameter that it has cannot be changed."""
        call = current_call()
        _require_running(call.target.id, store.lock(call.tx, call.target.id))
        given, known = _as_text(params), store.values_of(call.tx, params_table, call.target.id)
        changed = [key for key, value in given.items() if known.get(key, value) != value]
        if changed:
            faults = [Fault(where=f"params.{key}", given=given[key], allowed=known[key]) for key in changed]
            raise Conflict(f"a parameter cannot be changed: {', '.join(changed)}", faults=faults)
        new = {key: value for key, value in given.items() if key not in known}
        store.put_values(call.tx, params_table, call.target.id, new)
        return LogResult(run=call.target.id, stored=len(new), repeated=len(given) - len(new))

    @operation("runs.log_metrics", resource="run", mode=Mode.HOT, allow=Role.DEVELOPER)
    def log_metrics(self, run: RunRef, points: Points, *, batch: BatchId | None = None) -> LogResult:
        """Add up to 10,000 metric points to a run that has not ended; they are durable once the call returns.

        A point that is equal to a stored one in key, step, timestamp and value is not stored again. A `batch` that is
        sent again gets its first answer: name batches whose points have no timestamps.
        """
        call = current_call()
        ident = ObjectId(str(call.hot_id))
        with self.gate.database.write() as tx:
            status = store.lock(tx, ident)
            if status is None:
                raise objects.unknown(run, "run")
            if batch is not None and (answer := _earlier(tx, ident, batch, points)) is not None:
                return answer
            _require_running(ident, status)
            stored = store.add_points(tx, ident, points, now=call.now)
            logged = LogResult(run=ident, stored=stored, repeated=len(points) - stored)
            if batch is not None:
                counts = {"stored": logged.stored, "repeated": logged.repeated}
                store.add_batch(tx, ident, batch, digest=_digest(points), **counts)
        return logged

    @operation("runs.metrics", resource="run", mode=Mode.FREE)
    def metrics(self, run: RunRef, key: Key, *, from_step: Step = INT64_MIN) -> ArrowStream:
        """Stream the history of one metric by step and time: columns step, timestamp and value."""
        call = current_call()
        with self.gate.database.read() as tx:
            ident = store.series_id(tx, call.target.id, key)
        if ident is None:
            raise NotFound(f"run {call.target.id} has no metric {key!r}")
        return read_history(self.gate.database, ident, from_step=from_step)

    @operation("runs.set_tags", resource="run")
    def set_tags(self, run: RunRef, tags: Tags) -> LogResult:
        """Set tags of a run, also of one that has ended; existing tags are replaced."""
        call = current_call()
        store.lock(call.tx, call.target.id)
        known = store.values_of(call.tx, tags_table, call.target.id)
        new = {key: value for key, value in tags.items() if known.get(key) != value}
        store.put_values(call.tx, tags_table, call.target.id, new)
        return LogResult(run=call.target.id, stored=len(new), repeated=len(tags) - len(new))

    @operation("runs.log_artifact", resource="run")
    def log_artifact(self, run: RunRef, path: ArtifactPath, blob: BlobRef) -> Artifact:
        """Attach a committed blob to a run that has not ended, under a path.

        The blob must have the run among its sources, or be a source of the run, so that lineage is complete.
        """
        call = current_call()
        found, target = call.object("blob"), call.target
        _require_running(target.id, store.lock(call.tx, target.id))
        if (earlier := store.artifact_at(call.tx, target.id, path)) is not None:
            if earlier.blob != found.id:
                raise Conflict(f"run {target.id} has another artifact at {path!r}: {earlier.blob}")
            return earlier
        _require_related(call.tx, target, found)
        bytes_ = blob_record(call.tx, found)
        if not bytes_.committed:
            raise Conflict(f"blob {found.name} is staged, and would expire; give it a name with blobs.commit")
        new = Artifact(path=path, blob=found.id, size_bytes=bytes_.size_bytes, attached_at=call.now)
        store.add_artifact(call.tx, target.id, new)
        return new

    @operation("runs.end", resource="run")
    def end(self, run: RunRef, *, status: Outcome = "finished") -> Run:
        """End a run; it then accepts no parameters, metrics or artifacts."""
        call = current_call()
        _require_running(call.target.id, store.lock(call.tx, call.target.id))
        store.end_run(call.tx, call.target.id, status=status, now=call.now)
        return store.run_record(call.tx, call.target)

    def _experiment(self, call: Call, name: str, *, home: StoredObject) -> StoredObject:
        """Return the experiment of that name. It is not created by `call.create`: the run's sources are not its own."""
        find = partial(self.gate.named, call, "experiment", name, workspace=home)
        found = find()
        if found is None:
            store.lock_names(call.tx, home.id)
            found = find()  # another call may have created it meanwhile
        if found is not None:
            return found
        new = StoredObject(
            id=new_id("experiment"),
            workspace=home.id,
            kind="experiment",
            name=name,
            owner=call.caller.id,
            label=home.label,
            created_at=call.now,
        )
        objects.create(call.tx, new)
        return new


def _as_text(params: Mapping[str, Any]) -> dict[str, str]:
    return {key: str(value) for key, value in params.items()}


def _require_running(run: str, status: RunStatus | None) -> None:
    if status is None or status.ended:
        raise Conflict(f"run {run} has ended: {status}; start another")


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


def _earlier(tx: Transaction, run: ObjectId, batch: str, points: tuple[MetricPoint, ...]) -> LogResult | None:
    """Return the answer that the batch got when it was sent before, or None."""
    row = store.batch(tx, run, batch)
    if row is None:
        return None
    if row.digest != _digest(points):
        raise KeyReused(f"batch {batch!r} of run {run} was sent before, with other points")
    return LogResult(run=run, stored=row.stored, repeated=row.repeated)


def _digest(points: tuple[MetricPoint, ...]) -> str:
    return hashlib.sha256(_points.dump_json(points)).hexdigest()


# ---------------------------------------------------------------------------------------------- history


def read_history(database: Database, series: int, *, from_step: int) -> ArrowStream:
    """Return the points of `series` from `from_step`, by step and time, as an Arrow stream."""
    import pyarrow as pa

    fields = [("step", pa.int64()), ("timestamp", pa.timestamp("us", tz="UTC")), ("value", pa.float64())]
    schema = pa.schema(fields)
    pages = _pages(database, series, from_step)
    reader: ArrowStream = pa.RecordBatchReader.from_batches(
        schema, (pa.record_batch(_columns(page), schema=schema) for page in pages)
    )
    return reader


def _pages(database: Database, series: int, from_step: int) -> Iterator[list[Point]]:
    """Yield pages of points, each read in a transaction of its own."""
    after: Point = (from_step, INT64_MIN, float("-inf"), False)
    while True:
        with database.read() as tx:
            page = store.history(tx, series, after)
        if page:
            yield page
        if len(page) < store.PAGE:
            return
        after = page[-1]


def _columns(page: list[Point]) -> list[Any]:
    steps, moments, values, nans = zip(*page, strict=True)
    numbers = [float("nan") if is_nan else value for value, is_nan in zip(values, nans, strict=True)]
    return [[*steps], [*moments], numbers]
