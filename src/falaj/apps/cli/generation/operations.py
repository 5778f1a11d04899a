"""Generates a command for an operation from its declaration, and presents the result."""

from __future__ import annotations

import csv
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import datetime
from typing import Annotated, Any

import typer
from pydantic_core import to_json

from falaj.apps.cli.files import open_input, output
from falaj.apps.cli.generation import arguments, parsing
from falaj.apps.cli.generation.presentation import presentation_of
from falaj.apps.cli.generation.typer_commands import CommandFunction
from falaj.apps.cli.names import full_references
from falaj.apps.cli.output.messages import print_message
from falaj.apps.cli.output.prompts import confirm, require_answerable
from falaj.apps.cli.output.results import show, show_json_lines, show_records
from falaj.apps.cli.output.tables import show_rows
from falaj.apps.cli.output.values import format_value
from falaj.apps.cli.session import Session
from falaj.control.services import all_operations
from falaj.governance.operations.operation import Operation, ResponseShape
from falaj.records.governance.objects import Page
from falaj.sdk.platform import Platform

OUTPUT = Annotated[
    str | None, typer.Option("--output", metavar="FILE", help="Write here instead of standard output.")
]
ARROW_OUTPUT = Annotated[
    str | None,
    typer.Option(
        "--output",
        metavar="FILE",
        help="Write Arrow here, - for standard output, instead of a table on a terminal and CSV elsewhere.",
    ),
]

LARGEST_PAGE = 1000

SHOWN_ROWS = 20
"""Rows of an Arrow table that are printed on a terminal."""


def command_for(operation: Operation) -> CommandFunction:
    """Return the command that performs `operation` and prints its result."""

    def perform(session: Session, **typed: Any) -> int | None:
        yes, to = typed.pop("yes", False), typed.pop("output_file", None)
        everything = typed.pop("all_pages", False)
        given = parsing.parse(operation, typed)
        parsing.check(operation, given)
        if operation.confirm:
            require_answerable(yes=yes)
        with session.platform() as platform, open_upload(operation, given) as ready:
            ready = full_references(platform, operation, ready)
            if operation.confirm:
                question = parsing.unparse(operation, ready)
                confirm(f"{question}: {operation.summary} Continue?", yes=yes)
            if everything:
                columns = presentation_of(operation.group).columns
                found = pages(platform, operation, ready)
                _show_everything(session, found, lambda items: show_records(items, columns))
            else:
                present(session, operation, given, call(platform, operation, ready), to=to)
        return None

    added = [_added("yes", arguments.YES, False)] if operation.confirm else []
    added += [_added("all_pages", arguments.ALL, False)] if _cursor_of(operation) is not None else []
    outputs = {ResponseShape.BYTES: OUTPUT, ResponseShape.ARROW: ARROW_OUTPUT}
    added += [_added("output_file", outputs[operation.shape], None)] if operation.shape in outputs else []
    session = inspect.Parameter("session", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Session)
    parameters = [session, *arguments.signature(operation), *added]
    perform.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    perform.__doc__ = inspect.getdoc(operation.body)
    return perform


def call(platform: Platform, operation: Operation, given: Mapping[str, Any]) -> Any:
    """Perform `operation` on `platform`."""
    method = getattr(getattr(platform, operation.group), operation.body.__name__)
    return method(**given)


def pages(platform: Platform, operation: Operation, given: Mapping[str, Any]) -> Iterator[Page[Any]]:
    """Perform a listing operation page by page, from where `given` says to the end."""
    cursor, given = _cursor_of(operation) or "after", {**given, "limit": LARGEST_PAGE}
    while True:
        page = call(platform, operation, given)
        yield page
        if page.next is None:
            return
        given[cursor] = page.next if cursor == "after" else int(page.next)


def present(
    session: Session,
    operation: Operation,
    given: Mapping[str, Any],
    result: Any,
    *,
    to: str | None = None,
) -> None:
    """Print the result of `operation`, or write it to the file `to`."""
    if operation.shape is ResponseShape.BYTES:
        with output(to) as file:
            for chunk in result:
                file.write(chunk)
    elif operation.shape is ResponseShape.ARROW:
        _write_arrow(result, to, as_json=session.json)
    elif operation.shape is ResponseShape.RECORDS:
        if session.json:
            show_json_lines(result)
        else:
            show_records(result, presentation_of(operation.group).columns)
    else:
        _show_result(session, operation, given, result)


