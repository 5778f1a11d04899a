"""`falaj secrets`: set, list and remove secrets; a value is read from stdin, a file or a prompt, never an argument."""

from __future__ import annotations

import getpass
import sys
from typing import Annotated, Any

import typer

from falaj.apps.cli.files import open_input
from falaj.apps.cli.generation import arguments, parsing
from falaj.apps.cli.generation.operations import present
from falaj.apps.cli.generation.presentation import Presentation
from falaj.apps.cli.output.messages import Given, Message, command_with, workspace_prefix
from falaj.apps.cli.session import Session
from falaj.control.services import all_operations
from falaj.errors import Conflict, InvalidInput
from falaj.records.governance.secrets import LARGEST_BYTES, RULE, Secret

PRESENTATION = Presentation(
    columns={Secret: ("name", "set_by", "changed_at", "created_at", "id")}, lists={"secret": "secrets list"}
)


FIX = "falaj secrets set NAME --from-file FILE"


@PRESENTATION.command("set")
def set_secret(
    session: Session,
    name: Annotated[str, typer.Argument(metavar="NAME", help="1 to 128 of a-z, 0-9, '-', '_' and '.'")],
    *,
    from_file: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="A file with the value; - for standard input, which is the default."
        ),
    ] = None,
    workspace: arguments.IN_WORKSPACE = None,
) -> None:
    """Set a secret for jobs; its value is read from standard input, a file, or a hidden prompt.

    The newline after a value of one line is removed.
    """
    operation = all_operations()["secrets.set"]
    parsing.check_name("NAME", name, command="secrets set")
    given: dict[str, Any] = {"name": name, "value": _value(name, from_file), "workspace": workspace}
    parsing.check(operation, given, spelling={"value": "the value"})
    with session.platform() as platform:
        present(session, operation, given, platform.secrets.set(**given))


def _value(name: str, from_file: str | None) -> str:
    if from_file is None and sys.stdin.isatty():
        return _prompt(name)
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
        fix = "encode it with base64, and decode it in the job"
        raise InvalidInput.at(where, given="bytes that are not text", allowed=RULE, fix=fix) from None
    value = _without_line_end(text)
    if not value:
        raise InvalidInput.at(where, given="nothing", allowed=RULE, fix=FIX)
    return value


def _prompt(name: str) -> str:
    try:
        value = getpass.getpass(f"value of {name}: ", stream=sys.stderr)
        again = getpass.getpass("repeat it: ", stream=sys.stderr)
    except EOFError:
        raise Conflict("no value was typed; nothing was done") from None
    if again != value:
        raise Conflict("the two values differ; nothing was done")
    return value


def _without_line_end(text: str) -> str:
    """Return `text` without its newline; a value of several lines keeps it, as keys in PEM need it."""
    line = text.removesuffix("\n").removesuffix("\r")
    return text if "\n" in line else line


@PRESENTATION.message("secrets.set")
def _secret_set(made: Secret, given: Given) -> Message:
    place = workspace_prefix(given)
    words = "is set" if made.created_at == made.changed_at else "has a new value"
    variable = made.name.upper().replace("-", "_").replace(".", "_")
    use = command_with("train SCRIPT --secret", f"{variable}={place}{made.name}")
    return Message(
        f"secret {made.name} {words}; jobs can use it, and nobody can read it",
        (("next", use), ("undo", f"secrets remove {place}{made.name}")),
    )


@PRESENTATION.message("secrets.remove")
def _secret_removed(made: Secret, given: Given) -> Message:
    return Message(f"secret {made.name} is removed", (("undo", f"secrets set {made.name}"),))
