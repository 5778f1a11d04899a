"""`falaj features`: ingest rows from files, create training sets, and show views."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Annotated, Any

import typer

from falaj.apps.cli.files import open_input
from falaj.apps.cli.generation import arguments, parsing
from falaj.apps.cli.generation.operations import show_page
from falaj.apps.cli.generation.presentation import Presentation
from falaj.apps.cli.names import completion_of
from falaj.apps.cli.output.messages import Given, Message, command_with, print_message
from falaj.apps.cli.output.progress import count_bytes, progress
from falaj.apps.cli.output.results import show as show_result
from falaj.apps.cli.output.tables import show_fields, show_rows, show_text
from falaj.apps.cli.output.values import format_value, plural, printable
from falaj.apps.cli.session import Session
from falaj.control.services import all_operations
from falaj.errors import FalajError, InvalidInput
from falaj.records.features import (
    BrokenRule,
    DiscardResult,
    Entity,
    FeatureView,
    IngestResult,
    InvalidRows,
    KnownAt,
    MaterializeResult,
    OnlineRows,
    QuarantinedBatch,
    StoredView,
    TableCleanup,
    TrainingSet,
)
from falaj.sdk.features import spine_reference
from falaj.sdk.platform import Platform

PRESENTATION = Presentation(
    columns={TrainingSet: ("name", "rows", "event_time", "zone", "label", "created_at", "id")},
    help={"batch": "A quarantined batch: its name or id."},
    lists={
        "dataset": "features training-sets",
        "quarantine": "features quarantined-batches VIEW",
        "view": "features list",
    },
)


KNOWN_AT = {
    KnownAt.CREATED_TIME: "created_time: the column {column}",
    KnownAt.INGESTION: "ingestion: when rows came in; rows of the first load and of back-fills when they happened",
    KnownAt.EVENT_TIME: "event_time: when rows happened, also those that came in late",
}
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
REQUEST_FEATURES = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=EXPRESSION",
        help="A column computed from others, also for each request. (may be repeated)",
    ),
]
VIEW = Annotated[
    str, typer.Argument(metavar="VIEW", help="A view: its name or id.", autocompletion=completion_of("view"))
]


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
    strict: Annotated[
        bool,
        typer.Option(
            "--strict",
            help="Refuse times without a zone, nanoseconds, and columns that the view does not have.",
        ),
    ] = False,
    again: Annotated[
        bool, typer.Option("--again", help="Add the rows although the same file was added before.")
    ] = False,
    backfill: Annotated[
        bool,
        typer.Option(
            "--backfill", help="The rows are history: known when they happened, not when they come in."
        ),
    ] = False,
) -> None:
    """Upload files and add their rows to a view. Each file is added once, completely or not at all."""
    label = parsing.parse(
        all_operations()["blobs.upload"], {"only": only, "classes": classes}, command="features ingest"
    )
    _require_files(files)
    done: list[IngestResult] = []
    with session.platform() as platform:
        found = platform.features.show(view)
        place = {"workspace": found.workspace, "zone": found.zone}
        backfill = backfill or (
            found.known_at is KnownAt.INGESTION and not found.rows
        )  # one load, many files
        for file in files:
            staged = ""
            try:
                staged = _upload(platform, file, **place, **label)
                done.append(
                    platform.features.ingest(view, data=staged, strict=strict, again=again, backfill=backfill)
                )
            except FalajError as error:
                raise _after_files(
                    _of_file(error, file, staged), file, files[: len(done)], backfill=backfill
                ) from None
    if session.json:
        show_result(done, as_json=True)
        return
    notes = [note for file, each in zip(files, done, strict=True) for note in _notes(file, each)]
    following = [("next", f"features materialize {shlex.quote(view)}")]
    following += [
        ("see", f"features quarantined-rows {each.batch}") for each in done if each.batch is not None
    ]
    print_message(session, Message("\n".join([_added_words(view, done), *notes]), tuple(following)))


def _added_words(view: str, done: Sequence[IngestResult]) -> str:
    """Say how many rows were added to a view, and how many were quarantined."""
    added, quarantined = sum(each.added for each in done), sum(each.quarantined for each in done)
    words = f"{view}: {plural(added, 'row')} added"
    if quarantined:
        words += f", {quarantined} quarantined"
    words += f", {done[-1].rows} now, in version {done[-1].version}"
    if done[0].known_from is not None:
        words += f"; known from {format_value(done[0].known_from)} on (history: --backfill)"
    return words


def _notes(file: str, done: IngestResult) -> Iterator[str]:
    """Say what was assumed about the rows of a file, and whether they were there already."""
    for note in done.notes:
        yield f"  note   {file}: {note}"
    if done.batch is not None:
        yield f"  note   {file}: {plural(done.quarantined, 'row')} in {done.batch}: {rule_words(done.rules)}"
    if done.already_since is not None:
        since = format_value(done.already_since)
        yield f"  note   {file}: was added before, {since}, and is left out; --again adds it once more"


def rule_words(rules: Sequence[BrokenRule]) -> str:
    """Return broken rules and how many rows break each, like `km min (3)`."""
    return ", ".join(f"{each.column} {each.rule} ({each.rows})" for each in rules)


@PRESENTATION.command("quarantined-batches")
def quarantined_batches(
    session: Session,
    view: VIEW,
    *,
    after: arguments.AFTER = "",
    limit: arguments.LIMIT = "100",
    everything: arguments.ALL = False,
) -> None:
    """List the files whose invalid rows were set aside when they were added to a view, newest first."""
    typed = {"view": view, "after": after, "limit": limit}
    show_page(session, "features.quarantined_batches", typed, show_batches, everything=everything)


def show_batches(batches: Sequence[QuarantinedBatch]) -> None:
    """Print one row for each quarantined batch."""
    rows = [
        [
            each.name,
            str(each.rows),
            rule_words(each.rules),
            str(each.ingested),
            str(each.discarded),
            format_value(each.at),
            each.by,
            each.file,
        ]
        for each in batches
    ]
    show_rows(["batch", "rows", "rules", "ingested", "discarded", "at", "by", "file"], rows)


@PRESENTATION.command("quarantined-rows")
def quarantined_rows(
    session: Session,
    batch: Annotated[
        str,
        typer.Argument(
            metavar="BATCH",
            help="A quarantined batch: its name or id.",
            autocompletion=completion_of("quarantine"),
        ),
    ],
    *,
    after: arguments.AFTER = "",
    limit: arguments.LIMIT = "100",
) -> None:
    """Show rows of a quarantined batch and the rules that they break."""
    operation = all_operations()["features.quarantined_rows"]
    given = parsing.parse(operation, {"batch": batch, "after": after, "limit": limit})
    parsing.check(operation, given)
    with session.platform() as platform:
        found = platform.features.quarantined_rows(**given)
    if session.json:
        show_result(found, as_json=True)
        return
    rows = [
        [
            str(row.row),
            ", ".join(f"{each.column} {each.rule}" for each in row.broken),
            *(format_value(value) for value in row.values),
        ]
        for row in found.items
    ]
    show_rows(["row", "breaks", *found.columns], rows)
    then = [("next", f"features ingest-quarantined {shlex.quote(batch)}")]
    if found.next:
        then = [("more", parsing.unparse(operation, given, after=found.next)), *then]
    then.append(("or", f"features discard-quarantined {shlex.quote(batch)}"))
    print_message(session, Message("they can be ingested once the rules of the view allow it", tuple(then)))


@PRESENTATION.command("infer")
def infer(
    session: Session,
    file: Annotated[str, typer.Argument(metavar="FILE", help="Parquet, CSV or Arrow; - for standard input.")],
    *,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="The view. (default: the name of the file)")
    ] = None,
    entity: Annotated[
        str | None, typer.Option(metavar="NAME", help="What the rows describe. (default: after the key)")
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(metavar="COLUMN", help="What identifies it. (default: the first column that looks so)"),
    ] = None,
    event_time: Annotated[
        str | None,
        typer.Option(metavar="COLUMN", help="Its time. (default: event_time, or the first column of times)"),
    ] = None,
) -> None:
    """Print the definition of an entity and a view that fit a file, as TOML for falaj apply."""
    operation = all_operations()["features.infer"]
    options = {"entity": entity, "key": key, "event_time": event_time}
    typed = options | {"name": name or _view_name(file), "data": "staged"}
    given = parsing.parse(operation, typed)
    parsing.check(operation, given)
    _require_files([file])
    with session.platform() as platform:
        given["data"] = _upload(platform, file)
        try:
            found = platform.features.infer(**given)
        except InvalidInput as error:
            if any(fault.where in options for fault in error.faults):
                raise parsing.name_options(error, command="features infer") from None
            raise _of_file(error, file, given["data"]) from None
    if session.json:
        show_result(found, as_json=True)
        return
    source = None if file == "-" or os.path.isabs(file) else file
    print("\n".join(definition_lines(found.entity, found.view, source=source)))
    skipped = f"; not stored: {', '.join(map(printable, found.skipped))}" if found.skipped else ""
    print(f"{plural(found.rows, 'row')}{skipped}", file=sys.stderr)


def _view_name(file: str) -> str:
    """Return the name of the file as the name of a view."""
    return re.sub(r"[^a-z0-9]+", "-", os.path.basename(file).partition(".")[0].lower()).strip("-") or "rows"


def definition_lines(entity: Entity, view: FeatureView, *, source: str | None) -> list[str]:
    """Return the definitions as lines of TOML that falaj apply reads."""
    columns = ", ".join(f'{each.name} = "{each.type}"' for each in view.columns)
    moments = {"event_time": view.event_time, "created_time": view.created_time}
    named = {name: column for name, column in moments.items() if column not in (None, "event_time")}
    return [
        "[[entity]]",
        f'name = "{entity.name}"',
        f'key = "{entity.key}"',
        f'type = "{entity.type}"',
        "",
        "[[view]]",
        f'name = "{view.name}"',
        f'entities = ["{entity.name}"]',
        *([] if source is None else [f"source = {json.dumps(source)}"]),
        *(f'{name} = "{column}"' for name, column in named.items()),
        f"columns = {{ {columns} }}",
    ]


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
    request_feature: REQUEST_FEATURES = None,
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
    if request_feature:
        given["request_features"] = parsing.parse_request_features(request_feature)
    parsing.check(operation, given, spelling={"views": "--views", "request_features": "--request-feature"})
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
        print_message(session, training_set_message(made, given["views"]))


@PRESENTATION.command("list")
def list_views(
    session: Session,
    *,
    workspace: arguments.IN_WORKSPACE = None,
    after: arguments.AFTER = "",
    limit: arguments.LIMIT = "100",
    everything: arguments.ALL = False,
) -> None:
    """List the views of a workspace, each in its newest version."""
    operation = all_operations()["features.list"]
    if everything:
        typed = {"workspace": workspace, "after": after, "limit": limit}
        show_page(session, "features.list", typed, show_views, everything=True)
        return
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


def _after_files(error: FalajError, file: str, done: list[str], *, backfill: bool) -> FalajError:
    others = "; add the others with --backfill" if backfill else ""
    kept = f" (already ingested: {', '.join(done)}{others})" if done else ""
    named = error.message if file in error.message else f"{file}: {error.message}"
    return type(error)(f"{named}{kept}", faults=error.faults, details=error.details)


def training_set_message(made: TrainingSet, views: Sequence[str]) -> Message:
    """Return the message about a new training set of `views`."""
    shape = f"{plural(made.rows, 'row')}, {plural(len(made.columns), 'column')}, {plural(len(made.views), 'view')}"
    by_event = [
        view for view, pin in zip(views, made.views, strict=True) if pin.known_at is KnownAt.EVENT_TIME
    ]
    note = (
        f"; rows of {', '.join(by_event)} count as known at their event time, also late ones"
        if by_event
        else ""
    )
    words = f"training set {made.name} is ready: {shape}, in zone {made.zone}, {made.label.describe()}{note}"
    return Message(
        "\n".join([words, *(f"  note   spine: {each}" for each in made.notes)]),
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
        "known at": KNOWN_AT[view.known_at].format(column=definition.created_time),
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
    if rules := rule_lines(definition):
        print()
        show_rows(["column", "rule", "allowed"], rules)
    if definition.sql:
        print("\nsql")
        show_text(definition.sql)


def rule_lines(view: FeatureView) -> list[list[str]]:
    """Return the rules for rows that come in: column, rule, and what is allowed."""
    lines = [[each.name, rule, allowed] for each in view.columns for rule, allowed in each.rules.items()]
    lines += [
        [each.name, "max_null_rate", f"{each.max_null_rate * 100:g} % of a file"]
        for each in view.columns
        if each.max_null_rate is not None
    ]
    if view.max_ahead is not None:
        lines.append([view.event_time, "max_ahead", f"{format_value(view.max_ahead)} in the future"])
    if view.freshness is not None:
        lines.append([view.event_time, "freshness", f"newest at most {format_value(view.freshness)} old"])
    if view.unique:
        lines.append(["keys and times", "unique", "rows of different ones in a file"])
    if lines or view.invalid_rows is not InvalidRows.REFUSE:
        share = f"up to {view.max_invalid_share * 100:g} % of a file are set aside"
        words = share if view.invalid_rows is InvalidRows.QUARANTINE else "a file with one is refused"
        lines.append(["invalid rows", view.invalid_rows, words])
    return lines


def show_online(found: OnlineRows) -> None:
    """Print one row for each key."""
    rows = [
        [row.key, format_value(row.event_time), *(format_value(value) for value in row.values)]
        for row in found.rows
    ]
    show_rows(["key", "event", *found.features], rows)


@PRESENTATION.message("features.ingest_quarantined")
def _ingested(made: IngestResult, given: Given) -> Message:
    words = f"{given['batch']}: {plural(made.added, 'row')} added, {made.rows} now, in version {made.version}"
    if made.quarantined:
        left = f"{plural(made.quarantined, 'row')} left: {rule_words(made.rules)}"
        return Message(
            f"{words}; {left}", (("see", command_with("features quarantined-rows", given["batch"])),)
        )
    return Message(words)


@PRESENTATION.message("features.discard_quarantined")
def _discarded(made: DiscardResult, given: Given) -> Message:
    return Message(f"{given['batch']}: {plural(made.discarded, 'row')} discarded")


@PRESENTATION.message("features.materialize")
def _materialized(made: MaterializeResult, given: Given) -> Message:
    words = f"{given['view']}: {plural(made.keys, 'key')} online, version {made.version}"
    if made.ahead:
        words += f"; {plural(made.ahead, 'value')} of the future, each served from its time on"
    if made.complete_until is not None:
        words += f"\n  note   some keys have more of them: materialize again before {format_value(made.complete_until)}"
    return Message(words, (("next", command_with("features read", given["view"], "KEY")),))


@PRESENTATION.message("features.cleanup")
def _cleaned(made: TableCleanup, given: Given) -> Message:
    return Message(f"{plural(made.files, 'file')} and {plural(made.spilled, 'query folder')} removed")
