"""Features for people: rows and training sets from files, and views as tables."""

from __future__ import annotations

import os
import shlex
from contextlib import ExitStack
from typing import Annotated, Any

import typer

from falaj.apps.cli.files import open_input
from falaj.apps.cli.generation import arguments, parsing
from falaj.apps.cli.output.feature_tables import show_online, show_view, show_views, training_set_message
from falaj.apps.cli.output.messages import Message, print_message
from falaj.apps.cli.output.progress import count_bytes, progress
from falaj.apps.cli.output.results import show as show_result
from falaj.apps.cli.output.values import plural
from falaj.apps.cli.session import Session
from falaj.control.services import all_operations
from falaj.errors import FalajError, InvalidInput
from falaj.records.features import IngestResult
from falaj.sdk.features import spine_reference, view_location
from falaj.sdk.platform import Platform

VIEW = Annotated[str, typer.Argument(metavar="VIEW", help="A view: its name or id.")]
WORKSPACE = Annotated[str | None, typer.Option(metavar="WORKSPACE", help="Where it belongs.")]
ZONE = Annotated[str | None, typer.Option(metavar="ZONE", help="Where its bytes lie.")]


def ingest(
    session: Session,
    view: VIEW,
    files: Annotated[
        list[str], typer.Argument(metavar="FILE…", help="Parquet, CSV or Arrow; - for standard input.")
    ],
    *,
    only: Annotated[list[str] | None, typer.Option(metavar="ONLY", help=arguments.HELP["only"])] = None,
    classes: Annotated[
        list[str] | None, typer.Option("--class", metavar="CLASS", help=arguments.HELP["classes"])
    ] = None,
) -> None:
    """Upload files and add their rows to a view. Each file is taken whole or not at all."""
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


def training_set(
    session: Session,
    name: Annotated[str, typer.Argument(metavar="NAME", help=arguments.HELP["name"])],
    *,
    spine: Annotated[
        str, typer.Option(metavar="FILE|VIEW", help="The rows to join features to: a file, or a view.")
    ],
    views: Annotated[list[str], typer.Option(metavar="VIEW,…", help="Views whose features are joined.")],
    since: Annotated[
        str | None, typer.Option(metavar="MOMENT", help="Rows of the spine from here on.")
    ] = None,
    until: Annotated[
        str | None, typer.Option(metavar="MOMENT", help="Rows of the spine before this.")
    ] = None,
    last: Annotated[
        str | None, typer.Option(metavar="TIME", help="Or the last 90d before its newest row.")
    ] = None,
    event_time: Annotated[
        str | None,
        typer.Option(metavar="COLUMN", help="The moment of each row; else event_time, or the view's."),
    ] = None,
    workspace: WORKSPACE = None,
    zone: ZONE = None,
) -> None:
    """Join every row of a file or view with features as they were known at its time, and keep the result."""
    operation = all_operations()["features.training_set"]
    reference = spine_reference(spine)
    rows = {"since": since, "until": until, "last": last, "event_time": event_time}
    typed = {"name": name, "views": views, **rows}
    given = parsing.parse(
        operation, typed | {"workspace": workspace, "zone": zone, "spine": reference or "blob:spine"}
    )
    parsing.check(operation, given, spelling={"views": "--views"})
    if reference is not None and "." in spine and ":" not in spine:
        _require_files([spine], where="--spine")  # a file that is not there, rather than a view
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


def list_views(
    session: Session,
    *,
    workspace: WORKSPACE = None,
    after: Annotated[str, typer.Option(metavar="AFTER", help=arguments.HELP["after"])] = "",
    limit: Annotated[str, typer.Option(metavar="LIMIT", help=arguments.HELP["limit"])] = "100",
) -> None:
    """The views of a workspace, each in its newest version."""
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


def show(
    session: Session,
    view: VIEW,
    *,
    version: Annotated[
        str | None, typer.Option(metavar="VERSION", help="Which version; else the newest.")
    ] = None,
) -> None:
    """What a view is, and its features."""
    operation = all_operations()["features.show"]
    given = parsing.parse(operation, {"view": view, "version": version})
    parsing.check(operation, given)
    with session.platform() as platform:
        found = platform.features.show(**given)
    if session.json:
        show_result(found, as_json=True)
    else:
        show_view(found)


def read(
    session: Session,
    view: VIEW,
    keys: Annotated[
        list[str], typer.Argument(metavar="KEY…", help="Keys; of several columns, joined by '|'.")
    ],
) -> None:
    """The newest features of each key, online."""
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
    """All of them are there and hold something, before the first is sent."""
    for file in files:
        with open_input(file, where=where):
            if file != "-" and not os.path.getsize(file):
                raise InvalidInput.at(
                    where, given=f"{file}, which is empty", allowed="rows as Parquet, CSV or Arrow"
                )


def _of_file(error: FalajError, file: str, staged: str) -> FalajError:
    """`error` with the file that was uploaded, instead of the id that its bytes got."""
    if not staged:
        return error
    faults = [
        fault.model_copy(update={"where": fault.where.replace(f"blob {staged}", file)})
        for fault in error.faults
    ]
    message = error.message.replace(f"blob {staged}", file)
    return type(error)(message, faults=faults, details=error.details)


def _after_files(error: FalajError, file: str, done: list[str]) -> FalajError:
    kept = f" (taken in before: {', '.join(done)})" if done else ""
    named = error.message if file in error.message else f"{file}: {error.message}"
    return type(error)(f"{named}{kept}", faults=error.faults, details=error.details)


GROUP_COMMANDS = {
    "ingest": ingest,
    "training-set": training_set,
    "list": list_views,
    "show": show,
    "read": read,
}
