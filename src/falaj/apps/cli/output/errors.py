"""Reports errors on stderr; exit status: 1 refused or failed, 2 misuse, 130 interrupted, 143 terminated."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Any, NamedTuple

import typer

from falaj.apps.cli.output.logs import debugging
from falaj.apps.cli.output.values import printable
from falaj.errors import FalajError, Fault, HomeBusy, Internal, InvalidInput, NotFound

FAILED, MISUSED, INTERRUPTED, HUNG_UP, TERMINATED = 1, 2, 130, 141, 143


class Report(NamedTuple):
    """An error as it is reported; `hints` are labelled lines, such as the next command."""

    status: int
    code: str
    message: str
    faults: tuple[Fault, ...] = ()
    details: dict[str, Any] = {}
    hints: tuple[tuple[str, str], ...] = ()


def report_error(error: BaseException, *, as_json: bool = False) -> int:
    """Print `error` on stderr, as one line of JSON where that is asked for; return the exit status."""
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return INTERRUPTED
    if isinstance(error, BrokenPipeError):
        return discard_output()
    if debugging():
        traceback.print_exception(error)
    found = _report(error)
    if as_json:
        print(_to_json(found), file=sys.stderr)
    else:
        _print(found)
    return found.status


def discard_output() -> int:
    """Discard further output, because its reader has closed the pipe; return the exit status."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return HUNG_UP


def _report(error: BaseException) -> Report:
    if isinstance(error, typer.TyperException):
        return Report(MISUSED, "usage", error.format_message().rstrip("."), hints=tuple(_usage(error)))
    if isinstance(error, FalajError):
        status = MISUSED if isinstance(error, InvalidInput) else FAILED
        return Report(status, error.code, error.message, error.faults, error.details, tuple(_hints(error)))
    if isinstance(error, OSError):
        return Report(FAILED, "system", f"{error.filename or 'the system'}: {error.strerror or error}")
    hint = ("fix", "this is a bug in Falaj; FALAJ_DEBUG=1 prints the traceback")
    return Report(FAILED, "internal", f"{type(error).__name__}: {error}", hints=(hint,))


def _usage(error: typer.TyperException) -> Iterator[tuple[str, str]]:
    context: Any = getattr(error, "ctx", None)
    if context is not None:
        yield "usage", context.get_usage().partition(": ")[2]
        yield "help", f"{context.command_path} --help"


def _hints(error: FalajError) -> Iterator[tuple[str, str]]:
    """Yield the next command, for errors that have one."""
    if isinstance(error, HomeBusy):
        yield "fix", "falaj status shows what runs; falaj down stops it"
    elif isinstance(error, NotFound) and "kind" in error.details:
        from falaj.apps.cli.app import GROUPS
        from falaj.apps.cli.generation.presentation import list_command

        if similar := error.details.get("similar"):
            yield "similar", f"did you mean {' or '.join(similar)}?"
        command = list_command(GROUPS, str(error.details["kind"]), str(error.details.get("reference", "")))
        if command is not None:
            yield "look", f"falaj {command}"
    elif isinstance(error, Internal) and not debugging():
        yield "fix", "the platform's log has the cause; it is in the folder logs of the home"


def _to_json(found: Report) -> str:
    """Return the error as one JSON object, with the names that the REST API uses."""
    document = {
        "code": found.code,
        "detail": found.message,
        "faults": [fault.model_dump(exclude_none=True) for fault in found.faults],
        "details": found.details,
        "hints": [{name: value} for name, value in found.hints],
        "exit_status": found.status,
    }
    return json.dumps(document, default=str)


def _print(found: Report) -> None:
    head = typer.style(f"error[{found.code}]", fg="red", bold=True)
    typer.echo(f"{head} {printable(found.message)}", err=True, color=_colored())
    is_named = len(found.faults) == 1 and found.faults[0].where in found.message
    for fault in found.faults:
        where, *rows = fault.lines()
        if not is_named:
            typer.echo(f"  {printable(where)}", err=True)
        for row in rows:
            typer.echo(printable(row if is_named else f"  {row}").replace("\n", "\n" + " " * 13), err=True)
    for name, value in found.hints:
        typer.echo(f"  {name:<8} {value}", err=True)


def _colored() -> bool | None:
    """Return whether to use colours; none: only where stderr is a terminal."""
    return False if os.environ.get("NO_COLOR") else None
