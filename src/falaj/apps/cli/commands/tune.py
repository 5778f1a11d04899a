"""`falaj tune`: search for hyperparameters of a script, and follow the trials."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from falaj.apps.cli import Terminated
from falaj.apps.cli.commands.train import (
    option_parameters,
    request_from_options,
    warn_about_secrets,
)
from falaj.apps.cli.generation import parsing
from falaj.apps.cli.generation.typer_commands import command
from falaj.apps.cli.output.errors import FAILED
from falaj.apps.cli.output.live_table import Screen, paint
from falaj.apps.cli.output.messages import Message, print_message
from falaj.apps.cli.output.results import show
from falaj.apps.cli.output.values import format_elapsed, format_number, plural, printable
from falaj.apps.cli.session import Session
from falaj.errors import Fault, Interrupted, InvalidInput, Unavailable
from falaj.records.tuning import ParamValues, Study, StudyState, StudyTrial, TrialState, spell
from falaj.sdk.platform import Platform
from falaj.sdk.training import prepare
from falaj.sdk.tuning import create, prepare_study

PATIENCE_S = 60.0
SHOWN_TRIALS = 12
BAR = 30
STOP_S = 20.0

Report = Callable[[Study], None]

Script = Annotated[
    str,
    typer.Argument(
        metavar="SCRIPT", help="A Python script that takes the parameters as options, like --lr=0.01."
    ),
]
Args = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="ARGS...", help="Further arguments of all trials; after -- if they begin with '-'."
    ),
]
Space = Annotated[
    str,
    typer.Option(
        metavar="FILE", help="The parameters in TOML, like lr = {low = 1e-5, high = 0.1, log = true}."
    ),
]
Metric = Annotated[
    list[str],
    typer.Option(
        metavar="NAME", help="The metric that the script logs; several for a Pareto front. (may be repeated)"
    ),
]
Directions = Annotated[
    list[str] | None,
    typer.Option(
        metavar="WORD",
        help="maximize or minimize, for each metric. (default: losses and errors are minimized, others maximized)",
    ),
]
Trials = Annotated[
    int | None, typer.Option(metavar="COUNT", help="Trials in all. (default: 20; for a grid all its points)")
]
Parallel = Annotated[int | None, typer.Option(metavar="COUNT", help="Trials at a time. (default 1)")]
Sampler = Annotated[
    str | None, typer.Option(metavar="NAME", help="tpe, cmaes, random, grid or nsga2. (default tpe)")
]
Pruner = Annotated[
    str,
    typer.Option(metavar="NAME", help="Stop trials that look worse: asha, median or none. (default none)"),
]
MinReports = Annotated[
    int | None,
    typer.Option(metavar="COUNT", help="Judge a trial after so many values of the metric. (default 1)"),
]
Reduction = Annotated[
    int | None, typer.Option(metavar="COUNT", help="asha: one in so many trials goes on. (default 4)")
]
StartupTrials = Annotated[
    int | None,
    typer.Option(metavar="COUNT", help="median: judge after so many trials have ended. (default 5)"),
]
Seed = Annotated[int | None, typer.Option(metavar="NUMBER", help="Make the search repeatable.")]
MaxFailures = Annotated[
    int | None, typer.Option(metavar="COUNT", help="Stop after so many failed trials in a row. (default 5)")
]
Register = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL", help="Register the model of the best trial as the next version of this model."
    ),
]
Follow = Annotated[
    bool, typer.Option("--follow/--detach", "-f/-d", help="Wait and show the trials, or return at once.")
]
SPELLED = {"register_as": "--register", "pruning": "--pruner", "objectives": "--metric"}
"""The options of fields that have another name."""


def tune_command() -> Any:
    """Return `falaj tune`, with the options of a job beside its own."""
    *own, _ = inspect.signature(tune, eval_str=True).parameters.values()
    taken = {each.name for each in own}

    def run(session: Session, **typed: Any) -> int:
        return tune(session, **typed)

    job_options = [each for each in option_parameters() if each.name not in taken]
    run.__signature__ = inspect.Signature([*own, *job_options])  # type: ignore[attr-defined]
    run.__doc__ = tune.__doc__
    return command("tune", run, creates_home=True)


def tune(
    session: Session,
    script: Script,
    args: Args = None,
    *,
    space: Space,
    metric: Metric,
    direction: Directions = None,
    trials: Trials = None,
    parallel: Parallel = None,
    sampler: Sampler = None,
    pruner: Pruner = "none",
    min_reports: MinReports = None,
    reduction: Reduction = None,
    startup_trials: StartupTrials = None,
    seed: Seed = None,
    max_failures: MaxFailures = None,
    register: Register = None,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of the study. (default: the name of the script)")
    ] = None,
    follow: Follow = True,
    **options: Any,
) -> int:
    """Search for hyperparameters: trials are jobs that run the script with values of the space; exit 1 if it fails."""
    for option, value in (("--register", register), ("--name", name)):
        if value is not None:
            parsing.check_name(option, value, command="tune")
    job = prepare(request_from_options({**options, "args": args or None}), script=script)
    warn_about_secrets(job.spec)
    search = {
        "trials": trials,
        "parallel": parallel,
        "sampler": sampler,
        "seed": seed,
        "max_failures": max_failures,
    }
    judged = {"min_reports": min_reports, "reduction": reduction, "startup_trials": startup_trials}
    try:
        ready = prepare_study(
            job,
            space=space,
            metric=metric,
            direction=direction,
            name=name,
            pruner=pruner,
            register=register,
            **search,
            **judged,
        )
    except InvalidInput as error:
        raise InvalidInput(error.message, faults=[_as_option(each) for each in error.faults]) from None
    with session.platform() as platform:
        study = create(platform, ready)
        _say(session, f"study {study.name}: {_goal(study)}, {plural(study.settings.planned, 'trial')}")
        try:
            return report_study(session, follow_study(session, platform, study) if follow else study)
        except Terminated:
            _stop_local(platform, study)
            raise


def follow_study(session: Session, platform: Platform, study: Study) -> Study:
    """Show the trials of a study until it ends; return it."""
    deadline = time.monotonic() + PATIENCE_S
    try:
        with _live(platform, study) as report:
            while True:
                try:
                    for now in platform.studies.watch(study.id):
                        deadline, study = time.monotonic() + PATIENCE_S, now
                        report(now)
                    return study
                except (Interrupted, Unavailable):
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.2)
    except KeyboardInterrupt:
        stop, look = (session.full_command(f"studies {verb} {study.name}") for verb in ("stop", "show"))
        print(f"study {study.name} was not stopped: {stop} stops it, {look} shows it", file=sys.stderr)
        raise


def report_study(session: Session, study: Study) -> int:
    """Print how a study ended, or that it runs; return the exit status."""
    if session.json:
        show(study, as_json=True)
    else:
        print_message(session, _message(study))
    return FAILED if study.state is StudyState.FAILED else 0


def state_words(study: Study) -> str:
    """Return the state of a study, and how many of its trials are in which."""
    counts = ", ".join(f"{count} {state.value}" for state, count in sorted(study.counts.items()))
    why = f" ({printable(study.reason)})" if study.reason else ""
    stops = f", {study.stopping} stops it" if study.stopping and not study.state.ended else ""
    return f"{study.state.value}{stops}{why}; {counts or 'no trial yet'}"


def describe_params(params: ParamValues) -> str:
    """Return parameters on one line."""
    pairs = (
        (name, format_number(value) if isinstance(value, float) else spell(value))
        for name, value in params.items()
    )
    return printable(" ".join(f"{name}={value}" for name, value in pairs))


def _message(study: Study) -> Message:
    look = ("next", f"studies trials {study.name}")
    if not study.state.ended:
        then = (("next", f"studies show {study.name}"), ("undo", f"studies stop {study.name}"))
        return Message(f"study {study.name} runs in the background", then)
    took = format_elapsed(study.created_at, study.ended_at)
    words = f"study {study.name} is {state_words(study)}, after {took}"
    words += "".join(f"\n  best   {_best(study, each)}" for each in study.best)
    several = len(study.settings.objectives) > 1
    for metric in (each.metric for each in study.settings.objectives):
        found = study.importance_of(metric)[:5]
        if found:
            shares = ", ".join(f"{printable(each.param)} {each.importance:.0%}" for each in found)
            words += f"\n  importance {f'for {printable(metric)}: ' if several else ''}{shares}"
    if study.version is not None:
        return Message(
            f"{words}\n  registered as {study.version}", (("next", f"deploy {study.version}"), look)
        )
    report = (("report", f"runs show {study.run}"),) if study.run else ()
    again = (("resume", f"studies resume {study.name}"),) if study.state is not StudyState.DONE else ()
    return Message(words, (look, *report, *again))


def _goal(study: Study) -> str:
    return ", ".join(f"{each.direction} {printable(each.metric)}" for each in study.settings.objectives)


def _best(study: Study, trial: StudyTrial) -> str:
    metrics = (each.metric for each in study.settings.objectives)
    values = ", ".join(
        f"{printable(m)} {format_number(v)}" for m, v in zip(metrics, trial.values, strict=True)
    )
    return f"trial {trial.number}: {values} with {describe_params(trial.params)}"


@contextmanager
def _live(platform: Platform, study: Study) -> Iterator[Report]:
    """Show a table of trials with a progress bar on a terminal; a line for each trial that ends elsewhere."""
    if not sys.stderr.isatty():
        yield _lines(platform)
        return
    from rich.console import Console
    from rich.live import Live

    console = Console(stderr=True, highlight=False, markup=False)
    with Live(console=console, transient=True, auto_refresh=False) as live:

        def report(now: Study) -> None:
            newest = platform.studies.trials(now.id, limit=SHOWN_TRIALS).items
            live.update(paint(screen_of(now, newest)), refresh=True)

        yield report


def screen_of(study: Study, trials: tuple[StudyTrial, ...]) -> Screen:
    """Return the table of the newest trials, below the progress of the study and its best trial."""
    done, planned = study.finished, study.settings.planned
    filled = round(BAR * done / planned)
    queued = study.counts.get(TrialState.QUEUED, 0)
    waits = f"; {queued} wait in the queue" if queued else ""
    head = [
        f"study {study.name}: {_goal(study)}",
        f"[{'#' * filled}{'.' * (BAR - filled)}] {done} of {planned} trials{waits}",
        *(f"best {_best(study, each)}" for each in study.best[:3]),
    ]
    metrics = [each.metric for each in study.settings.objectives]
    rows = [
        [
            str(each.number),
            each.state.value,
            *(map(format_number, each.values) if each.values else ["-"] * len(metrics)),
            describe_params(each.params),
            printable(each.reason or ""),
        ]
        for each in trials
    ]
    return Screen(head, ("trial", "state", *metrics, "parameters", "reason"), rows, {"parameters", "reason"})


def _lines(platform: Platform) -> Report:
    """Return a function that prints each trial that has ended, once, and the best so far."""
    said: set[int] = set()
    finished = 0

    def report(study: Study) -> None:
        nonlocal finished
        ended = sum(count for state, count in study.counts.items() if state.ended)
        if ended == finished:
            return
        limit = min(max(ended - finished + study.settings.parallel, 1) + 10, 1000)
        finished = ended
        best = f"; best {_best(study, study.best[0])}" if len(study.best) == 1 else ""
        for trial in reversed(platform.studies.trials(study.id, limit=limit).items):
            if trial.state.ended and trial.number not in said:
                said.add(trial.number)
                values = " ".join(map(format_number, trial.values)) or printable(trial.reason or "")
                how = f"trial {trial.number} {trial.state.value}: {values}"
                print(f"{how} ({describe_params(trial.params)}){best}", file=sys.stderr, flush=True)

    return report


def _stop_local(platform: Platform, study: Study) -> None:
    """Stop a study that this process runs, and wait until its jobs have ended; one of a running platform goes on."""
    if platform.where.startswith("http"):
        return
    print(f"terminated: study {study.name} stops; falaj studies resume {study.name} goes on", file=sys.stderr)
    platform.studies.stop(study.id)
    deadline = time.monotonic() + STOP_S
    while not platform.studies.show(study.id).state.ended and time.monotonic() < deadline:
        time.sleep(0.05)


def _as_option(fault: Fault) -> Fault:
    """Return a fault of a setting under the name of its option; one of a file has its line already."""
    field = fault.where.partition(".")[0]
    if ":" in fault.where or "/" in fault.where or field.endswith(".toml"):
        return fault
    if field == "body":
        return fault.model_copy(update={"where": "the study", "given": None})
    inner = fault.where.rpartition(".")[2]
    named = (
        f"--{inner.replace('_', '-')}"
        if field == "pruning" and inner in ("min_reports", "reduction")
        else None
    )
    return fault.model_copy(update={"where": named or SPELLED.get(field, f"--{field.replace('_', '-')}")})


def _say(session: Session, words: str) -> None:
    print(words, file=sys.stderr if session.json else sys.stdout, flush=True)


COMMANDS: dict[str, Any] = {"tune": tune_command}
