"""What goes wrong, in words on stderr, and the exit status: 1 refused or failed, 2 misuse, 130 interrupted."""

from __future__ import annotations

import os
import sys
import traceback
from typing import Any

import typer

from falaj.apps.cli.output.logs import debugging
from falaj.apps.cli.output.lookups import list_command
from falaj.apps.cli.output.values import printable
from falaj.errors import FalajError, Fault, HomeBusy, Internal, InvalidInput, NotFound

FAILED, MISUSED, INTERRUPTED, HUNG_UP = 1, 2, 130, 141


def report_error(error: BaseException) -> int:
    """Say on stderr what happened; the exit status."""
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
    _line("fix", "this is a fault of Falaj; FALAJ_DEBUG=1 shows where it is")
    return FAILED


def discard_output() -> int:
    """Whoever read our output has gone: end quietly."""
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
    """The next command, for errors that have one."""
    if isinstance(error, HomeBusy):
        _line("fix", "falaj status says what runs; falaj down stops it")
    elif isinstance(error, NotFound) and (command := list_command(error.message)):
        _line("look", f"falaj {command}")
    elif isinstance(error, Internal) and not debugging():
        _line("fix", "the log of the platform says why; it lies in the home, in logs/")


def _print(code: str, message: str, faults: tuple[Fault, ...]) -> None:
    head = typer.style(f"error[{code}]", fg="red", bold=True)
    typer.echo(f"{head} {printable(message)}", err=True, color=_colored())
    told = len(faults) == 1 and faults[0].where in message
    for fault in faults:
        where, *rows = fault.lines()
        if not told:
            typer.echo(f"  {printable(where)}", err=True)
        for row in rows:
            typer.echo(printable(row if told else f"  {row}").replace("\n", "\n" + " " * 13), err=True)


def _line(name: str, value: str) -> None:
    typer.echo(f"  {name:<8} {value}", err=True)


def _colored() -> bool | None:
    """Whether to use colours; none: where stderr is a terminal."""
    return False if os.environ.get("NO_COLOR") else None
