"""The spine of a training set: the rows of an uploaded blob, or stored rows of a view within a time span."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from falaj.errors import Fault, InvalidInput, shorten
from falaj.features.backends import FeatureBackends
from falaj.features.joins import ARRIVAL, ROW, quoted
from falaj.features.sources import MAX_NOTES, NOTE_CHARS, spine_rows
from falaj.features.views import require_scan, stored_rows
from falaj.governance.operations.call import Call
from falaj.ports.machine.memory import MemoryLease
from falaj.ports.metadata import from_micros, to_micros
from falaj.ports.queries import ArrowTable
from falaj.records.features import ColumnType, Feature, PinnedView, StoredView, pin_of
from falaj.records.governance.objects import StoredObject
from falaj.records.names import repeated_names

DEFAULT_TIME = "event_time"


@dataclass(frozen=True)
class SpineSpan:
    """The requested limits of a spine: from `since` and before `until`, or the `last` duration of it."""

    since: datetime | None = None
    until: datetime | None = None
    last: timedelta | None = None


@dataclass(frozen=True)
class Spine:
    """Rows to join features to, from `since` and before `until`; `event_time` is the column of their times.

    `pin` identifies the rows if they come from a view; `notes` say what was assumed to read them.
    """

    rows: ArrowTable
    event_time: str
    pin: PinnedView | None = None
    since: datetime | None = None
    until: datetime | None = None
    notes: tuple[str, ...] = ()


def load_spine(
    backends: FeatureBackends,
    call: Call,
    source: StoredObject,
    views: list[StoredView],
    *,
    span: SpineSpan,
    event_time: str | None,
    memory: MemoryLease,
) -> Spine:
    """Load the rows of `source` within `span`, with keys and event time in their types."""
    if source.kind == "blob":
        time_column, pin = event_time or DEFAULT_TIME, None
        texts = frozenset(key.name for view in views for key in view.keys if key.type is ColumnType.TEXT)
        rows = spine_rows(backends, call, source, texts=texts, memory=memory)
    elif source.kind == "view":
        (stored,) = require_scan(backends.gate, call, [source])
        time_column, pin = event_time or stored.definition.event_time, pin_of(stored)
        rows = _view_rows(backends, stored)
    else:
        raise InvalidInput.at("spine", given=source.address, allowed="a blob with rows, or a view")
    checked, notes = _checked(rows, views, time_column)
    since, until = _bounds(backends, span, checked, time_column)
    within = _within(backends, checked, time_column, since, until)
    return Spine(within, time_column, pin, since, until, notes)


def keep_spine(backends: FeatureBackends, call: Call, source: StoredObject) -> None:
    """Keep an uploaded spine beyond its staging period."""
    if source.kind == "blob":
        contents = backends.contents
        contents.keep(call.tx, contents.facts(call.tx, source.id), now=call.now)


def _view_rows(backends: FeatureBackends, view: StoredView) -> ArrowTable:
    """Return all columns of a view, ordered by event time and then by arrival."""
    moments = [view.definition.event_time, view.definition.created_time]
    names = [key.name for key in view.keys] + [name for name in moments if name]
    shown = ", ".join(quoted(name) for name in [*names, *(each.name for each in view.definition.columns)])
    order = f"{quoted(view.definition.event_time)}, {ARRIVAL}"
    sql = f"SELECT {shown} FROM rows ORDER BY {order}"  # noqa: S608 - names are quoted
    return backends.queries.select(sql, {"rows": stored_rows(backends, view)})


def _bounds(
    backends: FeatureBackends, span: SpineSpan, rows: ArrowTable, event_time: str
) -> tuple[datetime | None, datetime | None]:
    """Return the inclusive start and the exclusive end of `span`; `last` counts back from the newest row."""
    since, until, last = span.since, span.until, span.last
    if last is not None:
        if since is not None or until is not None:
            raise InvalidInput.at("last", given=last, allowed="last alone, or since and until")
        sql = f"SELECT max(epoch_us({quoted(event_time)})) AS newest FROM rows"  # noqa: S608 - names are quoted
        (newest,) = backends.queries.select(sql, {"rows": rows})["newest"].to_pylist()
        try:
            return (None if newest is None else from_micros(newest) - last), None
        except OverflowError:  # before the first moment that there is
            return None, None
    if since is not None and until is not None and since >= until:
        allowed = f"later than since ({since.isoformat()})"
        raise InvalidInput.at("until", given=until.isoformat(), allowed=allowed)
    return since, until


def _within(
    backends: FeatureBackends,
    rows: ArrowTable,
    event_time: str,
    since: datetime | None,
    until: datetime | None,
) -> ArrowTable:
    from falaj.features import arrow_tables

    bounds = [(">=", since), ("<", until)]
    tests = [
        f"epoch_us({quoted(event_time)}) {sign} {to_micros(at)}" for sign, at in bounds if at is not None
    ]
    if not tests:
        return rows
    sql = f"SELECT * EXCLUDE ({ROW}) FROM rows WHERE {' AND '.join(tests)} ORDER BY {ROW}"  # noqa: S608 - names are quoted
    return backends.queries.select(sql, {"rows": arrow_tables.with_row_numbers(rows, ROW)})


def _checked(
    spine: ArrowTable, views: list[StoredView], event_time: str
) -> tuple[ArrowTable, tuple[str, ...]]:
    """Return the spine with keys and event time in their types, and what was assumed to read it.

    Rows with null keys stay and match nothing.
    """
    from falaj.features import arrow_tables
    from falaj.features.validation.checks import conform

    feature_columns = [
        f"{view.definition.name}__{feature.name}" for view in views for feature in view.definition.features
    ]
    if same := repeated_names(feature_columns):
        raise InvalidInput.at(
            "views", given=", ".join(same), allowed="views whose features have unique names"
        )
    hidden = [name for name in spine.column_names if name.startswith("__")]
    if taken := hidden or repeated_names([*spine.column_names, *feature_columns]):
        allowed = (
            "names that differ by more than case, also from those of features, and do not begin with '__'"
        )
        raise InvalidInput(
            "the columns of the spine are invalid",
            faults=[Fault(where="spine", given=", ".join(taken), allowed=allowed)],
        )
    typed = {key.name: key for view in views for key in view.keys}
    typed[event_time] = Feature(name=event_time, type=ColumnType.MOMENT)
    fitting = conform(spine, tuple(typed.values()), required=frozenset(), where="spine")
    assumed = arrow_tables.time_assumptions(spine, tuple(typed.values()))
    for name in (each for each in spine.column_names if each not in typed):
        assumed += arrow_tables.cut_nanoseconds(name, spine[name])
    for name in fitting.column_names:
        spine = spine.set_column(spine.column_names.index(name), name, fitting[name])
    spine = arrow_tables.in_stored_units(spine)
    return spine, tuple(shorten(str(each), limit=NOTE_CHARS) for each in assumed[:MAX_NOTES])
