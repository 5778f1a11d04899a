"""Pipelines as people write and read them, and a canary without JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from falaj.apps.cli.generation import arguments, parsing
from falaj.apps.cli.generation.operations import show_page
from falaj.apps.cli.output.messages import print_message, result_message
from falaj.apps.cli.output.results import show
from falaj.apps.cli.output.tables import show_fields, show_rows
from falaj.apps.cli.output.values import format_value
from falaj.apps.cli.session import Session
from falaj.control.services import all_operations
from falaj.errors import InvalidInput
from falaj.records.control.pipelines import Canary, StoredPipeline
from falaj.sdk.pipelines import add_lines, apply_pipeline, read_pipeline

PIPELINE = Annotated[str, typer.Argument(metavar="PIPELINE", help="A pipeline: its name or id.")]
WORKSPACE = Annotated[str | None, typer.Option(metavar="WORKSPACE", help="Where the pipeline belongs.")]


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
    _tell(session, "pipelines.apply", made, {})


def list_pipelines(
    session: Session,
    *,
    workspace: Annotated[str | None, typer.Option(metavar="WORKSPACE", help="Of this workspace.")] = None,
    after: Annotated[str, typer.Option(metavar="AFTER", help=arguments.HELP["after"])] = "",
    limit: Annotated[str, typer.Option(metavar="LIMIT", help=arguments.HELP["limit"])] = "100",
) -> None:
    """The pipelines of a workspace, each with its last start."""
    typed = {"workspace": workspace, "after": after, "limit": limit}
    show_page(session, "pipelines.list", typed, _show_pipelines)


def show_pipeline(session: Session, pipeline: PIPELINE) -> None:
    """One pipeline, and its last start."""
    parsing.check(all_operations()["pipelines.show"], {"pipeline": pipeline})
    with session.platform() as platform:
        found = platform.pipelines.show(pipeline)
    session.show(found, _show_pipeline)


def canary(
    session: Session,
    endpoint: Annotated[str, typer.Argument(metavar="ENDPOINT", help="An endpoint: its name or id.")],
    *,
    model: Annotated[str, typer.Option(metavar="VERSION", help="The challenger, such as churn@3.")],
    alias: Annotated[
        str | None, typer.Option(metavar="ALIAS", help="Points at it if the verdict is good.")
    ] = None,
    share: Annotated[
        str | None, typer.Option(metavar="PERCENT", help="Of the requests; 1 to 50. (default 10)")
    ] = None,
    requests: Annotated[
        str | None, typer.Option(metavar="COUNT", help="Each version answers as many. (default 500)")
    ] = None,
    labels: Annotated[
        str | None, typer.Option(metavar="COUNT", help="Outcomes known of each; 0: no score. (default 200)")
    ] = None,
    error_rate: Annotated[
        str | None, typer.Option(metavar="SHARE", help="More errors than the champion's. (default 0.01)")
    ] = None,
    tolerance: Annotated[
        str | None, typer.Option(metavar="SHARE", help="Of the champion's score, worse. (default 0.02)")
    ] = None,
    longest: Annotated[
        str | None, typer.Option(metavar="TIME", help="Undecided then: rolled back. (default 1d)")
    ] = None,
) -> None:
    """Try a version beside the one that serves; then all requests go to it (and `alias` points at it), or none."""
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
    _tell(session, "pipelines.canary", made, given)


def _tell(session: Session, operation: str, made: Any, given: dict[str, Any]) -> None:
    said = result_message(operation, made, given)
    if session.json or said is None:
        show(made, as_json=session.json)
    else:
        print_message(session, said)


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
    """What may start a pipeline, in words."""
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
            "rest": f"{format_value(plan.rest)} between starts by drift",
            "last start": format_value(found.started_at),
            "cause": format_value(found.cause),
            "work": format_value(found.work),
            "applied by": found.applied_by,
            "id": found.id,
        }
    )


GROUP_COMMANDS: dict[str, Any] = {
    "apply": apply,
    "list": list_pipelines,
    "show": show_pipeline,
    "canary": canary,
}