@contextmanager
def open_upload(operation: Operation, given: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield `given` with the file that was named for the upload opened."""
    with ExitStack() as stack:
        ready = dict(given)
        if operation.upload:
            ready[operation.upload] = stack.enter_context(open_input(given[operation.upload], where="FILE"))
        yield ready


def show_page(
    session: Session,
    name: str,
    typed: Mapping[str, Any],
    table: Callable[[tuple[Any, ...]], None],
    *,
    everything: bool = False,
) -> None:
    """Perform the listing operation `name` with what was typed, and print its page with `table`, or all pages."""
    operation = all_operations()[name]
    given = parsing.parse(operation, typed)
    parsing.check(operation, given)
    with session.platform() as platform:
        if everything:
            _show_everything(session, pages(platform, operation, given), table)
            return
        found = call(platform, operation, given)
    if session.json or not found.items:
        show(found, as_json=session.json)
        return
    table(found.items)
    _print_next_page(session, operation, given, found)


def _show_result(session: Session, operation: Operation, given: Mapping[str, Any], result: Any) -> None:
    presentation = presentation_of(operation.group)
    message = presentation.messages.get(operation.name)
    if message is not None and not session.json:
        print_message(session, message(result, given))
        return
    show(result, as_json=session.json, columns=presentation.columns)
    if isinstance(result, Page) and not session.json:
        _print_next_page(session, operation, given, result)


def _show_everything(
    session: Session, found: Iterator[Page[Any]], table: Callable[[tuple[Any, ...]], None]
) -> None:
    """Print the items of all pages as one page; as JSON, each page when it has come."""
    items = (item for page in found for item in page.items)
    if session.json:
        print('{"items": [', end="")
        for number, item in enumerate(items):
            print(",\n" if number else "\n", to_json(item).decode(), sep="", end="")
        print('\n], "next": null}')
        return
    shown = tuple(items)
    if shown:
        table(shown)
    else:
        show_records(())


def _cursor_of(operation: Operation) -> str | None:
    """Return the parameter that `next` of a page is given to; none if the operation does not list pages."""
    result = operation.signature.return_annotation
    if not (isinstance(result, type) and issubclass(result, Page) and "limit" in operation.parameters):
        return None
    return "after" if "after" in operation.parameters else "before"


def _print_next_page(
    session: Session, operation: Operation, given: Mapping[str, Any], page: Page[Any]
) -> None:
    if page.next:
        command = parsing.unparse(operation, given, **{str(_cursor_of(operation)): page.next})
        print(f"there are more: {session.full_command(command)}", file=sys.stderr)


def _write_arrow(table: Any, to: str | None, *, as_json: bool) -> None:
    if as_json:
        for batch in table:
            show_json_lines(batch.to_pylist())
        return
    if to is None and sys.stdout.isatty():
        _show_beginning(table)
        return
    if to is None:
        _write_csv(table)
        return
    import pyarrow as pa

    with output(to) as file, pa.ipc.new_stream(file, table.schema) as writer:
        for batch in table:
            writer.write_batch(batch)


def _write_csv(table: Any) -> None:
    """Print all rows as CSV: a pipe is read by people and by line tools; --output - writes Arrow to it."""
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(table.schema.names)
    for batch in table:
        for row in batch.to_pylist():
            writer.writerow([_csv_value(value) for value in row.values()])


def _csv_value(value: Any) -> Any:
    return value.isoformat() if isinstance(value, datetime) else value


def _show_beginning(table: Any) -> None:
    """Print the first rows; --output and --json give all of them."""
    rows: list[dict[str, Any]] = []
    for batch in table:
        rows += batch.slice(0, SHOWN_ROWS + 1 - len(rows)).to_pylist()
        if len(rows) > SHOWN_ROWS:
            break
    names = table.schema.names
    show_rows(names, [[format_value(row[name]) for name in names] for row in rows[:SHOWN_ROWS]])
    if len(rows) > SHOWN_ROWS:
        print(
            "there are more rows; --output FILE writes all of them as Arrow, --json as lines, a pipe gets CSV",
            file=sys.stderr,
        )


def _added(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
