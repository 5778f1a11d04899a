"""Pipelines as people write and read them, and a canary without JSON."""

from __future__ import annotations

from collections.abc import Mapping
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
from falaj.records.control.pipelines import (
    Canary,
    CanaryForecast,
    CanaryPlan,
    CanaryTraffic,
    StoredPipeline,
)
from falaj.records.control.workflows import WorkflowRun
from falaj.records.durations import rough_duration
from falaj.sdk.pipelines import add_lines, apply_pipeline, read_pipeline

PRESENTATION = Presentation(lists={"pipeline": "pipelines list"}, options={"plan-canary": "canary --plan"})


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
    everything: arguments.ALL = False,
) -> None:
    """List the pipelines of a workspace, each with its last start."""
    typed = {"workspace": workspace, "after": after, "limit": limit}
    show_page(session, "pipelines.list", typed, _show_pipelines, everything=everything)


@PRESENTATION.command("show")
def show_pipeline(session: Session, pipeline: PIPELINE) -> None:
    """Show one pipeline, and its last start."""
    parsing.check(all_operations()["pipelines.show"], {"pipeline": pipeline})
    with session.platform() as platform:
        found = platform.pipelines.show(pipeline)
    session.show(found, _show_pipeline)


SHARE = Annotated[
    str | None, typer.Option(metavar="PERCENT", help="Its share of the requests; 1 to 50. (default 10)")
]
REQUESTS = Annotated[
    str | None,
    typer.Option(
        metavar="COUNT", help="Requests that each version must answer before a promotion. (default 500)"
    ),
]
LABELS = Annotated[
    str | None,
    typer.Option(
        metavar="COUNT", help="Labelled requests of each before a promotion; 0: no score. (default 200)"
    ),
]
ERROR_RATE = Annotated[
    str | None,
    typer.Option(metavar="SHARE", help="Allowed increase of the error rate; 1: not judged. (default 0.01)"),
]
LATENCY = Annotated[
    str | None,
    typer.Option(
        metavar="SHARE",
        help="Allowed increase of the share of requests above the champion's p95; 1: not judged. (default 0.05)",
    ),
]
TOLERANCE = Annotated[
    str | None,
    typer.Option(metavar="SHARE", help="Allowed loss of score, as a share of the champion's. (default 0.05)"),
]
SCORE_BOUND = Annotated[
    str | None,
    typer.Option(metavar="SCORE", help="Larger scores count as this. (default: see the reference)"),
]
FALSE_ROLLBACK = Annotated[
    str | None,
    typer.Option(metavar="RISK", help="Risk of rolling back a version that is not worse. (default 0.01)"),
]
FALSE_PROMOTION = Annotated[
    str | None,
    typer.Option(metavar="RISK", help="Risk of promoting a version beyond a margin. (default 0.05)"),
]
LONGEST = Annotated[
    str | None, typer.Option(metavar="TIME", help="Keep the champion if undecided by then. (default 1d)")
]
PER_HOUR = Annotated[
    str | None,
    typer.Option(metavar="COUNT", help="With a plan: requests an hour. (default: those of the last day)"),
]
LABELLED = Annotated[
    str | None,
    typer.Option(
        metavar="SHARE", help="With a plan: the share of requests that get a label. (default: as so far)"
    ),
]
WORSE = Annotated[
    str | None,
    typer.Option(
        metavar="TIMES", help="With a plan: how much worse, in margins, such as 0,1,2. (default 0,0.5,1,2,4)"
    ),
]


