"""`falaj jobs top`: running and waiting jobs, and the use of nodes and queues, refreshed until q or Ctrl-C."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeVar

from falaj.apps.cli.generation import arguments, parsing
from falaj.apps.cli.output.job_summary import (
    describe_gpus,
    describe_state,
    describe_step,
    format_rate,
    format_rough_duration,
)
from falaj.apps.cli.output.live_table import Every, Once, Screen, parse_interval, show_live
from falaj.apps.cli.output.values import format_number, plural, printable
from falaj.apps.cli.session import Session
from falaj.control.services import all_operations
from falaj.errors import FalajError, Interrupted, Unavailable
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
"""How many waiting jobs are explained, and for how long: each explanation reads the whole queue."""

HEADINGS = (
    *("id", "name", "state", "step", "loss", "rate", "left"),
    *("since", "gpus", "cpus", "queue", "owner", "why"),
)


@dataclass
class TopSnapshot:
    """The state at one moment. `reasons` has by id why jobs wait, `people` the names of their owners."""

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
    once: Once = False,
    every: Every = "2s",
    workspace: arguments.OF_WORKSPACE = None,
) -> int:
    """Show running and waiting jobs, and the use of nodes and queues, until q or Ctrl-C."""
    pause = parse_interval(every)
    parsing.check(all_operations()["jobs.list"], {"workspace": workspace})
    with session.platform() as platform:
        poller = TopPoller(platform, workspace)
        return show_live(session, poller.poll, lines, document=_document, once=once, every=pause)


class TopPoller:
    """Polls a platform, and caches the names of owners and why jobs wait."""

    def __init__(self, platform: Platform, workspace: str | None) -> None:
        self._platform, self._workspace = platform, workspace
        self._people: dict[str, str] = {}
        self._reasons: dict[str, tuple[float, str]] = {}

    def poll(self) -> TopSnapshot:
        """Return what runs and waits now, and the nodes and queues that the caller may see."""
        platform, where = self._platform, self._workspace
        pages = [
            platform.jobs.list(state=state, workspace=where) for state in (JobState.RUNNING, JobState.QUEUED)
        ]
        running, waiting = pages[0].items, pages[1].items[::-1]
        for owner in {each.owner for each in (*running, *waiting)} - self._people.keys():
            self._people[owner] = owner_name(platform, owner)
        snapshot = TopSnapshot(
            utc_now(), running, waiting, reasons=self._explain(waiting), people=self._people
        )
        snapshot.is_cut = any(page.next for page in pages)
        snapshot.nodes = tuple(_listed(platform.nodes.list))
        snapshot.queues = tuple(_listed(lambda: platform.queues.list().items))
        return snapshot

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
    """Return the items; none where the caller may not see them, or the platform has no such operation."""
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
    """Return the name of the owner of a job; the id where the caller may not see the owner."""
    try:
        return platform.objects.show(owner).name
    except FalajError:
        return owner


def _document(snapshot: TopSnapshot) -> dict[str, Any]:
    return {
        "at": snapshot.at,
        "nodes": snapshot.nodes,
        "queues": snapshot.queues,
        "running": snapshot.running,
        "waiting": snapshot.waiting,
        "reasons": snapshot.reasons,
    }


# ---------------------------------------------------------------------------------------------- text


def lines(snapshot: TopSnapshot) -> Screen:
    """Return the lines above the table, and the table."""
    cut = "; there are more" if snapshot.is_cut else ""
    head = [f"{plural(len(snapshot.running), 'job')} running, {len(snapshot.waiting)} waiting{cut}"]
    head += [_node_line(each) for each in snapshot.nodes]
    head += [_queue_line(each) for each in snapshot.queues]
    rows = [_row(each, snapshot) for each in (*snapshot.running, *snapshot.waiting)]
    return Screen(head, HEADINGS, rows, shrinking=("name", "owner", "why"))


def _row(job: Job, snapshot: TopSnapshot) -> list[str]:
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
        format_rough_duration(snapshot.at - since),
        describe_gpus(job.spec),
        str(job.spec.nodes * job.spec.cpus),
        job.spec.queue,
        printable(snapshot.people.get(job.owner, job.owner)),
        printable(snapshot.reasons.get(job.id) or job.reason or "-"),
    ]


def _node_line(machine: Machine) -> str:
    """Return a line about a node and its use."""
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
