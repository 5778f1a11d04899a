"""Views, training sets and online features as people read them."""

from __future__ import annotations

from collections.abc import Sequence

from falaj.apps.cli.output.messages import Message
from falaj.apps.cli.output.tables import show_fields, show_rows, show_text
from falaj.apps.cli.output.values import format_value, plural
from falaj.records.features import OnlineRows, StoredView, TrainingSet


def training_set_message(made: TrainingSet) -> Message:
    """What to say of a new training set."""
    shape = f"{plural(made.rows, 'row')}, {plural(len(made.columns), 'column')}, {plural(len(made.views), 'view')}"
    return Message(
        f"training set {made.name} is made: {shape}, in zone {made.zone}, {made.label.describe()}",
        (
            ("next", f"train SCRIPT --dataset training={made.name}"),
            ("or", f"features load {made.name} --output {made.name}.arrow"),
        ),
    )


def show_views(views: Sequence[StoredView]) -> None:
    """One row per view."""
    headings = ["name", "version", "of", "features", "rows", "online", "ttl", "zone", "label"]
    show_rows(headings, [_line(view) for view in views])


def _line(view: StoredView) -> list[str]:
    definition = view.definition
    return [
        definition.name,
        str(view.version),
        ", ".join(definition.entities),
        str(len(definition.features)),
        str(view.rows),
        _online(view),
        format_value(definition.ttl),
        view.zone,
        view.label.describe(),
    ]


def _online(view: StoredView) -> str:
    if view.online_version is None:
        return "no"
    return "yes" if view.online_version == view.table_version else "behind"


def show_view(view: StoredView) -> None:
    """All that a view is: its facts, its features, its SQL."""
    definition = view.definition
    shown = {
        "name": f"{definition.name}, version {view.version}",
        "id": view.id,
        "keys": ", ".join(f"{key.name} ({key.type})" for key in view.keys),
        "event time": definition.event_time,
        "created time": format_value(definition.created_time),
        "ttl": format_value(definition.ttl),
        "rows": f"{view.rows}"
        + ("" if view.table_version is None else f", table version {view.table_version}"),
        "online": _online(view),
        "zone": view.zone,
        "label": view.label.describe(),
        "created": format_value(view.created_at),
    }
    show_fields(shown)
    print()
    summed = {
        each.name: f"{each.function} of {each.column} over {format_value(each.window)}"
        for each in definition.aggregations
    }
    rows = [[each.name, each.type.value, summed.get(each.name, "as stored")] for each in definition.features]
    show_rows(["feature", "type", "how"], rows)
    if definition.sql:
        print("\nsql")
        show_text(definition.sql)


def show_online(found: OnlineRows) -> None:
    """One row per key."""
    rows = [
        [row.key, format_value(row.event_time), *(format_value(value) for value in row.values)]
        for row in found.rows
    ]
    show_rows(["key", "event", *found.features], rows)
