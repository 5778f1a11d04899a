"""Generates a command for an operation from its declaration, and presents the result."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Annotated, Any

import typer

from falaj.apps.cli.files import open_input, output
from falaj.apps.cli.generation import arguments, parsing
from falaj.apps.cli.generation.presentation import presentation_of
from falaj.apps.cli.generation.typer_commands import CommandFunction
from falaj.apps.cli.output.messages import print_message
from falaj.apps.cli.output.prompts import confirm
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

SHOWN_ROWS = 20
"""Rows of an Arrow table that are printed on a terminal."""


def command_for(operation: Operation) -> CommandFunction:
    """Return the command that performs `operation` and prints its result."""

    def perform(session: Session, **typed: Any) -> int | None:
        yes, to = typed.pop("yes", False), typed.pop("output_file", None)
        given = parsing.parse(operation, typed)
        parsing.check(operation, given)
        if operation.confirm:
            confirm(f"{parsing.unparse(operation, given)}: {operation.summary} Continue?", yes=yes)
        with session.platform() as platform, open_upload(operation, given) as ready:
            result = call(platform, operation, ready)
            present(session, operation, given, result, to=to)
        return None

    added = [_added("yes", arguments.YES, False)] if operation.confirm else []
    added += (
        [_added("output_file", OUTPUT, None)]
        if operation.shape in (ResponseShape.BYTES, ResponseShape.ARROW)
        else []
    )
    session = inspect.Parameter("session", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Session)
    parameters = [session, *arguments.signature(operation), *added]
    perform.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    perform.__doc__ = inspect.getdoc(operation.body)
    return perform


def call(platform: Platform, operation: Operation, given: Mapping[str, Any]) -> Any:
    """Perform `operation` on `platform`."""
    method = getattr(getattr(platform, operation.group), operation.body.__name__)
    return method(**given)


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
    session: Session, name: str, typed: Mapping[str, Any], table: Callable[[tuple[Any, ...]], None]
) -> None:
    """Perform the listing operation `name` with what was typed, and print its page with `table`."""
    operation = all_operations()[name]
    given = parsing.parse(operation, typed)
    parsing.check(operation, given)
    with session.platform() as platform:
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


def _print_next_page(
    session: Session, operation: Operation, given: Mapping[str, Any], page: Page[Any]
) -> None:
    if page.next:
        cursor = "after" if "after" in operation.parameters else "before"
        command = parsing.unparse(operation, given, **{cursor: page.next})
        print(f"there are more: {session.full_command(command)}", file=sys.stderr)


def _write_arrow(table: Any, to: str | None, *, as_json: bool) -> None:
    if as_json:
        for batch in table:
            show_json_lines(batch.to_pylist())
        return
    if to is None and sys.stdout.isatty():
        _show_beginning(table)
        return
    import pyarrow as pa

    with output(to) as file, pa.ipc.new_stream(file, table.schema) as writer:
        for batch in table:
            writer.write_batch(batch)


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
            "there are more rows; --output FILE writes all of them as Arrow, --json as lines", file=sys.stderr
        )


def _added(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
