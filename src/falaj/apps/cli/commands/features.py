"""`falaj features`: ingest rows from files, create training sets, and show views."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Annotated, Any

import typer

from falaj.apps.cli.files import open_input
from falaj.apps.cli.generation import arguments, parsing
from falaj.apps.cli.generation.presentation import Presentation
from falaj.apps.cli.output.messages import Given, Message, command_with, print_message
from falaj.apps.cli.output.progress import count_bytes, progress
from falaj.apps.cli.output.results import show as show_result
from falaj.apps.cli.output.tables import show_fields, show_rows, show_text
from falaj.apps.cli.output.values import format_value, plural
from falaj.apps.cli.session import Session
from falaj.control.services import all_operations
from falaj.errors import FalajError, InvalidInput
from falaj.records.features import IngestResult, MaterializeResult, OnlineRows, StoredView, TrainingSet
from falaj.sdk.features import spine_reference, view_location
from falaj.sdk.platform import Platform

PRESENTATION = Presentation(
    columns={TrainingSet: ("name", "rows", "event_time", "zone", "label", "created_at", "id")},
    lists={"dataset": "features training-sets", "view": "features list"},
)


SPINE = Annotated[
    str, typer.Option(metavar="FILE|VIEW", help="The rows to join features to: a file, or a view.")
]
SINCE = Annotated[str | None, typer.Option(metavar="MOMENT", help="Rows of the spine from this moment on.")]
UNTIL = Annotated[str | None, typer.Option(metavar="MOMENT", help="Rows of the spine before this moment.")]
LAST = Annotated[
    str | None, typer.Option(metavar="TIME", help="Rows of this duration before the newest one, such as 90d.")
]
EVENT_TIME = Annotated[
    str | None,
    typer.Option(
        metavar="COLUMN", help="The column with each row's time. (default: event_time, or the view's)"
    ),
]
VIEW = Annotated[str, typer.Argument(metavar="VIEW", help="A view: its name or id.")]


@PRESENTATION.command("ingest")
def ingest(
    session: Session,
    view: VIEW,
    files: Annotated[
        list[str], typer.Argument(metavar="FILE…", help="Parquet, CSV or Arrow; - for standard input.")
    ],
    *,
    only: arguments.ONLY = None,
    classes: arguments.CLASSES = None,
) -> None:
    """Upload files and add their rows to a view. Each file is added completely or not at all."""
    label = parsing.parse(
        all_operations()["blobs.upload"], {"only": only, "classes": classes}, command="features ingest"
    )
    _require_files(files)
    done: list[IngestResult] = []
    with session.platform() as platform:
        place = view_location(platform, view)
        for file in files:
            staged = ""
            try:
                staged = _upload(platform, file, **place, **label)
                done.append(platform.features.ingest(view, data=staged))
            except FalajError as error:
                raise _after_files(_of_file(error, file, staged), file, files[: len(done)]) from None
    if session.json:
        show_result(done, as_json=True)
        return
    added = sum(each.added for each in done)
    words = f"{view}: {plural(added, 'row')} added, {done[-1].rows} now, in version {done[-1].version}"
    print_message(session, Message(words, (("next", f"features materialize {shlex.quote(view)}"),)))


@PRESENTATION.command("training-set")
def training_set(
    session: Session,
    name: arguments.NAME,
    *,
    spine: SPINE,
    views: Annotated[list[str], typer.Option(metavar="VIEW,…", help="Views whose features are joined.")],
    since: SINCE = None,
    until: UNTIL = None,
    last: LAST = None,
    event_time: EVENT_TIME = None,
    workspace: arguments.IN_WORKSPACE = None,
    zone: arguments.IN_ZONE = None,
) -> None:
    """Create a training set: join every row of a file or view with the features known at its time."""
    operation = all_operations()["features.training_set"]
    reference = spine_reference(spine)
    rows = {"since": since, "until": until, "last": last, "event_time": event_time}
    typed = {"name": name, "views": views, **rows}
    given = parsing.parse(
        operation, typed | {"workspace": workspace, "zone": zone, "spine": reference or "blob:spine"}
    )
    parsing.check(operation, given, spelling={"views": "--views"})
    if reference is not None and "." in spine and ":" not in spine:
        _require_files([spine], where="--spine")  # looks like a file, not a view
    with session.platform() as platform:
        if reference is None:
            place = {key: given[key] for key in ("workspace", "zone") if key in given}
            given["spine"] = _upload(platform, spine, where="--spine", **place)
        try:
            made = platform.features.training_set(**given)
        except FalajError as error:
            raise _of_file(error, spine, str(given["spine"])) if reference is None else error from None
    if session.json:
        show_result(made, as_json=True)
    else:
        print_message(session, training_set_message(made))


@PRESENTATION.command("list")
def list_views(
    session: Session,
    *,
    workspace: arguments.IN_WORKSPACE = None,
    after: arguments.AFTER = "",
    limit: arguments.LIMIT = "100",
) -> None:
    """List the views of a workspace, each in its newest version."""
    operation = all_operations()["features.list"]
    given = parsing.parse(operation, {"workspace": workspace, "after": after, "limit": limit})
    parsing.check(operation, given)
    with session.platform() as platform:
        found = platform.features.list(**given)
    if session.json:
        show_result(found, as_json=True)
    elif not found.items:
        print_message(session, Message("there are no views", (("next", "apply PATH"),)))
    else:
        show_views(found.items)
    if found.next and not session.json:
        print_message(
            session,
            Message("there are more", (("next", parsing.unparse(operation, given, after=found.next)),)),
        )


@PRESENTATION.command("show")
def show(
    session: Session,
    view: VIEW,
    *,
    version: Annotated[
        str | None, typer.Option(metavar="VERSION", help="The version. (default: the newest)")
    ] = None,
) -> None:
    """Show a view and its features."""
    operation = all_operations()["features.show"]
    given = parsing.parse(operation, {"view": view, "version": version})
    parsing.check(operation, given)
    with session.platform() as platform:
        found = platform.features.show(**given)
    if session.json:
        show_result(found, as_json=True)
    else:
        show_view(found)


@PRESENTATION.command("read")
def read(
    session: Session,
    view: VIEW,
    keys: Annotated[
        list[str], typer.Argument(metavar="KEY…", help="Keys; of several columns, joined by '|'.")
    ],
) -> None:
    """Read the newest features of each key from the online store."""
    operation = all_operations()["features.read"]
    parsing.check(operation, {"view": view, "keys": tuple(keys)}, spelling={"keys": "KEY"})
    with session.platform() as platform:
        found = platform.features.read(view, keys=tuple(keys))
    if session.json:
        show_result(found, as_json=True)
    else:
        show_online(found)


def _upload(platform: Platform, file: str, *, where: str = "FILE", **place: Any) -> str:
    total = os.path.getsize(file) if os.path.isfile(file) else None
    with ExitStack() as stack:
        pieces = stack.enter_context(open_input(file, where=where))
        advance = stack.enter_context(progress(f"uploading {file}", total=total, unit="bytes"))
        return platform.blobs.upload(count_bytes(pieces, advance), **place).id


def _require_files(files: list[str], *, where: str = "FILE") -> None:
    """Raise InvalidInput unless all files exist and are not empty."""
    for file in files:
        with open_input(file, where=where):
            if file != "-" and not os.path.getsize(file):
                raise InvalidInput.at(
                    where, given=f"{file}, which is empty", allowed="rows as Parquet, CSV or Arrow"
                )


def _of_file(error: FalajError, file: str, staged: str) -> FalajError:
    """Return `error` with the name of the uploaded file instead of the id of its blob."""
    if not staged:
        return error
    faults = [
        fault.model_copy(update={"where": fault.where.replace(f"blob {staged}", file)})
        for fault in error.faults
    ]
    message = error.message.replace(f"blob {staged}", file)
    return type(error)(message, faults=faults, details=error.details)


def _after_files(error: FalajError, file: str, done: list[str]) -> FalajError:
    kept = f" (already ingested: {', '.join(done)})" if done else ""
    named = error.message if file in error.message else f"{file}: {error.message}"
    return type(error)(f"{named}{kept}", faults=error.faults, details=error.details)


def training_set_message(made: TrainingSet) -> Message:
    """Return the message about a new training set."""
    shape = f"{plural(made.rows, 'row')}, {plural(len(made.columns), 'column')}, {plural(len(made.views), 'view')}"
    return Message(
        f"training set {made.name} is created: {shape}, in zone {made.zone}, {made.label.describe()}",
        (
            ("next", f"train SCRIPT --dataset training={made.name}"),
            ("or", f"features load {made.name} --output {made.name}.arrow"),
        ),
    )


def show_views(views: Sequence[StoredView]) -> None:
    """Print one row for each view."""
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
    """Print a view: its definition, its features, its SQL."""
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
    aggregated = {
        each.name: f"{each.function} of {each.column} over {format_value(each.window)}"
        for each in definition.aggregations
    }
    rows = [
        [each.name, each.type.value, aggregated.get(each.name, "as stored")] for each in definition.features
    ]
    show_rows(["feature", "type", "how"], rows)
    if definition.sql:
        print("\nsql")
        show_text(definition.sql)


def show_online(found: OnlineRows) -> None:
    """Print one row for each key."""
    rows = [
        [row.key, format_value(row.event_time), *(format_value(value) for value in row.values)]
        for row in found.rows
    ]
    show_rows(["key", "event", *found.features], rows)


@PRESENTATION.message("features.materialize")
def _materialized(made: MaterializeResult, given: Given) -> Message:
    words = f"{given['view']}: {plural(made.keys, 'key')} online, version {made.version}"
    return Message(words, (("next", command_with("features read", given["view"], "KEY")),))
