"""`falaj workflows`: follow long-running workflows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from falaj.apps.cli.generation import arguments, parsing
from falaj.apps.cli.generation.presentation import Presentation
from falaj.apps.cli.names import completion_of, full_id
from falaj.apps.cli.output.errors import FAILED
from falaj.apps.cli.output.messages import Given, Message
from falaj.apps.cli.output.results import show_changes
from falaj.apps.cli.output.values import printable
from falaj.apps.cli.session import Session
from falaj.control.services import all_operations
from falaj.records.control.workflows import WorkflowRun, WorkflowState

PRESENTATION = Presentation(
    columns={WorkflowRun: ("id", "workflow", "state", "step", "steps", "doing", "created_at")},
    lists={"work": "workflows list"},
)


@PRESENTATION.command("watch")
def watch(
    session: Session,
    work: Annotated[
        str,
        typer.Argument(metavar="WORK", help=f"Work: {arguments.SHORT}", autocompletion=completion_of("work")),
    ],
) -> int:
    """Print every change until it ends; exit 1 if it failed or was cancelled."""
    parsing.check(all_operations()["workflows.watch"], {"work": work})
    with session.platform() as platform:
        last = show_changes(
            platform.workflows.watch(full_id(platform, "work", work)), describe, as_json=session.json
        )
    return 0 if last is None or last.state is WorkflowState.DONE else FAILED


def describe(work: WorkflowRun) -> str:
    """Return a line about its progress."""
    total = f" of {work.steps}" if work.steps else ""
    far = f", step {work.step}{total}" if work.state is WorkflowState.RUNNING else ""
    made = work.result or {}
    what = work.error or _verdict(made) or work.doing or str(made.get("name") or made.get("id") or "")
    return f"{work.workflow} {work.state}{far}" + (f": {printable(what)}" if what else "")


def _verdict(made: Mapping[str, Any]) -> str:
    """Return the verdict of a canary, if there is one."""
    verdict = made.get("verdict") or {}
    outcome = str(verdict.get("outcome", "")).replace("_", " ")
    return f"{outcome}; {verdict['words']}" if outcome else ""


@PRESENTATION.message("workflows.cancel")
def _cancelled(made: WorkflowRun, given: Given) -> Message:
    return Message(f"work {made.id} stops before its next step", (("next", f"workflows watch {made.id}"),))
