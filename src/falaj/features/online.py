"""Online features: materialize the newest row of every key from a view's pinned rows, and read it in microseconds.

The newest row is that which is known now, as in a training set. Rows that become known later are written beside it, and
served from then on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby, islice
from operator import itemgetter
from typing import NamedTuple

from falaj.errors import Conflict, Damaged, TooLarge, shorten
from falaj.features import store
from falaj.features.backends import FeatureBackends
from falaj.features.joins import EVENT, newest_rows, quoted
from falaj.features.row_codec import ALWAYS, RowCodec, join_rows, row_at
from falaj.features.views import join_input, newest_feature_rows
from falaj.governance import objects
from falaj.governance.encryption.values import SealedValues
from falaj.governance.operations.call import Call
from falaj.ports.metadata import from_micros, to_micros
from falaj.ports.online import MAX_VALUE_BYTES, EntityKey, OnlineStore, ViewName
from falaj.ports.queries import ArrowTable
from falaj.records.features import (
    ColumnType,
    MaterializeResult,
    OnlineRow,
    OnlineRows,
    StoredView,
    Value,
)
from falaj.records.governance.objects import StoredObject

FRESH_S = 1.0
"""Seconds for which a reader may use a cached version of a view."""
BATCH_ROWS = 50_000
WAIT_S = 45.0
"""How long a materialization waits for another one of the same view; clients give up after 60 s."""
CLOCK_SKEW_US = 60_000_000
"""How far, in microseconds, the clock of a reader may be behind that of the materialization."""
MAX_AHEAD, MAX_AHEAD_BYTES = 1_000, 256 << 10
"""Most rows of a key that are kept beside its first one, and their size."""


@dataclass(frozen=True)
class _ReadPlan:
    """How the values of a view are stored online."""

    view: StoredView
    name: ViewName
    layout: RowCodec
    features: tuple[str, ...]
    types: tuple[ColumnType, ...]
    missing: tuple[Value, ...]
    until: float


@dataclass(frozen=True)
class _Written:
    """What a materialization wrote: keys, those with a new value, values that take effect later; see its result."""

    keys: int = 0
    written: int = 0
    ahead: int = 0
    complete_until: int | None = None


class _KeyValue(NamedTuple):
    """The value of a key, with its newest event time. `cut` is when the first row that was left out becomes known."""

    key: bytes
    event: int
    value: bytes
    ahead: int
    cut: int | None


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
        """Write the newest row of every key of the view `target` to the online store.

        One at a time: an older one that is slower must not overwrite what a newer one wrote.
        """
        database = self.backends.gate.database
        with database.read() as tx:
            view = store.load_view(tx, target)
        subject = f"view {view.definition.name}: it is being materialized"
        tables = self.backends.tables[view.zone]
        with tables.turn(store.online_queue(view), wait_s=WAIT_S, subject=subject):
            with database.read() as tx:
                view = store.load_view(tx, target)
            done = self._write_newest(view)

            def publish() -> MaterializeResult:
                store.publish_online(call, view)
                return MaterializeResult(
                    view=view.id,
                    version=view.version,
                    table_version=view.table_version or 0,
                    keys=done.keys,
                    written=done.written,
                    ahead=done.ahead,
                    complete_until=None if done.complete_until is None else from_micros(done.complete_until),
                )

            return self.backends.gate.commit(call, publish)

    def has_values(self, view: StoredView) -> bool:
        """Tell whether the values of a view that is online are in its store."""
        try:
            self._stores[view.zone].read(_plan(view).name, [EntityKey(b"")])
        except Damaged:
            return False
        return True

    def rebuild(self, view: StoredView) -> int:
        """Write the values again that were online; return the number of keys. Nothing else is changed."""
        return self._write_newest(view.model_copy(update={"table_version": view.online_version})).keys

    def _write_newest(self, view: StoredView) -> _Written:
        """Write the rows of every key that are its newest known, now and later."""
        plan, now, done = _plan(view), to_micros(self.backends.gate.clock()), _Written()
        with self.backends.leased() as (leased, _):
            found = newest_feature_rows(leased, view, since=now - CLOCK_SKEW_US)
            rows = leased.queries.select(_keyed(view, since=now - CLOCK_SKEW_US), {"rows": found})
            values = self._values(plan, rows, now=now)
            while batch := list(islice(values, BATCH_ROWS)):
                cuts = [done.complete_until, *(each.cut for each in batch)]
                done = _Written(
                    keys=done.keys + len(batch),
                    written=done.written + self._write(plan, batch),
                    ahead=done.ahead + sum(each.ahead for each in batch),
                    complete_until=min((cut for cut in cuts if cut is not None), default=None),
                )
            if not done.keys:
                self._write(plan, ())  # from now on the view is known to have none
        return done

    def _values(self, plan: _ReadPlan, rows: ArrowTable, *, now: int) -> Iterator[_KeyValue]:
        """Yield the sealed value of every key; `rows` are sorted by key, and by the time from which they are known."""
        for key, group in groupby(_encoded(plan, rows), key=itemgetter(0)):
            every = list(group)
            spans = [(known if known > now - CLOCK_SKEW_US else ALWAYS, row) for _, _, known, row in every]
            kept, stored = spans[: _fitting(spans)], key.encode()
            value = self._sealed.seal(plan.view.workspace, join_rows(kept), context=_context(plan, stored))
            if len(value) > MAX_VALUE_BYTES:
                raise TooLarge(
                    f"view {plan.view.definition.name}: the features of key {shorten(key)} take {len(value)} bytes; "
                    f"online values have at most {MAX_VALUE_BYTES}: shorten its texts"
                )
            yield _KeyValue(
                key=stored,
                event=every[-1][1],
                value=value,
                ahead=sum(known > now for known, _ in kept),
                cut=spans[len(kept)][0] if len(kept) < len(spans) else None,
            )

    def read(self, ident: str, keys: Sequence[str], *, clock: Callable[[], datetime]) -> OnlineRows:
        """Read the newest features of `keys`, in their order."""
        plan = self._plans.get(ident)
        if plan is None or plan.until < time.monotonic():
            plan = self._plans[ident] = self._find(ident)
        stored = self._stores[plan.view.zone].read(plan.name, [EntityKey(key.encode()) for key in keys])
        now, ttl = clock(), plan.view.definition.ttl
        at, oldest = to_micros(now), None if ttl is None else now - ttl
        rows = tuple(self._row(plan, key, value, at, oldest) for key, value in zip(keys, stored, strict=True))
        return OnlineRows.model_construct(
            version=plan.view.version, features=plan.features, types=plan.types, rows=rows, oldest=oldest
        )

    def _find(self, ident: str) -> _ReadPlan:
        with self.backends.gate.database.read() as tx:
            found = objects.by_id(tx, ident)
            view = None if found is None else store.find_online_view(tx, found)
        if found is None:
            raise objects.unknown(ident, "view")
        if view is None:
            raise Conflict(f"view {found.name} is not online; run features.materialize first")
        return _plan(view)

    def _write(self, plan: _ReadPlan, values: Sequence[_KeyValue]) -> int:
        from falaj.features import arrow_tables

        batch = arrow_tables.online_batch(
            [each.key for each in values], [each.event for each in values], [each.value for each in values]
        )
        return self._stores[plan.view.zone].write(plan.name, batch)

    def _row(
        self, plan: _ReadPlan, key: str, stored: bytes | None, at: int, oldest: datetime | None
    ) -> OnlineRow:
        """Return the row of a key that is the newest known at the moment `at`."""
        found = None if stored is None else self._decoded(plan, key, stored, at)
        if found is None:
            return OnlineRow.model_construct(key=key, event_time=None, values=plan.missing)
        event, values = found
        if oldest is not None and event < oldest:
            values = plan.missing
        return OnlineRow.model_construct(key=key, event_time=event, values=values)

    def _decoded(
        self, plan: _ReadPlan, key: str, stored: bytes, at: int
    ) -> tuple[datetime, tuple[Value, ...]] | None:
        value = self._sealed.unseal(plan.view.workspace, stored, context=_context(plan, key.encode()))
        row = row_at(value, at)
        return None if row is None else plan.layout.decode(row)


def _plan(view: StoredView) -> _ReadPlan:
    features = view.definition.features
    return _ReadPlan(
        view=view,
        name=ViewName(f"{view.id}/{view.version}"),
        layout=RowCodec(features),
        features=tuple(feature.name for feature in features),
        types=tuple(feature.type for feature in features),
        missing=(None,) * len(features),
        until=time.monotonic() + FRESH_S,
    )


def _keyed(view: StoredView, *, since: int) -> str:
    """Select the newest rows with their key as text; composite keys are joined by '|' and escaped by a backslash."""
    parts = [f"CAST({quoted(key.name)} AS VARCHAR)" for key in view.keys]
    if len(parts) > 1:
        parts = [f"replace(replace({part}, '\\', '\\\\'), '|', '\\|')" for part in parts]
    newest = newest_rows(join_input(view, "rows"), since=since)
    return f"SELECT concat_ws('|', {', '.join(parts)}) AS __key, * FROM ({newest}) ORDER BY __key, __known"  # noqa: S608


def _encoded(plan: _ReadPlan, rows: ArrowTable) -> Iterator[tuple[str, int, int, bytes]]:
    """Yield key, event time, the time from which it is known, and the encoded features of every row."""
    for batch in rows.to_batches(max_chunksize=BATCH_ROWS):
        events = batch.column(EVENT).to_pylist()
        columns = [batch.column(name).to_pylist() for name in plan.features]
        yield from zip(
            batch.column("__key").to_pylist(),
            events,
            batch.column("__known").to_pylist(),
            plan.layout.encode(events, columns),
            strict=True,
        )


def _fitting(spans: Sequence[tuple[int, bytes]]) -> int:
    """Return how many of the rows of a key are kept: the first, and those that follow it within the limits."""
    size_bytes = 0
    for number, (_, row) in enumerate(spans[1 : MAX_AHEAD + 1], start=1):
        size_bytes += len(row)
        if size_bytes > MAX_AHEAD_BYTES:
            return number
    return min(len(spans), MAX_AHEAD + 1)


def _context(plan: _ReadPlan, key: bytes) -> bytes:
    return plan.name.encode() + b"\0" + key
