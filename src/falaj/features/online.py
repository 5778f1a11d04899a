"""Online features: materialize the newest row of every key from a view's pinned rows, and read it in microseconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from falaj.errors import Conflict
from falaj.features import store
from falaj.features.joins import EVENT, newest_rows, quoted
from falaj.features.row_codec import RowCodec
from falaj.features.views import FeatureBackends, join_input, newest_feature_rows
from falaj.governance import objects
from falaj.governance.encryption.values import SealedValues
from falaj.governance.operations.call import Call
from falaj.ports.online import ArrowBatch, EntityKey, OnlineStore, ViewName
from falaj.records.features import MaterializeResult, OnlineRow, OnlineRows, StoredView, Value
from falaj.records.governance.objects import StoredObject

FRESH_S = 1.0
"""Seconds for which a reader may use a cached version of a view."""
BATCH_ROWS = 50_000


@dataclass(frozen=True)
class _ReadPlan:
    """How the values of a view are stored online."""

    view: StoredView
    name: ViewName
    layout: RowCodec
    features: tuple[str, ...]
    missing: tuple[Value, ...]
    until: float


class OnlineFeatures:
    """Write and read online features; `stores` are keyed by zone."""

    def __init__(
        self, backends: FeatureBackends, stores: Mapping[str, OnlineStore], sealed: SealedValues
    ) -> None:
        self.backends = backends
        self._stores = stores
        self._sealed = sealed
        self._plans: dict[str, _ReadPlan] = {}

    def materialize(self, call: Call, target: StoredObject) -> MaterializeResult:
        """Write the newest row of every key of the view `target` to the online store."""
        with self.backends.gate.database.read() as tx:
            view = store.load_view(tx, target)
        rows = self.backends.queries.select(_keyed(view), {"rows": newest_feature_rows(self.backends, view)})
        plan = _plan(view)
        written = sum(self._write(plan, batch) for batch in rows.to_batches(max_chunksize=BATCH_ROWS))

        def publish() -> MaterializeResult:
            store.publish_online(call, view)
            return MaterializeResult(
                view=view.id,
                version=view.version,
                table_version=view.table_version or 0,
                keys=rows.num_rows,
                written=written,
            )

        return self.backends.gate.commit(call, publish)

    def read(self, ident: str, keys: Sequence[str], *, clock: Callable[[], datetime]) -> OnlineRows:
        """Read the newest features of `keys`, in their order."""
        plan = self._plans.get(ident)
        if plan is None or plan.until < time.monotonic():
            plan = self._plans[ident] = self._find(ident)
        stored = self._stores[plan.view.zone].read(plan.name, [EntityKey(key.encode()) for key in keys])
        oldest = None if plan.view.definition.ttl is None else clock() - plan.view.definition.ttl
        rows = tuple(self._row(plan, key, value, oldest) for key, value in zip(keys, stored, strict=True))
        return OnlineRows(version=plan.view.version, features=plan.features, rows=rows)

    def _find(self, ident: str) -> _ReadPlan:
        with self.backends.gate.database.read() as tx:
            found = objects.by_id(tx, ident)
            view = None if found is None else store.find_online_view(tx, found)
        if found is None:
            raise objects.unknown(ident, "view")
        if view is None:
            raise Conflict(f"view {found.name} is not online; run features.materialize first")
        return _plan(view)

    def _write(self, plan: _ReadPlan, batch: ArrowBatch) -> int:
        from falaj.features import arrow_tables

        keys = [key.encode() for key in batch.column("__key").to_pylist()]
        events = batch.column(EVENT).to_pylist()
        columns = [batch.column(name).to_pylist() for name in plan.features]
        workspace = plan.view.workspace
        values = [
            self._sealed.seal(workspace, value, context=_context(plan, key))
            for key, value in zip(keys, plan.layout.encode(events, columns), strict=True)
        ]
        return self._stores[plan.view.zone].write(plan.name, arrow_tables.online_batch(keys, events, values))

    def _row(self, plan: _ReadPlan, key: str, stored: bytes | None, oldest: datetime | None) -> OnlineRow:
        if stored is None:
            return OnlineRow.model_construct(key=key, event_time=None, values=plan.missing)
        context = _context(plan, key.encode())
        event, values = plan.layout.decode(self._sealed.unseal(plan.view.workspace, stored, context=context))
        if oldest is not None and event < oldest:
            values = plan.missing
        return OnlineRow.model_construct(key=key, event_time=event, values=values)


def _plan(view: StoredView) -> _ReadPlan:
    features = view.definition.features
    return _ReadPlan(
        view=view,
        name=ViewName(f"{view.id}/{view.version}"),
        layout=RowCodec(features),
        features=tuple(feature.name for feature in features),
        missing=(None,) * len(features),
        until=time.monotonic() + FRESH_S,
    )


def _keyed(view: StoredView) -> str:
    """Select the newest rows with their key as text; composite keys are joined by '|' and escaped by a backslash."""
    parts = [f"CAST({quoted(key.name)} AS VARCHAR)" for key in view.keys]
    if len(parts) > 1:
        parts = [f"replace(replace({part}, '\\', '\\\\'), '|', '\\|')" for part in parts]
    return f"SELECT concat_ws('|', {', '.join(parts)}) AS __key, * FROM ({newest_rows(join_input(view, 'rows'))})"  # noqa: S608


def _context(plan: _ReadPlan, key: bytes) -> bytes:
    return plan.name.encode() + b"\0" + key
