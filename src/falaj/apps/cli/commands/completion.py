"""`falaj completion`: print the completion script of a shell."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer
from typer._completion_shared import get_completion_script

from falaj.apps.cli.app import COMPLETE_VARIABLE, PROGRAM
from falaj.apps.cli.generation.typer_commands import command
from falaj.apps.cli.session import Session
from falaj.errors import InvalidInput

SHELLS = ("bash", "zsh", "fish")


def completion(
    session: Session,
    shell: Annotated[
        str,
        typer.Argument(metavar="SHELL", help="bash, zsh or fish", autocompletion=lambda: list(SHELLS)),
    ],
) -> None:
    """Print the completion script of a shell. For bash: eval "$(falaj completion bash)" in ~/.bashrc"""
    if shell not in SHELLS:
        raise InvalidInput.at("SHELL", given=shell, allowed=", ".join(SHELLS))
    print(get_completion_script(prog_name=PROGRAM, complete_var=COMPLETE_VARIABLE, shell=shell))


COMMANDS = {"completion": partial(command, "completion", completion, prints=False)}
