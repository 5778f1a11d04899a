"""`falaj models compose`: register an ensemble that a TOML file describes."""

from __future__ import annotations

import tomllib
from typing import Annotated

import typer
from pydantic import ValidationError

from falaj.apps.cli.files import read_text
from falaj.apps.cli.generation import arguments, parsing
from falaj.apps.cli.output.messages import Message, show_or_tell
from falaj.apps.cli.output.values import plural
from falaj.apps.cli.session import Session
from falaj.errors import Fault, InvalidInput
from falaj.governance.operations.operation import invalid
from falaj.records.registry import ModelVersion
from falaj.records.serving.ensembles import Ensemble
from falaj.sdk.definition_files.toml_lines import TomlLines


def compose(
    session: Session,
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The model that the ensemble becomes the next version of.")
    ],
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="The steps and outputs, as TOML; '-' is standard input.")
    ],
    *,
    workspace: arguments.OF_WORKSPACE = None,
    zone: Annotated[
        str | None, typer.Option(metavar="ZONE", help="The zone that stores its description.")
    ] = None,
) -> None:
    """Register an ensemble of model versions and feature lookups as the next version of a model."""
    parsing.check_name("NAME", name, command="models compose")
    ensemble = read_ensemble(file)
    with session.platform() as platform:
        made = platform.models.compose(name, ensemble=ensemble, workspace=workspace, zone=zone)
    show_or_tell(session, made, _composed(made, ensemble))


def read_ensemble(given: str) -> Ensemble:
    """Return the ensemble in a TOML file. Raise InvalidInput with the line of each fault."""
    text = read_text(given, where="FILE")
    try:
        return Ensemble.model_validate(tomllib.loads(text))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InvalidInput.at(given, given=str(error), allowed="a file of TOML in UTF-8") from None
    except ValidationError as error:
        raise _with_lines(invalid("ensemble", error), given, text) from None


def _with_lines(error: InvalidInput, given: str, text: str) -> InvalidInput:
    lines = TomlLines(text)
    faults = [_with_line(fault, given, lines) for fault in error.faults]
    return InvalidInput(f"{given}: {plural(len(faults), 'fault')} in the ensemble", faults=faults)


def _with_line(fault: Fault, given: str, lines: TomlLines) -> Fault:
    field = tuple(int(part) if part.isdecimal() else part for part in fault.where.split("."))
    return fault.model_copy(update={"where": f"{given}:{lines.line(field)} {fault.where}"})


def _composed(made: ModelVersion, ensemble: Ensemble) -> Message:
    steps = ", ".join(step.name for level in ensemble.levels() for step in level)
    lines = [f"{made.reference} is composed of {plural(len(ensemble.steps), 'step')}: {steps}"]
    shown = [("takes", each) for each in made.inputs] + [("gives", each) for each in made.outputs]
    lines += [f"  {word}  {each.name}: {each.dtype} {list(each.shape)}" for word, each in shown]
    return Message("\n".join(lines), (("next", f"deploy {made.reference}"),))
