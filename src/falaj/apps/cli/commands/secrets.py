"""`falaj secrets set`: the value comes by standard input, a file or a prompt; no shell and no process list has it."""

from __future__ import annotations

import getpass
import sys
from typing import Annotated, Any

import typer

from falaj.apps.cli.files import open_input
from falaj.apps.cli.generation import parsing
from falaj.apps.cli.generation.operations import present
from falaj.apps.cli.session import Session
from falaj.control.services import all_operations
from falaj.errors import Conflict, InvalidInput
from falaj.records.governance.secrets import LARGEST_BYTES, RULE

FIX = "falaj secrets set NAME --from-file FILE"


def set_secret(
    session: Session,
    name: Annotated[str, typer.Argument(metavar="NAME", help="1 to 128 of a-z, 0-9, '-', '_' and '.'")],
    *,
    from_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="The value; - or nothing for standard input.")
    ] = None,
    workspace: Annotated[str | None, typer.Option(metavar="WORKSPACE", help="Where it belongs.")] = None,
) -> None:
    """Keep a value for jobs under a name: from standard input, a file, or asked for without being shown.

    The end of its line does not belong to a value of one line.
    """
    operation = all_operations()["secrets.set"]
    parsing.check_name("NAME", name, command="secrets set")
    given: dict[str, Any] = {"name": name, "value": _value(name, from_file), "workspace": workspace}
    parsing.check(operation, given, spelling={"value": "the value"})
    with session.platform() as platform:
        present(session, operation, given, platform.secrets.set(**given))


def _value(name: str, from_file: str | None) -> str:
    if from_file is None and sys.stdin.isatty():
        return _asked(name)
    where = "standard input" if from_file in (None, "-") else "--from-file"
    with open_input(from_file or "-", where="--from-file") as pieces:
        raw = bytearray()
        for piece in pieces:
            raw += piece
            if len(raw) > LARGEST_BYTES + 2:
                raise InvalidInput.at(where, given=f"more than {LARGEST_BYTES:,} bytes", allowed=RULE)
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        fix = "base64 makes text of bytes; the job undoes it"
        raise InvalidInput.at(where, given="bytes that are no text", allowed=RULE, fix=fix) from None
    value = _without_line_end(text)
    if not value:
        raise InvalidInput.at(where, given="nothing", allowed=RULE, fix=FIX)
    return value


def _asked(name: str) -> str:
    try:
        value = getpass.getpass(f"value of {name}: ", stream=sys.stderr)
        again = getpass.getpass("once more: ", stream=sys.stderr)
    except EOFError:
        raise Conflict("no value was typed; nothing was done") from None
    if again != value:
        raise Conflict("the two are not the same; nothing was done")
    return value


def _without_line_end(text: str) -> str:
    """A key of several lines keeps its last line's end, as the programs that read it want it."""
    line = text.removesuffix("\n").removesuffix("\r")
    return text if "\n" in line else line


GROUP_COMMANDS = {"set": set_secret}
