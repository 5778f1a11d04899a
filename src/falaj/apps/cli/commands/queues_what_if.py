"""`falaj queues what-if`: changes as people type them, and each team's figures before and after."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import typer

from falaj.apps.cli.generation import parsing
from falaj.apps.cli.output.messages import Message, print_message
from falaj.apps.cli.output.results import show
from falaj.apps.cli.output.tables import show_rows
from falaj.apps.cli.output.values import format_elapsed, printable
from falaj.apps.cli.output.work_progress import follow_work
from falaj.apps.cli.session import Session
from falaj.control.services import all_operations
from falaj.records.control.workflows import WorkflowRun
from falaj.records.durations import read_duration
from falaj.records.record import utc_now
from falaj.records.scheduling.simulation import SimulationFigures, WhatIfComparison

EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
COMMAND = "queues what-if"
RESULT = "queues what-if-result"
SPELLING = {
    "changes": "the changes",
    "since": "--since",
    "until": "--until",
    "checkpoint_every": "--checkpoint-every",
}


Bounds = Annotated[
    list[str] | None,
    typer.Option(metavar="QUEUE.WHAT=N", help="A quota: risk.gpus=8, risk.memory=64GiB or risk.cpus=none."),
]
Most = Annotated[
    list[str] | None,
    typer.Option(metavar="QUEUE.WHAT=N", help="The most with what is borrowed, such as risk.gpus=16."),
]
Weights = Annotated[
    list[str] | None, typer.Option(metavar="QUEUE=NUMBER", help="A weight, such as research=2.")
]
Nodes = Annotated[
    list[str] | None,
    typer.Option(
        metavar="like=NODE,…", help="More nodes: like=NAME,count=2; for other GPUs gpus=8,gpu=MODEL."
    ),
]
Removed = Annotated[list[str] | None, typer.Option(metavar="NODE", help="Without this node.")]
Since = Annotated[
    str | None, typer.Option(metavar="TIME", help="Jobs submitted since: 7d ago, or a moment. (default 7d)")
]
Until = Annotated[str | None, typer.Option(metavar="TIME", help="Jobs submitted before this.")]
Saved = Annotated[
    str | None,
    typer.Option(metavar="TIME", help="What an evicted job may lose. (default: nothing, it saves itself)"),
]

Detach = Annotated[bool, typer.Option("--detach", help="Do not wait for it; print what to ask later.")]


def what_if(
    session: Session,
    *,
    quota: Bounds = None,
    limit: Most = None,
    weight: Weights = None,
    node: Nodes = None,
    remove_node: Removed = None,
    since: Since = None,
    until: Until = None,
    checkpoint_every: Saved = None,
    detach: Detach = False,
) -> None:
    """Replay past jobs under other quotas, limits, weights or machines, and compare, team by team.

    Every option that names a change may be repeated. It may take long: it goes on if you stop watching.
    """
    operation = all_operations()["queues.what_if"]
    given: dict[str, Any] = {
        "changes": read_changes(
            quota or (), limit or (), weight or (), node or (), remove_node or (), command=COMMAND
        ),
        "since": _moment(since, "--since"),
        "until": _moment(until, "--until"),
        "checkpoint_every": _length(checkpoint_every),
    }
    given = {name: value for name, value in given.items() if value is not None}
    parsing.check(operation, given, command=COMMAND, spelling=SPELLING)
    with session.platform() as platform:
        work = platform.queues.what_if(**given)
        if detach:
            _tell_asked(session, work)
            return
        follow_work(session, platform, work, "replay", result=RESULT)
        found = platform.queues.what_if_result(work.id)
    session.show(found, _tell)


def what_if_result(
    session: Session,
    work: Annotated[str, typer.Argument(metavar="WORK", help="The id that what-if --detach has printed.")],
) -> None:
    """The table of a what-if that is done: each team's waits, use, preemptions and cost, before and after."""
    parsing.check(all_operations()["queues.what_if_result"], {"work": work})
    with session.platform() as platform:
        found = platform.queues.what_if_result(work)
    session.show(found, _tell)


def _tell_asked(session: Session, work: WorkflowRun) -> None:
    if session.json:
        show(work, as_json=True)
        return
    then = (("watch", f"workflows watch {work.id}"), ("next", f"{RESULT} {work.id}"))
    print_message(session, Message(f"{work.id}: past jobs will be replayed", then))


def _moment(text: str | None, option: str) -> Any:
    """A length of time is so long ago; anything else the operation's own check reads."""
    if text is None:
        return None
    ago = read_duration(text)
    return text if ago is None else utc_now() - ago


def _length(text: str | None) -> timedelta | str | None:
    return None if text is None else parsing.parse_duration(text, "--checkpoint-every")


# --------------------------------------------------------------------------------------------------- words


def _tell(found: WhatIfComparison) -> None:
    print(f"{found.jobs} jobs, submitted {found.since:%Y-%m-%d %H:%MZ} to {found.until:%Y-%m-%d %H:%MZ}")
    for change in found.changes or ("nothing is changed",):
        print(f"  {printable(change)}")
    headings = [
        "QUEUE",
        "JOBS",
        "MEAN WAIT",
        "P95 WAIT",
        "SLOWDOWN",
        "GPU USE",
        "PREEMPTED",
        "GPU-HOURS",
        "COST",
    ]
    rows = [_row(printable(team.queue), team.before, team.after) for team in found.teams]
    show_rows(headings, [*rows, _row("all", found.before, found.after)])
    before, after = found.fairness_before, found.fairness_after
    print(f"fairness (Jain's index, 1 is even)   {_arrow(f'{before.jain:.3f}', f'{after.jain:.3f}')}")
    _notes(found.words)


def _row(name: str, before: SimulationFigures, after: SimulationFigures) -> list[str]:
    return [
        name,
        _arrow(_jobs(before), _jobs(after)),
        _arrow(_span(before.wait.mean), _span(after.wait.mean)),
        _arrow(_span(before.wait.p95), _span(after.wait.p95)),
        _arrow(f"{before.slowdown:.2f}", f"{after.slowdown:.2f}"),
        _arrow(f"{before.gpu_use:.1%}", f"{after.gpu_use:.1%}"),
        _arrow(str(before.preemptions), str(after.preemptions)),
        _arrow(f"{before.gpu_hours:.2f}", f"{after.gpu_hours:.2f}"),
        _arrow(f"{before.cost:.2f}", f"{after.cost:.2f}"),
    ]


def _jobs(figures: SimulationFigures) -> str:
    return f"{figures.ended}/{figures.jobs}" if figures.ended < figures.jobs else str(figures.jobs)


def _arrow(before: str, after: str) -> str:
    return before if before == after else f"{before} → {after}"


def _span(length: timedelta) -> str:
    return format_elapsed(EPOCH, EPOCH + length)


def _notes(words: Iterable[str]) -> None:
    for sentence in words:
        print(f"  {printable(sentence)}")
