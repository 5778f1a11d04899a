"""`falaj policies`: publish and check policies in files, and run example decisions without a platform."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from falaj.apps.cli.files import read_text
from falaj.apps.cli.generation import arguments, parsing
from falaj.apps.cli.generation.operations import present
from falaj.apps.cli.generation.presentation import Presentation
from falaj.apps.cli.output.errors import FAILED
from falaj.apps.cli.output.messages import Given, Message
from falaj.apps.cli.output.results import show
from falaj.apps.cli.output.tables import show_rows
from falaj.apps.cli.output.values import plural
from falaj.apps.cli.session import Session
from falaj.control.services import all_operations
from falaj.errors import InvalidInput, PolicyInvalid
from falaj.governance.policy.examples import run_examples
from falaj.records.governance.policy import AllowedPrincipal, ExampleOutcome, Policy

PRESENTATION = Presentation(
    columns={
        AllowedPrincipal: ("principal", "kind", "rule"),
        Policy: ("name", "workspace", "version", "published_at", "id"),
    },
    help={"action": "An action, such as blobs.read."},
)


CEDAR = Annotated[str, typer.Argument(metavar="FILE", help="The policy in Cedar; - for standard input.")]


@PRESENTATION.command("publish")
def publish(
    session: Session,
    name: arguments.NAME,
    file: CEDAR,
    *,
    workspace: Annotated[
        str | None,
        typer.Option(metavar="WORKSPACE", help="The workspace that it applies to; platform for all of them."),
    ] = None,
) -> None:
    """Publish the policy in a file; it replaces an earlier version."""
    operation = all_operations()["policies.publish"]
    typed = {"name": name, "text": read_text(file, where="FILE"), "workspace": workspace}
    given = parsing.parse(operation, typed)
    parsing.check(operation, given)
    with session.platform() as platform:
        present(session, operation, given, platform.policies.publish(**given))


@PRESENTATION.command("check")
def check(session: Session, file: CEDAR) -> None:
    """Check whether the policy in a file can be published, without publishing it."""
    text = read_text(file, where="FILE")
    with session.platform() as platform:
        try:
            checked = platform.policies.check(text=text)
        except PolicyInvalid as error:
            faults = [fault.model_copy(update={"where": file}) for fault in error.faults]
            raise PolicyInvalid(f"{file} cannot be published", faults=faults) from None
    if session.json:
        show(checked, as_json=True)
    else:
        print(f"{file} can be published: {plural(checked.rules, 'rule')}")


@PRESENTATION.command("test")
def test(
    session: Session,
    file: Annotated[str, typer.Argument(metavar="FILE", help="TOML: policies, and examples of decisions.")],
) -> int:
    """Run the example decisions of a file against its policies and the built-in roles, without a platform."""
    path = Path(file)
    if not path.is_file():
        raise InvalidInput.at("FILE", given=file, allowed="a TOML file with [[example]] tables")
    outcomes = run_examples(path, all_operations().values())
    failed = [outcome for outcome in outcomes if not outcome.passed]
    if session.json:
        show(outcomes, as_json=True)
    elif failed:
        _show_failed(failed)
    if not session.json:
        print(f"{plural(len(outcomes) - len(failed), 'example')} passed, {len(failed)} failed")
    return FAILED if failed else 0


def _show_failed(failed: list[ExampleOutcome]) -> None:
    headings = ["example", "expected", "got", "by", "what"]
    rows = [[str(each.number), each.expected, each.got, each.rule, each.what] for each in failed]
    show_rows(headings, rows)


@PRESENTATION.message("policies.publish")
def _published(made: Policy, given: Given) -> Message:
    where = "everywhere" if made.workspace == "platform" else f"in {made.workspace}"
    undo = f"policies withdraw {made.workspace}/{made.name}"
    return Message(f"policy {made.name}, version {made.version}, is in force {where}", (("undo", undo),))


@PRESENTATION.message("policies.withdraw")
def _withdrawn(made: Policy, given: Given) -> Message:
    undo = f"policies publish {made.name} FILE --workspace {made.workspace}"
    return Message(f"policy {made.name} is out of force in {made.workspace}", (("undo", undo),))
