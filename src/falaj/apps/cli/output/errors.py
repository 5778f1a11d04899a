"""Reports errors on stderr; exit status: 1 refused or failed, 2 misuse, 130 interrupted."""

from __future__ import annotations

import os
import sys
import traceback
from typing import Any

import typer

from falaj.apps.cli.output.logs import debugging
from falaj.apps.cli.output.values import printable
from falaj.errors import FalajError, Fault, HomeBusy, Internal, InvalidInput, NotFound

FAILED, MISUSED, INTERRUPTED, HUNG_UP = 1, 2, 130, 141


def report_error(error: BaseException) -> int:
    """Print `error` on stderr; return the exit status."""
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return INTERRUPTED
    if isinstance(error, BrokenPipeError):
        return discard_output()
    if debugging():
        traceback.print_exception(error)
    if isinstance(error, typer.TyperException):
        return _explain_usage(error)
    if isinstance(error, FalajError):
        _print(error.code, error.message, error.faults)
        _hint(error)
        return MISUSED if isinstance(error, InvalidInput) else FAILED
    if isinstance(error, OSError):
        _print("system", f"{error.filename or 'the system'}: {error.strerror or error}", ())
        return FAILED
    _print("internal", f"{type(error).__name__}: {error}", ())
    _line("fix", "this is a bug in Falaj; FALAJ_DEBUG=1 prints the traceback")
    return FAILED


def discard_output() -> int:
    """Discard further output, because its reader has closed the pipe; return the exit status."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return HUNG_UP


def _explain_usage(error: typer.TyperException) -> int:
    context: Any = getattr(error, "ctx", None)
    _print("usage", error.format_message().rstrip("."), ())
    if context is not None:
        _line("usage", context.get_usage().partition(": ")[2])
        _line("help", f"{context.command_path} --help")
    return MISUSED


def _hint(error: FalajError) -> None:
    """Print the next command, for errors that have one."""
    if isinstance(error, HomeBusy):
        _line("fix", "falaj status shows what runs; falaj down stops it")
    elif isinstance(error, NotFound) and "kind" in error.details:
        from falaj.apps.cli.app import GROUPS
        from falaj.apps.cli.generation.presentation import list_command

        command = list_command(GROUPS, str(error.details["kind"]), str(error.details.get("reference", "")))
        if command is not None:
            _line("look", f"falaj {command}")
    elif isinstance(error, Internal) and not debugging():
        _line("fix", "the platform's log has the cause; it is in the folder logs of the home")


def _print(code: str, message: str, faults: tuple[Fault, ...]) -> None:
    head = typer.style(f"error[{code}]", fg="red", bold=True)
    typer.echo(f"{head} {printable(message)}", err=True, color=_colored())
    is_named = len(faults) == 1 and faults[0].where in message
    for fault in faults:
        where, *rows = fault.lines()
        if not is_named:
            typer.echo(f"  {printable(where)}", err=True)
        for row in rows:
            typer.echo(printable(row if is_named else f"  {row}").replace("\n", "\n" + " " * 13), err=True)


def _line(name: str, value: str) -> None:
    typer.echo(f"  {name:<8} {value}", err=True)


def _colored() -> bool | None:
    """Return whether to use colours; none: only where stderr is a terminal."""
    return False if os.environ.get("NO_COLOR") else None