@PRESENTATION.command("canary")
def canary(
    session: Session,
    endpoint: arguments.ENDPOINT,
    *,
    model: Annotated[
        str | None, typer.Option(metavar="VERSION", help="The challenger, such as churn@3.")
    ] = None,
    alias: Annotated[
        str | None, typer.Option(metavar="ALIAS", help="Set to it if the canary succeeds.")
    ] = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Show how soon it would decide, and start nothing.")
    ] = False,
    share: SHARE = None,
    requests: REQUESTS = None,
    labels: LABELS = None,
    error_rate: ERROR_RATE = None,
    latency: LATENCY = None,
    tolerance: TOLERANCE = None,
    score_bound: SCORE_BOUND = None,
    false_rollback: FALSE_ROLLBACK = None,
    false_promotion: FALSE_PROMOTION = None,
    longest: LONGEST = None,
    requests_per_hour: PER_HOUR = None,
    labelled: LABELLED = None,
    worse: WORSE = None,
) -> None:
    """Run a version as a canary beside the one that serves; then promote it, roll it back, or keep the champion."""
    settings = {
        "share": share,
        "requests": requests,
        "labels": labels,
        "error_rate": error_rate,
        "latency": latency,
        "tolerance": tolerance,
        "score_bound": score_bound,
        "false_rollback": false_rollback,
        "false_promotion": false_promotion,
        "longest": longest,
    }
    if plan:
        traffic = {"requests_per_hour": requests_per_hour, "labelled": labelled}
        _plan(session, endpoint, settings, traffic, worse)
        return
    if model is None:
        raise InvalidInput.at(
            "--model", given=None, allowed="the version to try, or --plan", fix="--model churn@3"
        )
    given: dict[str, Any] = {"endpoint": endpoint, "model": model} | ({"alias": alias} if alias else {})
    chosen = _canary_of(settings)
    parsing.check(all_operations()["pipelines.canary"], given)
    with session.platform() as platform:
        made = platform.pipelines.canary(**given, plan=chosen)
    show_or_tell(session, made, _canary_started(made, given))


Typed = Mapping[str, str | None]


def _canary_of(settings: Typed) -> Canary:
    """Return the canary with the settings that were typed."""
    chosen: dict[str, Any] = {name: value for name, value in settings.items() if value is not None}
    if "longest" in chosen:
        chosen["longest"] = parsing.parse_duration(chosen["longest"], "--longest")
    parsing.check_record(Canary, chosen, command="pipelines canary")
    return Canary.model_validate(chosen)


def _plan(session: Session, endpoint: str, settings: Typed, traffic: Typed, worse: str | None) -> None:
    given = {name: value for name, value in traffic.items() if value is not None}
    parsing.check_record(CanaryTraffic, given, command="pipelines canary")
    times: dict[str, Any] = {} if worse is None else {"worse": tuple(worse.split(","))}
    chosen = _canary_of(settings)
    parsing.check(all_operations()["pipelines.plan_canary"], {"endpoint": endpoint} | times)
    with session.platform() as platform:
        made = platform.pipelines.plan_canary(
            endpoint, plan=chosen, traffic=CanaryTraffic.model_validate(given), **times
        )
    session.show(made, _show_plan)


def _show_plan(found: CanaryPlan) -> None:
    plan, traffic = found.canary, found.traffic
    hourly = traffic.requests_per_hour
    show_fields(
        {
            "endpoint": found.endpoint,
            "share": f"{plan.share}% of the requests",
            "traffic": "-" if hourly is None else f"{hourly:,.0f} requests an hour",
            "wrong rollback": f"{plan.false_rollback:.1%} at most, of one that is not worse",
            "wrong promotion": f"{plan.false_promotion:.1%} at most, of one beyond a margin",
            "undecided": f"after {format_value(plan.longest)}, the champion stays",
            "assumed": ", ".join(f"{name} {getattr(traffic, name):g}" for name in found.assumed) or "-",
        }
    )
    print()
    headings = [
        "metric",
        "champion",
        "worse by",
        "margin",
        "likely verdict",
        "of challenger",
        "requests",
        "takes",
    ]
    rows = [_forecast_row(each) for each in found.forecasts]
    show_rows([*headings, f"by {format_value(plan.longest)}"], rows)


def _forecast_row(each: CanaryForecast) -> list[str]:
    unit = "labels" if each.metric == "score" else "requests"
    return [
        each.metric.replace("_", " "),
        f"{each.champion:.4g}",
        f"{each.worse_by:.4g}",
        f"{each.margin:.4g}",
        each.outcome.replace("_", " "),
        "-" if each.after is None else f"{each.after:,} {unit}",
        "-" if each.requests is None else f"{each.requests:,}",
        "-" if each.takes is None else rough_duration(each.takes.total_seconds()),
        "-" if each.power is None else f"{each.power:.0%}",
    ]


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
            "predicts": "-" if plan.predicting is None else f"{plan.predicting.view}, once it is promoted",
            "canary": f"{trial.share}% of the requests, {trial.requests} requests, {trial.labels} labels, "
            f"{format_value(trial.longest)} at most",
            "margins": f"error rate {trial.error_rate:g}, slow requests {trial.latency:g}, score {trial.tolerance:g}",
            "started by": describe_triggers(found),
            "cooldown": f"{format_value(plan.rest)} between starts by drift",
            "last start": format_value(found.started_at),
            "cause": format_value(found.cause),
            "work": format_value(found.work),
            "verdict": format_value(found.verdict),
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
