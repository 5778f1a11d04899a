"""The reference page of the command line, made from the commands themselves."""

from __future__ import annotations

from functools import partial
from typing import Any

from typer.core import TyperArgument, TyperGroup

from falaj.apps.cli.app import COMMANDS as TOP
from falaj.apps.cli.app import GROUPS, load_command, root
from falaj.apps.cli.generation.typer_commands import command
from falaj.apps.cli.session import Session

HEAD = """# The command line

Made by `falaj reference > docs/reference/cli.md`; do not edit it by hand. `falaj COMMAND --help` says more.

The result goes to standard output, progress and errors to standard error. Exit status: 0 done, 1 refused or failed,
2 misuse, 130 interrupted. Global options may stand in front of a command or behind it.
"""

ENVIRONMENT = """## Environment

| variable | what it says |
|---|---|
| `FALAJ_HOME` | the home, unless `--home` names one; else `.falaj` |
| `FALAJ_URL` | the platform elsewhere, unless `--url` or `--home` names one |
| `FALAJ_TOKEN` | the token for it; else the one that `falaj login` kept |
| `FALAJ_CA` | a file with the certificate authority of a platform elsewhere |
| `FALAJ_CONFIG_DIR` | where keys, witness and credentials lie; else `~/.config/falaj` |
| `FALAJ_DEBUG` | `1` shows the traceback and the log of an error |
| `NO_COLOR` | no colours |
"""


def reference(session: Session) -> None:
    """Print the reference page of the command line, in Markdown."""
    print(page(), end="")


def page() -> str:
    """The whole page."""
    whole = root()
    context = whole.make_context("falaj", [], resilient_parsing=True)
    rows = [_row(parameter.get_help_record(context)) for parameter in whole.params]
    parts = [HEAD, "## Global options\n\n| option | what it does |\n|---|---|\n" + "\n".join(rows) + "\n"]
    parts += [ENVIRONMENT, _section("Commands", "", {name: load_command(name) for name in TOP})]
    parts += [
        _section(f"`falaj {room}`", words, {room: load_command(room)}) for room, words in GROUPS.items()
    ]
    return "\n".join(parts)


def _row(record: tuple[str, str]) -> str:
    return f"| `{record[0]}` | {record[1]} |"


def _section(title: str, words: str, commands: dict[str, Any]) -> str:
    lines = [line for name, made in commands.items() for line in _commands(name, made)]
    head = f"## {title}\n" + (f"\n{words}\n" if words else "")
    return head + "\n| command | what it does |\n|---|---|\n" + "\n".join(lines) + "\n"


def _commands(path: str, made: Any) -> list[str]:
    if isinstance(made, TyperGroup):
        return [line for verb, inner in made.commands.items() for line in _commands(f"{path} {verb}", inner)]
    words = (made.help or "").partition("\n")[0]
    return [f"| `falaj {' '.join([path, *_pieces(made)])}` | {words} |"]


def _pieces(made: Any) -> list[str]:
    """The arguments and options of a command; what may be left out stands in brackets."""
    shown = [
        p for p in made.params if isinstance(p, TyperArgument) or not (p.hidden or p.name == "json_option")
    ]
    return [_piece(parameter) for parameter in shown]


def _piece(parameter: Any) -> str:
    text = str(parameter.metavar)
    if not isinstance(parameter, TyperArgument):
        text = parameter.opts[0] if parameter.is_flag else f"{parameter.opts[0]} {parameter.metavar}"
    repeated = "…" if parameter.multiple else ""
    return f"{text}{repeated}" if parameter.required else f"[{text}]{repeated}"


COMMANDS = {"reference": partial(command, "reference", reference, prints=False)}
