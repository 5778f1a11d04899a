"""The operations of the feature store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from falaj.features import definitions, store, training_sets, views
from falaj.features.online import OnlineFeatures
from falaj.features.spines import SpineSpan
from falaj.features.views import FeatureBackends
from falaj.governance.encryption.blobs import EncryptedBlobs
from falaj.governance.encryption.values import SealedValues
from falaj.governance.operations.call import current_call
from falaj.governance.operations.gate import Gate
from falaj.governance.operations.operation import ArrowStream, Mode, operation
from falaj.governance.operations.pagination import list_page
from falaj.ports.online import OnlineStore
from falaj.ports.queries import QueryEngine
from falaj.ports.tables import TableStore
from falaj.records.features import (
    ApplyResult,
    Column,
    DatasetRef,
    Duration,
    Entity,
    FeatureView,
    IngestResult,
    MaterializeResult,
    Moment,
    OnlineRows,
    PlannedChange,
    StoredView,
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
        online: Mapping[str, OnlineStore],
        sealed: SealedValues,
    ) -> None:
        """The blob, table and online stores are keyed by zone."""
        self.gate = gate
        self.backends = FeatureBackends(gate, blobs, tables, queries)
        self.online_features = OnlineFeatures(self.backends, online, sealed)

    @operation("features.apply", resource="workspace")
    def apply(
        self,
        *,
        entities: tuple[Entity, ...] = (),
        views: tuple[FeatureView, ...] = (),
        workspace: WorkspaceRef | None = None,
        zone: ZoneName | None = None,
    ) -> ApplyResult:
        """Create or update entities and views; a changed view gets a new version and keeps the old one.

        New views store their rows in `zone`. Entities and views that are not named stay as they are.
        """
        call = current_call()
        target = call.object("workspace")
        return definitions.apply(call, target, entities, views, self.gate.zones.named(zone))

    @operation("features.plan", resource="workspace", mode=Mode.READ, allow=Role.DEVELOPER)
    def plan(
        self,
        *,
        entities: tuple[Entity, ...] = (),
        views: tuple[FeatureView, ...] = (),
        workspace: WorkspaceRef | None = None,
    ) -> tuple[PlannedChange, ...]:
        """Return the changes that features.apply would make, without making them."""
        call = current_call()
        return definitions.plan(call.tx, call.object("workspace"), entities, views)

    @operation("features.ingest", resource="view", mode=Mode.LATE)
    def ingest(self, view: ViewRef, *, data: BlobRef) -> IngestResult:
        """Add the rows of an uploaded blob (Parquet, CSV or Arrow) to the newest version of a view."""
        call = current_call()
        return views.ingest(self.backends, call, call.object("view"), call.object("data"))

    @operation("features.list", resource="workspace", mode=Mode.READ)
    def list(
        self, *, workspace: WorkspaceRef | None = None, after: Cursor = "", limit: PageSize = 100
    ) -> Page[StoredView]:
        """List the views of a workspace, each in its newest version."""
        call = current_call()
        return list_page(
            self.gate,
            ["view"],
            lambda found: store.load_view(call.tx, found),
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
        """Stream the stored rows of one version of a view; the newest by default."""
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
        zone: ZoneName | None = None,
    ) -> TrainingSet:
        """Join every row of a spine with the features of `views` as they were known at its event time.

        The spine is an uploaded blob or a view, whose columns become part of the set. Rows of the spine are limited
        to those from `since` and before `until`, or to the `last` duration before its newest row. Features are named
        `view__feature`. The versions that were read are pinned and the result is stored.
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
            lambda found: store.load_training_set(call.tx, found),
            after=after,
            limit=limit,
            workspace=call.object("workspace").id,
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

    @operation("features.read", resource="view", mode=Mode.HOT)
    def read(
        self, view: ViewRef, *, keys: Annotated[tuple[Key, ...], Field(min_length=1, max_length=1000)]
    ) -> OnlineRows:
        """Read the newest features of each key; join the parts of a composite key with '|'."""
        ident = current_call().hot_id  # the gate resolved `view`
        return self.online_features.read(str(ident), keys, clock=self.gate.clock)
