"""Pipelines as people write and read them, and a canary without JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from falaj.apps.cli.generation import arguments, parsing
from falaj.apps.cli.generation.operations import show_page
from falaj.apps.cli.generation.presentation import Presentation
from falaj.apps.cli.output.messages import (
    Given,
    Message,
    show_or_tell,
)
from falaj.apps.cli.output.tables import show_fields, show_rows
from falaj.apps.cli.output.values import format_value
from falaj.apps.cli.session import Session
from falaj.control.services import all_operations
from falaj.errors import InvalidInput
from falaj.records.control.pipelines import Canary, StoredPipeline
from falaj.records.control.workflows import WorkflowRun
from falaj.sdk.pipelines import add_lines, apply_pipeline, read_pipeline

PRESENTATION = Presentation(lists={"pipeline": "pipelines list"})


PIPELINE = Annotated[str, typer.Argument(metavar="PIPELINE", help="A pipeline: its name or id.")]
WORKSPACE = Annotated[str | None, typer.Option(metavar="WORKSPACE", help="Where the pipeline belongs.")]


@PRESENTATION.command("apply")
def apply(
    session: Session,
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="TOML: the pipeline, and the script of its job.")
    ],
    *,
    workspace: WORKSPACE = None,
) -> None:
    """Bring a pipeline to the definition in a file, with the code of its job."""
    given = read_pipeline(Path(file))
    with session.platform() as platform:
        try:
            made = apply_pipeline(platform, workspace=workspace, **given)
        except InvalidInput as error:
            raise add_lines(error, Path(file)) if error.faults else error from None
    show_or_tell(session, made, _pipeline_applied(made, {}))


@PRESENTATION.command("list")
def list_pipelines(
    session: Session,
    *,
    workspace: arguments.OF_WORKSPACE = None,
    after: arguments.AFTER = "",
    limit: arguments.LIMIT = "100",
) -> None:
    """List the pipelines of a workspace, each with its last start."""
    typed = {"workspace": workspace, "after": after, "limit": limit}
    show_page(session, "pipelines.list", typed, _show_pipelines)


@PRESENTATION.command("show")
def show_pipeline(session: Session, pipeline: PIPELINE) -> None:
    """Show one pipeline, and its last start."""
    parsing.check(all_operations()["pipelines.show"], {"pipeline": pipeline})
    with session.platform() as platform:
        found = platform.pipelines.show(pipeline)
    session.show(found, _show_pipeline)


@PRESENTATION.command("canary")
def canary(
    session: Session,
    endpoint: arguments.ENDPOINT,
    *,
    model: Annotated[str, typer.Option(metavar="VERSION", help="The challenger, such as churn@3.")],
    alias: Annotated[
        str | None, typer.Option(metavar="ALIAS", help="Set to it if the canary succeeds.")
    ] = None,
    share: Annotated[
        str | None, typer.Option(metavar="PERCENT", help="Its share of the requests; 1 to 50. (default 10)")
    ] = None,
    requests: Annotated[
        str | None,
        typer.Option(metavar="COUNT", help="Requests that each version must answer. (default 500)"),
    ] = None,
    labels: Annotated[
        str | None,
        typer.Option(metavar="COUNT", help="Labels that each version must have; 0: no score. (default 200)"),
    ] = None,
    error_rate: Annotated[
        str | None, typer.Option(metavar="SHARE", help="Allowed increase of the error rate. (default 0.01)")
    ] = None,
    tolerance: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE", help="Allowed loss of score, as a share of the champion's. (default 0.02)"
        ),
    ] = None,
    longest: Annotated[
        str | None, typer.Option(metavar="TIME", help="Roll back if it is undecided by then. (default 1d)")
    ] = None,
) -> None:
    """Run a version as a canary beside the one that serves; then promote it to all requests, or roll it back."""
    typed = {
        "share": share,
        "requests": requests,
        "labels": labels,
        "error_rate": error_rate,
        "tolerance": tolerance,
        "longest": None if longest is None else parsing.parse_duration(longest, "--longest"),
    }
    plan = {name: value for name, value in typed.items() if value is not None}
    given: dict[str, Any] = {"endpoint": endpoint, "model": model} | ({"alias": alias} if alias else {})
    parsing.check_record(Canary, plan, command="pipelines canary")
    parsing.check(all_operations()["pipelines.canary"], given)
    with session.platform() as platform:
        made = platform.pipelines.canary(**given, plan=Canary.model_validate(plan))
    show_or_tell(session, made, _canary_started(made, given))


def _show_pipelines(found: tuple[StoredPipeline, ...]) -> None:
    rows = [
        [
            each.definition.name,
            each.definition.endpoint,
            each.definition.model,
            describe_triggers(each),
            format_value(each.started_at),
            format_value(each.cause),
            format_value(each.work),
        ]
        for each in found
    ]
    show_rows(["name", "endpoint", "model", "started by", "last start", "cause", "work"], rows)


def describe_triggers(found: StoredPipeline) -> str:
    """Return what may start a pipeline."""
    plan = found.definition
    every = [] if plan.every is None else [f"every {format_value(plan.every)}"]
    return ", ".join([*(["drift"] if plan.on_drift else []), *every, "a person"])


def _show_pipeline(found: StoredPipeline) -> None:
    plan, trial = found.definition, found.definition.canary
    optimized = "-" if plan.optimizing is None else ", ".join(plan.optimizing.recipes)
    show_fields(
        {
            "name": plan.name,
            "endpoint": plan.endpoint,
            "model": f"{plan.model}, promoted to {plan.alias}",
            "training set": f"{plan.spine} of {format_value(plan.window)}, joined with {', '.join(plan.views)}",
            "script": " ".join([plan.job.script or plan.job.module or "-", *plan.job.args]),
            "optimized": optimized,
            "canary": f"{trial.share}% of the requests, {trial.requests} requests, {trial.labels} labels, "
            f"{format_value(trial.longest)} at most",
            "started by": describe_triggers(found),
            "cooldown": f"{format_value(plan.rest)} between starts by drift",
            "last start": format_value(found.started_at),
            "cause": format_value(found.cause),
            "work": format_value(found.work),
            "applied by": found.applied_by,
            "id": found.id,
        }
    )


@PRESENTATION.message("pipelines.apply")
def _pipeline_applied(made: StoredPipeline, given: Given) -> Message:
    plan = made.definition
    starts = [words for words, on in (("drift", plan.on_drift), (f"every {plan.every}", plan.every)) if on]
    words = f"pipeline {plan.name} retrains {plan.model} for {plan.endpoint}"
    words += f"; started by {' and '.join([*starts, 'a person'])}"
    return Message(words, (("next", f"pipelines start {plan.name}"),))


@PRESENTATION.message("pipelines.start")
def _pipeline_started(made: WorkflowRun, given: Given) -> Message:
    return Message(f"work {made.id} retrains the model", (("next", f"workflows watch {made.id}"),))


@PRESENTATION.message("pipelines.canary")
def _canary_started(made: WorkflowRun, given: Given) -> Message:
    words = f"work {made.id} tries {given['model']} on {given['endpoint']}"
    return Message(words, (("next", f"workflows watch {made.id}"),))
