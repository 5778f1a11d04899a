"""The operations of the feature store."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated

from pydantic import Field

from falaj.features import definitions, store, training_sets, views
from falaj.features.backends import FeatureBackends
from falaj.features.definitions import infer_features
from falaj.features.online import OnlineFeatures
from falaj.features.sources import file_columns
from falaj.features.spines import SpineSpan
from falaj.features.table_versions.published import remove_orphans
from falaj.features.validation import batches
from falaj.features.view_versions.apply import apply_definitions
from falaj.governance import objects
from falaj.governance.blobs.service import STAGED_FOR, Age
from falaj.governance.encryption.blobs import EncryptedBlobs
from falaj.governance.encryption.values import SealedValues
from falaj.governance.operations.call import current_call
from falaj.governance.operations.gate import Gate
from falaj.governance.operations.operation import ArrowStream, Mode, operation
from falaj.governance.operations.pagination import list_page
from falaj.ports.machine.memory import MemoryBudget
from falaj.ports.online import OnlineStore
from falaj.ports.parsers import ParserPool
from falaj.ports.queries import QueryEngine
from falaj.ports.tables import TableStore
from falaj.records.features import (
    ApplyResult,
    Column,
    ColumnOrigin,
    DatasetRef,
    DiscardResult,
    Duration,
    Entity,
    FeatureView,
    InferredFeatures,
    IngestResult,
    KeepRows,
    MaterializeResult,
    Moment,
    OnlineRows,
    PlannedChange,
    QuarantinedBatch,
    QuarantinedRows,
    QuarantineRef,
    RequestFeatures,
    StoredView,
    TableCleanup,
    TrainingSet,
    ViewRef,
)
from falaj.records.governance.identity import Role
from falaj.records.governance.objects import Cursor, Page, PageSize
from falaj.records.names import AnyRef, BlobRef, Name, WorkspaceRef, ZoneName

Version = Annotated[int, Field(ge=1)]
Key = Annotated[str, Field(max_length=4096)]


class Features:
    """Define feature views, ingest rows, build training sets, and read the newest values online."""

    def __init__(
        self,
        gate: Gate,
        *,
        blobs: Mapping[str, EncryptedBlobs],
        tables: Mapping[str, TableStore],
        queries: QueryEngine,
        parsers: ParserPool,
        budget: MemoryBudget,
        online: Mapping[str, OnlineStore],
        sealed: SealedValues,
    ) -> None:
        """The blob, table and online stores are keyed by zone. `budget` is what the rows of all calls may take."""
        self.gate = gate
        self.backends = FeatureBackends(gate, blobs, tables, queries, parsers, budget)
        self.online_features = OnlineFeatures(self.backends, online, sealed)

    @operation("features.apply", resource="workspace", mode=Mode.LATE)
    def apply(
        self,
        *,
        entities: tuple[Entity, ...] = (),
        views: tuple[FeatureView, ...] = (),
        workspace: WorkspaceRef | None = None,
        zone: ZoneName | None = None,
        keep_rows: KeepRows = KeepRows.COMPATIBLE,
    ) -> ApplyResult:
        """Create or update entities and views; a changed view gets a new version and keeps the old one.

        A new version takes over the rows of the last one that fit it (`keep_rows`): new columns are null in them. New
        views store their rows in `zone`. Entities and views that are not named stay as they are.
        """
        call = current_call()
        given = definitions.GivenDefinitions(entities, views, keep_rows)
        zone_found = self.gate.zones.named(zone)
        return apply_definitions(self.backends, call, call.object("workspace"), given, zone_found)

    @operation("features.plan", resource="workspace", mode=Mode.READ, allow=Role.DEVELOPER)
    def plan(
        self,
        *,
        entities: tuple[Entity, ...] = (),
        views: tuple[FeatureView, ...] = (),
        workspace: WorkspaceRef | None = None,
        keep_rows: KeepRows = KeepRows.COMPATIBLE,
    ) -> tuple[PlannedChange, ...]:
        """Return the changes that features.apply would make, without making them."""
        call = current_call()
        given = definitions.GivenDefinitions(entities, views, keep_rows)
        home = call.object("workspace")
        return definitions.plan(call.tx, home, given, partial(self.gate.named, call, workspace=home))

    @operation("features.ingest", resource="view", mode=Mode.LATE)
    def ingest(
        self,
        view: ViewRef,
        *,
        data: BlobRef,
        strict: bool = False,
        again: bool = False,
        backfill: bool = False,
    ) -> IngestResult:
        """Add the rows of an uploaded blob (Parquet, CSV or Arrow) to the newest version of a view.

        A blob whose bytes were added before is not added again, unless `again`. Times without a zone are read as UTC,
        nanoseconds are cut, and columns that the view does not have are left out; the notes of the result say so. If
        `strict`, such rows are refused. Where rows are known when they come in, those of a `backfill` count as known
        when they happened; the first rows of a view always do. If the view says so (`invalid_rows`), rows that break
        its rules are quarantined, and the others added.
        """
        call = current_call()
        return views.ingest(
            self.backends,
            call,
            call.object("view"),
            call.object("data"),
            strict=strict,
            again=again,
            backfill=backfill,
        )

    @operation("features.quarantined_batches", resource="view", mode=Mode.READ)
    def quarantined_batches(
        self, view: ViewRef, *, after: Cursor = "", limit: PageSize = 100
    ) -> Page[QuarantinedBatch]:
        """List the files whose invalid rows were set aside when they were added to a view, newest first."""
        call = current_call()
        return batches.list_batches(self.gate, call, call.object("view"), after=after, limit=limit)

    @operation("features.quarantined_rows", resource="quarantine", mode=Mode.FREE, exports=True)
    def quarantined_rows(
        self, batch: QuarantineRef, *, after: Cursor = "", limit: PageSize = 100
    ) -> QuarantinedRows:
        """Show rows of a quarantined batch and the rules that they break, for those who may read the view's rows."""
        call = current_call()
        return batches.show_rows(self.backends, call, call.object("batch"), after=after, limit=limit)

    @operation("features.ingest_quarantined", resource="quarantine", mode=Mode.LATE)
    def ingest_quarantined(self, batch: QuarantineRef) -> IngestResult:
        """Add the rows of a quarantined batch that break no rule of the view any more; the others stay in it.

        They are checked by the newest definition of the view, which must have the other rows of their file.
        """
        call = current_call()
        return views.ingest_quarantined(self.backends, call, call.object("batch"))

    @operation("features.discard_quarantined", resource="quarantine", confirm=True)
    def discard_quarantined(self, batch: QuarantineRef) -> DiscardResult:
        """Delete the rows of a quarantined batch; how many there were, and why, stays recorded."""
        call = current_call()
        return batches.discard(self.backends, call, call.object("batch"))

    @operation("features.infer", resource="blob", mode=Mode.FREE, exports=True)
    def infer(
        self,
        data: BlobRef,
        *,
        name: Name,
        entity: Name | None = None,
        key: Column | None = None,
        event_time: Column | None = None,
    ) -> InferredFeatures:
        """Infer the definition of a view from an uploaded blob (Parquet, CSV or Arrow); nothing is stored.

        The key is the first column that is named like one, or the first of whole numbers or text; the event time is
        event_time, or the first column of times. The entity is named after the key.
        """
        call = current_call()
        found, rows = file_columns(self.backends, call, call.object("data"))
        return infer_features(found, rows=rows, name=name, entity=entity, key=key, event_time=event_time)

    @operation("features.list", resource="workspace", mode=Mode.READ)
    def list(
        self, *, workspace: WorkspaceRef | None = None, after: Cursor = "", limit: PageSize = 100
    ) -> Page[StoredView]:
        """List the views of a workspace, each in its newest version."""
        call = current_call()
        return list_page(
            self.gate,
            ["view"],
            lambda page: [store.load_view(call.tx, found) for found in page],
            after=after,
            limit=limit,
            workspace=call.object("workspace").id,
        )

    @operation("features.show", resource="view", mode=Mode.READ)
    def show(self, view: ViewRef, *, version: Version | None = None) -> StoredView:
        """Show one version of a view; the newest by default."""
        call = current_call()
        return store.load_view(call.tx, call.object("view"), version=version)

    @operation("features.scan", resource="view", mode=Mode.FREE)
    def scan(self, view: ViewRef, *, version: Version | None = None) -> ArrowStream:
        """Stream the stored rows of one version of a view, the newest by default, in order of arrival."""
        with self.gate.database.read() as tx:
            found = store.load_view(tx, current_call().object("view"), version=version)
        return views.stream(self.backends, found)

    @operation("features.training_set", resource="workspace", mode=Mode.LATE)
    def training_set(
        self,
        name: Name,
        *,
        workspace: WorkspaceRef | None = None,
        spine: AnyRef,
        views: Annotated[tuple[ViewRef, ...], Field(min_length=1, max_length=50)],
        since: Moment | None = None,
        until: Moment | None = None,
        last: Duration | None = None,
        event_time: Column | None = None,
        request_features: RequestFeatures = (),
        zone: ZoneName | None = None,
    ) -> TrainingSet:
        """Join every row of a spine with the features of `views` as they were known at its event time.

        The spine is an uploaded blob or a view, whose columns become part of the set. Rows of the spine are limited
        to those from `since` and before `until`, or to the `last` duration before its newest row. Features are named
        `view__feature`. `request_features` are further columns, computed from those of the spine and the features; an
        endpoint that serves a model of the set computes them for each request. The versions that were read are pinned
        and the result is stored. The same name with the same inputs is the training set that there is. Times of an
        uploaded spine without a zone are read as UTC, and nanoseconds are cut; the notes of the result say so.
        """
        call = current_call()
        span = SpineSpan(since=since, until=until, last=last)
        sources = training_sets.TrainingSources(spine=call.object("spine"), views=call.referred["views"])
        return training_sets.build(
            self.backends,
            call,
            sources,
            name=name,
            workspace=call.object("workspace"),
            zone=self.gate.zones.named(zone).name,
            span=span,
            event_time=event_time,
            request_features=request_features,
        )

    @operation("features.training_sets", resource="workspace", mode=Mode.READ)
    def training_sets(
        self, *, workspace: WorkspaceRef | None = None, after: Cursor = "", limit: PageSize = 100
    ) -> Page[TrainingSet]:
        """List the training sets of a workspace."""
        call = current_call()
        return list_page(
            self.gate,
            ["dataset"],
            lambda page: [store.load_training_set(call.tx, found) for found in page],
            after=after,
            limit=limit,
            workspace=call.object("workspace").id,
        )

    @operation("features.column_lineage", resource="dataset", mode=Mode.READ)
    def column_lineage(self, training_set: DatasetRef) -> tuple[ColumnOrigin, ...]:
        """List the columns of a training set, and the column of which version of a view each comes from."""
        call = current_call()
        found = store.load_training_set(call.tx, call.object("training_set"))
        origins = training_sets.column_origins(call.tx, found)
        stored = {each.view_id: objects.ever(call.tx, each.view_id) for each in origins if each.view_id}
        seen = {each.id for each in self.gate.visible([each for each in stored.values() if each is not None])}
        hidden = {"view": ""}
        return tuple(
            each if each.view_id is None or each.view_id in seen else each.model_copy(update=hidden)
            for each in origins
        )

    @operation("features.load", resource="dataset", mode=Mode.FREE)
    def load(self, training_set: DatasetRef) -> ArrowStream:
        """Stream the rows of a training set, in the order of its spine."""
        return training_sets.stream(self.backends, current_call().object("training_set"))

    @operation("features.materialize", resource="view", mode=Mode.LATE)
    def materialize(self, view: ViewRef) -> MaterializeResult:
        """Write the newest row of every key of a view to the online store, for features.read."""
        call = current_call()
        return self.online_features.materialize(call, call.object("view"))

    @operation("features.cleanup", resource="platform", mode=Mode.LATE, allow=Role.OPERATOR)
    def cleanup(self, *, older_than: Age = STAGED_FOR) -> TableCleanup:
        """Remove table files that were never published, and what killed queries left on the answering machine."""
        call = current_call()
        before = call.now - older_than
        files = remove_orphans(self.backends, before=before)
        spilled = self.backends.queries.delete_spilled(before=before)
        return self.gate.commit(call, lambda: TableCleanup(files=files, spilled=spilled))

    @operation("features.read", resource="view", mode=Mode.HOT, exports=True)
    def read(
        self, view: ViewRef, *, keys: Annotated[tuple[Key, ...], Field(min_length=1, max_length=1000)]
    ) -> OnlineRows:
        """Read the newest features of each key; join the parts of a composite key with '|'."""
        ident = current_call().hot_id  # the gate resolved `view`
        return self.online_features.read(str(ident), keys, clock=self.gate.clock)
