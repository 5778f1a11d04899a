"""`falaj jobs top`: what runs and what waits, on which machines and in which queues, as it changes."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, Any, TypeVar

import typer

from falaj.apps.cli.generation import parsing
from falaj.apps.cli.output.job_summary import (
    describe_gpus,
    describe_state,
    describe_step,
    format_rate,
    format_rough_duration,
)
from falaj.apps.cli.output.tables import align, count_fitting, on_terminal, widths
from falaj.apps.cli.output.values import format_number, plural, printable
from falaj.apps.cli.session import Session
from falaj.control.services import all_operations
from falaj.errors import FalajError, Interrupted, InvalidInput, Unavailable
from falaj.records.record import utc_now
from falaj.records.scheduling.accounting import QueueState
from falaj.records.scheduling.hardware import Machine
from falaj.records.scheduling.snapshot import WHOLE_GPU
from falaj.records.sizes import format_size
from falaj.records.training.jobs import Job, JobState
from falaj.sdk.platform import Platform

T = TypeVar("T")

EXPLAINED = 10
STALE_S = 15.0
"""So many of the waiting jobs are explained, and seldom: each asks the scheduler about the whole queue."""

HEADINGS = (
    *("id", "name", "state", "step", "loss", "rate", "left"),
    *("since", "gpus", "cpus", "queue", "owner", "why"),
)


@dataclass
class TopSnapshot:
    """What there was at one moment. `reasons` say by id why jobs wait, `people` who owns them."""

    at: datetime
    running: tuple[Job, ...] = ()
    waiting: tuple[Job, ...] = ()
    nodes: tuple[Machine, ...] = ()
    queues: tuple[QueueState, ...] = ()
    reasons: dict[str, str] = field(default_factory=dict)
    people: dict[str, str] = field(default_factory=dict)
    is_cut: bool = False


def top(
    session: Session,
    *,
    once: Annotated[bool, typer.Option("--once", help="Once, and not again and again.")] = False,
    every: Annotated[str, typer.Option(metavar="TIME", help="How often to look; 2s.")] = "2s",
    workspace: Annotated[str | None, typer.Option(metavar="WORKSPACE", help="Of this workspace.")] = None,
) -> int:
    """Show the jobs that run and wait, and the use of machines and queues, until Ctrl-C."""
    pause = parsing.parse_duration(every, "--every")
    if isinstance(pause, str) or pause.total_seconds() < 1:
        raise InvalidInput.at("--every", given=every, allowed="at least 1s", fix="--every 2s")
    parsing.check(all_operations()["jobs.list"], {"workspace": workspace})
    with session.platform() as platform:
        onlooker = TopPoller(platform, workspace)
        if once or session.json or not on_terminal():
            scene = onlooker.poll()
            session.show(_document(scene), lambda _: _print(scene))
            return 0
        try:
            _live(onlooker.poll, every_s=pause.total_seconds())
        except KeyboardInterrupt:
            return 0
    return 0


class TopPoller:
    """Looks at a platform again and again, and remembers who people are and why jobs wait."""

    def __init__(self, platform: Platform, workspace: str | None) -> None:
        self._platform, self._workspace = platform, workspace
        self._people: dict[str, str] = {}
        self._reasons: dict[str, tuple[float, str]] = {}

    def poll(self) -> TopSnapshot:
        """What runs and waits now; the machines and queues as far as the caller may know of them."""
        platform, where = self._platform, self._workspace
        pages = [
            platform.jobs.list(state=state, workspace=where) for state in (JobState.RUNNING, JobState.QUEUED)
        ]
        running, waiting = pages[0].items, pages[1].items[::-1]
        for owner in {each.owner for each in (*running, *waiting)} - self._people.keys():
            self._people[owner] = owner_name(platform, owner)
        scene = TopSnapshot(utc_now(), running, waiting, reasons=self._explain(waiting), people=self._people)
        scene.is_cut = any(page.next for page in pages)
        scene.nodes = tuple(_listed(platform.nodes.list))
        scene.queues = tuple(_listed(lambda: platform.queues.list().items))
        return scene

    def _explain(self, waiting: Sequence[Job]) -> dict[str, str]:
        known, now = self._reasons, time.monotonic()
        self._reasons = {
            str(each.id): old
            if (old := known.get(each.id)) and now - old[0] < STALE_S
            else (now, _why(self._platform, each))
            for each in waiting[:EXPLAINED]
        }
        return {job: words for job, (_, words) in self._reasons.items()}


def _listed(items: Callable[[], Sequence[T]]) -> Sequence[T]:
    """What there is; nothing where it is not for the caller, or the platform is too old to tell."""
    try:
        return items()
    except (Unavailable, Interrupted):
        raise
    except FalajError:
        return ()


def _why(platform: Platform, job: Job) -> str:
    try:
        found = platform.jobs.explain(job.id)
    except (Unavailable, Interrupted):
        raise
    except FalajError:
        return "-"  # it has begun meanwhile
    place = f"{found.position} of {found.of}: " if found.position else ""
    return f"{place}{found.reason or found.words}"


def owner_name(platform: Platform, owner: str) -> str:
    """What whoever owns a job is called; their id, where they cannot be seen."""
    try:
        return platform.objects.show(owner).name
    except FalajError:
        return owner


def _document(scene: TopSnapshot) -> dict[str, Any]:
    return {
        "at": scene.at,
        "nodes": scene.nodes,
        "queues": scene.queues,
        "running": scene.running,
        "waiting": scene.waiting,
        "reasons": scene.reasons,
    }


# ------------------------------------------------------------------------------------------- in words


def lines(scene: TopSnapshot) -> tuple[list[str], list[list[str]]]:
    """What stands above the table, and its rows."""
    cut = "; there are more than are looked at" if scene.is_cut else ""
    head = [f"{plural(len(scene.running), 'job')} running, {len(scene.waiting)} waiting{cut}"]
    head += [_node_line(each) for each in scene.nodes]
    head += [_queue_line(each) for each in scene.queues]
    rows = [_row(each, scene) for each in (*scene.running, *scene.waiting)]
    return head, rows


def _row(job: Job, scene: TopSnapshot) -> list[str]:
    far, is_running = job.progress, job.state is JobState.RUNNING
    since = job.started_at if is_running and job.started_at else job.submitted_at
    return [
        job.id,
        printable(job.name),
        describe_state(job),
        describe_step(far) if is_running and far else "-",
        format_number(far.loss) if is_running and far else "-",
        format_rate(far.rate) if is_running and far else "-",
        format_rough_duration(far.left) if is_running and far else "-",
        format_rough_duration(scene.at - since),
        describe_gpus(job.spec),
        str(job.spec.cpus),
        job.spec.queue,
        printable(scene.people.get(job.owner, job.owner)),
        printable(scene.reasons.get(job.id) or job.reason or "-"),
    ]


def _node_line(machine: Machine) -> str:
    """A machine, and what is in use of it."""
    node, free = machine.node, machine.free
    parts = [f"{node.cpus - free.cpus} of {node.cpus} CPUs"]
    if node.gpus:
        parts.append(f"{len(node.gpus) - sum(free.gpu_milli) / WHOLE_GPU:g} of {len(node.gpus)} GPUs")
    parts.append(f"{format_size(node.memory_bytes - free.memory_bytes)} of {format_size(node.memory_bytes)}")
    fault = f"; {printable(machine.gpu_fault)}" if machine.gpu_fault and (node.gpus or machine.cards) else ""
    return f"node   {node.name}: {', '.join(parts)} in use{fault}"


def _queue_line(queue: QueueState) -> str:
    settings, held = queue.settings, queue.held
    quota = settings.quota
    amounts = [
        f"{held.gpus:g}{'' if quota.gpus is None else f' of {quota.gpus}'} GPUs",
        f"{held.cpus}{'' if quota.cpus is None else f' of {quota.cpus}'} CPUs",
    ]
    borrowed = queue.borrowed.gpus or queue.borrowed.cpus
    notes = ", ".join(amounts) + (", borrows" if borrowed else "")
    jobs = f"{queue.running} running, {queue.waiting} waiting"
    return f"queue  {settings.name}: {notes}; {jobs}; score {queue.score:.3g}"


# ------------------------------------------------------------------------------------------ on a screen


def _print(scene: TopSnapshot) -> None:
    head, rows = lines(scene)
    print("\n".join(head))
    if rows:
        print("\n" + "\n".join(align([HEADINGS, *rows])))


def _live(look_now: Callable[[], TopSnapshot], *, every_s: float) -> None:
    """The same on a terminal, renewed until it is interrupted; a platform that is away is waited for."""
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(highlight=False, markup=False), screen=True, auto_refresh=False) as screen:
        while True:
            try:
                screen.update(_painted(*lines(look_now())), refresh=True)
            except (Unavailable, Interrupted) as error:
                screen.update(printable(f"the platform does not answer: {error.message}"), refresh=True)
            time.sleep(every_s)


def _painted(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Any:
    """What fits onto the terminal."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    room = shutil.get_terminal_size()
    shown = rows[: max(room.lines - len(head) - 4, 1)]
    count = count_fitting(widths([HEADINGS, *shown]), room.columns)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in HEADINGS[:count]:
        table.add_column(name, no_wrap=True, overflow="ellipsis")
    for row in shown:
        table.add_row(*(Text(cell) for cell in row[:count]))
    more = [Text(f"and {len(rows) - len(shown)} more")] if len(rows) > len(shown) else []
    told = [Text(line) for line in head]
    return Group(*told, Text(""), table, *more, Text("Ctrl-C ends this", style="dim"))
