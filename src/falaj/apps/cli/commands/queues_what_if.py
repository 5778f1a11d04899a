"""`falaj queues what-if`: parses the changes, and prints the figures of each queue before and after."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import typer

from falaj.apps.cli.generation import parsing
from falaj.apps.cli.names import full_id
from falaj.apps.cli.output.messages import Message, print_message
from falaj.apps.cli.output.results import show
from falaj.apps.cli.output.tables import show_rows
from falaj.apps.cli.output.values import format_elapsed, printable
from falaj.apps.cli.output.work_progress import follow_work
from falaj.apps.cli.session import Session
from falaj.control.services import all_operations
from falaj.errors import Fault, InvalidInput
from falaj.records import sizes
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
    typer.Option(metavar="QUEUE.WHAT=N", help="A limit including what is borrowed, such as risk.gpus=16."),
]
Weights = Annotated[
    list[str] | None, typer.Option(metavar="QUEUE=NUMBER", help="A weight, such as research=2.")
]
Nodes = Annotated[
    list[str] | None,
    typer.Option(
        metavar="like=NODE,…", help="Add nodes: like=NAME,count=2; with other GPUs gpus=8,gpu=MODEL."
    ),
]
Removed = Annotated[list[str] | None, typer.Option(metavar="NODE", help="Remove this node.")]
Since = Annotated[
    str | None,
    typer.Option(
        metavar="TIME", help="Jobs submitted since then: a moment, or 7d for seven days ago. (default 7d)"
    ),
]
Until = Annotated[str | None, typer.Option(metavar="TIME", help="Jobs submitted before then.")]
Saved = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help="Time between checkpoints, which an evicted job may lose. (default: nothing is lost)",
    ),
]

Detach = Annotated[
    bool, typer.Option("--detach", help="Do not wait for it; print the command that shows the result.")
]


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
    """Replay past jobs with other quotas, limits, weights or nodes, and compare the figures of each queue.

    Every option that names a change may be repeated. A long replay continues if you stop watching it.
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
            _report_detached(session, work)
            return
        follow_work(session, platform, work, "replay", result=RESULT)
        found = platform.queues.what_if_result(work.id)
    session.show(found, _print_comparison)


def what_if_result(
    session: Session,
    work: Annotated[str, typer.Argument(metavar="WORK", help="The id that what-if --detach printed.")],
) -> None:
    """Show the result of a what-if: waits, use, preemptions and cost of each queue, before and after."""
    parsing.check(all_operations()["queues.what_if_result"], {"work": work})
    with session.platform() as platform:
        found = platform.queues.what_if_result(full_id(platform, "work", work))
    session.show(found, _print_comparison)


def _report_detached(session: Session, work: WorkflowRun) -> None:
    if session.json:
        show(work, as_json=True)
        return
    then = (("watch", f"workflows watch {work.id}"), ("next", f"{RESULT} {work.id}"))
    print_message(session, Message(f"{work.id} replays past jobs", then))


def _moment(text: str | None, option: str) -> Any:
    """Return the moment: a duration is that long ago; anything else is left to the operation's validation."""
    if text is None:
        return None
    ago = read_duration(text)
    return text if ago is None else utc_now() - ago


def _length(text: str | None) -> timedelta | str | None:
    return None if text is None else parsing.parse_duration(text, "--checkpoint-every")


# ----------------------------------------------------------------------------------------- formatting


def _print_comparison(found: WhatIfComparison) -> None:
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


RESOURCES = {"cpus": "cpus", "gpus": "gpus", "memory": "memory_bytes"}
NODE_PARTS = {"like": "like", "count": "count", "gpus": "gpus", "gpu": "gpu_model"}


def read_changes(
    quotas: Sequence[str],
    limits: Sequence[str],
    weights: Sequence[str],
    nodes: Sequence[str],
    removed: Sequence[str],
    *,
    command: str,
) -> dict[str, Any]:
    """Return the changes that were typed; raise InvalidInput with all their faults."""
    faults: list[Fault] = []
    read: dict[str, list[Any]] = {"quotas": [], "limits": [], "weights": [], "add_nodes": []}
    readers: list[tuple[str, Sequence[str], Callable[[str], dict[str, Any]]]] = [
        ("quotas", quotas, lambda text: _bound(text, "--quota")),
        ("limits", limits, lambda text: _bound(text, "--limit")),
        ("weights", weights, _weight),
        ("add_nodes", nodes, _node),
    ]
    for part, texts, reader in readers:
        for text in texts:
            try:
                read[part].append(reader(text))
            except InvalidInput as error:
                faults += error.faults
    if faults:
        raise InvalidInput(parsing.not_valid(command, faults), faults=faults)
    names = [name for text in removed for name in text.split(",") if name]
    return {part: tuple(items) for part, items in read.items()} | {"remove_nodes": tuple(names)}


def _bound(text: str, option: str) -> dict[str, Any]:
    where, equals, amount = text.partition("=")
    queue, _, resource = where.rpartition(".")
    if not equals or not queue or resource not in RESOURCES:
        raise InvalidInput.at(
            option,
            given=text,
            allowed="QUEUE.cpus=N, QUEUE.gpus=N or QUEUE.memory=SIZE",
            fix=f"{option} risk.gpus=8",
        )
    return {
        "queue": queue,
        "resource": RESOURCES[resource],
        "amount": _amount(amount, resource, option, text),
    }


def _amount(amount: str, resource: str, option: str, text: str) -> int | None:
    if amount == "none":
        return None
    if resource == "memory":
        found = sizes.read_size(amount)
        if found is None:
            raise InvalidInput.at(option, given=text, allowed=f"none, or {sizes.RULE}")
        return found
    return _count(amount, option, text, allowed="a whole number, or none")


def _count(amount: str, option: str, text: str, *, allowed: str) -> int:
    if not (amount.isascii() and amount.isdecimal() and len(amount) <= 15):
        raise InvalidInput.at(option, given=text, allowed=allowed)
    return int(amount)


def _weight(text: str) -> dict[str, Any]:
    queue, _, weight = text.rpartition("=")
    try:
        number = float(weight)
    except ValueError:
        number = 0.0
    if not queue or not 0 < number <= 1_000_000:
        raise InvalidInput.at(
            "--weight", given=text, allowed="QUEUE=NUMBER, a number above 0", fix="--weight research=2"
        )
    return {"queue": queue, "weight": number}


def _node(text: str) -> dict[str, Any]:
    parts = [part.partition("=") for part in text.split(",")]
    wrong = [name for name, equals, value in parts if name not in NODE_PARTS or not equals or not value]
    if wrong or "like" not in {name for name, _, _ in parts}:
        raise InvalidInput.at(
            "--node",
            given=text,
            allowed="like=NAME, and with commas count=N, gpus=N, gpu=MODEL",
            fix="--node like=NAME,count=2",
        )
    found: dict[str, Any] = {NODE_PARTS[name]: value for name, _, value in parts}
    for name in {"count", "gpus"} & set(found):
        found[name] = _count(found[name], "--node", text, allowed=f"a whole number as {name}")
    return found
