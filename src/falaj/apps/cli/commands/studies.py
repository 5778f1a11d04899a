"""`falaj studies`: how far a study is, its trials, the best of them, and the importance of the parameters."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from falaj.apps.cli.commands.tune import describe_params, follow_study, report_study, state_words
from falaj.apps.cli.generation import parsing
from falaj.apps.cli.generation.presentation import Presentation
from falaj.apps.cli.names import completion_of
from falaj.apps.cli.output import results
from falaj.apps.cli.output.messages import Given, Message
from falaj.apps.cli.output.tables import show_fields, show_rows
from falaj.apps.cli.output.values import format_elapsed, format_number, format_value, printable
from falaj.apps.cli.session import Session
from falaj.control.services import all_operations
from falaj.errors import Conflict
from falaj.records.tuning import Study, StudyTrial, TrialState
from falaj.sdk.definition_files.space_toml import read_space

PRESENTATION = Presentation(
    columns={Study: ("name", "state", "reason", "owner", "created_at", "ended_at")},
    help={"space": "The space, to check that it is the one that the study was created with."},
    lists={"study": "studies list"},
    default="list",
)

StudyName = Annotated[
    str, typer.Argument(metavar="STUDY", help="The name of a study.", autocompletion=completion_of("study"))
]
BAR = 30
"""The longest bar of an importance, in characters."""


@PRESENTATION.command("list")
def list_studies(
    session: Session,
    *,
    workspace: Annotated[str | None, typer.Option(metavar="WORKSPACE", help="Of this workspace.")] = None,
    limit: Annotated[int, typer.Option(metavar="COUNT", help="At most so many. (default 100)")] = 100,
) -> None:
    """List the studies of a workspace: how many trials have ended, and the best value so far."""
    given: dict[str, Any] = {"limit": limit, **({} if workspace is None else {"workspace": workspace})}
    parsing.check(all_operations()["studies.list"], given)
    with session.platform() as platform:
        page = platform.studies.list(**given)
    session.show(page, lambda found: _print_list(found.items))


@PRESENTATION.command("show")
def show(session: Session, study: StudyName) -> None:
    """Show a study: its settings, how many trials are in which state, and the best so far."""
    parsing.check(all_operations()["studies.show"], {"study": study})
    with session.platform() as platform:
        found = platform.studies.show(study)
    session.show(found, _print_study)


@PRESENTATION.command("trials")
def trials(
    session: Session,
    study: StudyName,
    *,
    state: Annotated[
        str | None, typer.Option(metavar="STATE", help=f"Only those that are {', '.join(TrialState)}.")
    ] = None,
    limit: Annotated[int, typer.Option(metavar="COUNT", help="At most so many. (default 100)")] = 100,
) -> None:
    """List the trials of a study, newest first: values, parameters, state and job."""
    given: dict[str, Any] = {"study": study, "limit": limit, **({} if state is None else {"state": state})}
    parsing.check(all_operations()["studies.trials"], given)
    with session.platform() as platform:
        metrics = [each.metric for each in platform.studies.show(study).settings.objectives]
        page = platform.studies.trials(**given)
    session.show(page, lambda found: _print_trials(found.items, metrics))


@PRESENTATION.command("best")
def best(session: Session, study: StudyName) -> None:
    """Show the best trial of a study; with several metrics, the trials that none is better than in all of them."""
    parsing.check(all_operations()["studies.show"], {"study": study})
    with session.platform() as platform:
        found = platform.studies.show(study)
    if not found.best:
        raise Conflict(f"no trial of study {found.name} has been completed: {state_words(found)}")
    metrics = [each.metric for each in found.settings.objectives]
    session.show(found.best, lambda trials: _print_trials(trials, metrics))


@PRESENTATION.command("importance")
def importance(session: Session, study: StudyName) -> None:
    """Show how much of the differences between trials is due to each parameter (PED-ANOVA)."""
    parsing.check(all_operations()["studies.show"], {"study": study})
    with session.platform() as platform:
        found = platform.studies.show(study)
    if not found.importance:
        raise Conflict(f"study {found.name} has too few complete trials to tell: {state_words(found)}")
    session.show(found.importance, lambda _: _print_importance(found))


@PRESENTATION.command("resume")
def resume(
    session: Session,
    study: StudyName,
    *,
    trials: Annotated[
        int | None, typer.Option(metavar="COUNT", help="Up to so many trials in all. (default: as before)")
    ] = None,
    parallel: Annotated[
        int | None, typer.Option(metavar="COUNT", help="So many at a time. (default: as before)")
    ] = None,
    space: Annotated[
        str | None, typer.Option(metavar="FILE", help="The space; refused if it is another one than before.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow/--detach", "-f/-d", help="Wait and show the trials, or return at once.")
    ] = True,
) -> int:
    """Go on with a study that has ended; no finished trial is repeated."""
    given: dict[str, Any] = {"study": study, "trials": trials, "parallel": parallel}
    given = {name: value for name, value in given.items() if value is not None}
    parsing.check(all_operations()["studies.resume"], given)
    known = None if space is None else read_space(space)
    with session.platform() as platform:
        found = platform.studies.resume(**given, space=known)
        return report_study(session, follow_study(session, platform, found) if follow else found)


@PRESENTATION.message("studies.stop")
def _stopped(made: Study, given: Given) -> Message:
    return Message(
        f"study {made.name} stops: its trials are being cancelled",
        (("next", f"studies show {made.name}"), ("undo", f"studies resume {made.name}")),
    )


def _print_list(found: tuple[Study, ...]) -> None:
    if not found:
        results.show_records(found)
        return
    rows = [
        [
            each.name,
            each.state.value,
            f"{each.finished}/{each.settings.planned}",
            ", ".join(objective.metric for objective in each.settings.objectives),
            _best_values(each),
            each.owner,
            format_value(each.created_at),
            printable(each.reason or ""),
        ]
        for each in found
    ]
    show_rows(("study", "state", "trials", "metric", "best", "owner", "created", "reason"), rows)


def _best_values(study: Study) -> str:
    if not study.best:
        return "-"
    return (
        ", ".join(map(format_number, study.best[0].values))
        if len(study.best) == 1
        else f"{len(study.best)} trials"
    )


def _print_study(found: Study) -> None:
    settings = found.settings
    pruning = settings.pruning
    show_fields(
        {
            "study": found.name,
            "state": state_words(found),
            "objective": ", ".join(f"{each.direction} {each.metric}" for each in settings.objectives),
            "sampler": settings.sampler,
            "pruner": pruning.method,
            "trials": f"{found.finished} of {settings.planned} ended, {settings.parallel} at a time",
            "script": f"{found.job.script or found.job.module} in queue {found.job.queue}",
            "run": found.run or "-",
            "version": found.version or "-",
            "created": format_value(found.created_at),
        }
    )
    if found.best:
        print()
        _print_trials(found.best, [each.metric for each in settings.objectives])
    if found.importance:
        print()
        _print_importance(found)


def _print_trials(found: tuple[StudyTrial, ...], metrics: list[str]) -> None:
    if not found:
        results.show_records(found)
        return
    rows = [
        [
            str(each.number),
            each.state.value,
            *(map(format_number, each.values) if each.values else ["-"] * len(metrics)),
            describe_params(each.params),
            format_elapsed(each.created_at, each.ended_at),
            each.job or "-",
            printable(each.reason or ""),
        ]
        for each in found
    ]
    show_rows(("trial", "state", *metrics, "parameters", "took", "job", "reason"), rows)


def _print_importance(found: Study) -> None:
    rows = [
        [printable(objective.metric), printable(each.param), f"{each.importance:.1%}", _bar(each.importance)]
        for objective in found.settings.objectives
        for each in found.importance_of(objective.metric)
    ]
    show_rows(("metric", "parameter", "importance", ""), rows)


def _bar(share: float) -> str:
    return "#" * round(BAR * share)
