"""The queue as the scheduler sees it: jobs that wait and run, on the machines there are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from falaj.errors import Fault, InvalidInput
from falaj.records.names import ObjectId
from falaj.records.residency import UNRESTRICTED, Label
from falaj.records.scheduling import (
    Node,
    Placement,
    Queue,
    Request,
    Resources,
    Running,
    Snapshot,
)
from falaj.records.training import JobSpec, JobState

QUEUE = Queue(name="default")


def request_for(job: ObjectId, spec: JobSpec, *, submitted_at: datetime, label: Label) -> Request:
    """What a job asks of the machines: one replica, for all its processes run on one."""
    each = Resources(cpus=spec.cpus, gpus=spec.gpus, memory_bytes=spec.memory_bytes or 0)
    return Request(
        job=job,
        queue=QUEUE.name,
        each=each,
        priority=spec.priority,
        submitted_at=submitted_at,
        label=label,
        time_limit=spec.timeout,
    )


def snapshot_of(rows: Iterable[Any], nodes: Sequence[Node], *, now: datetime) -> Snapshot:
    """What a decision depends on, from the rows of unfinished jobs. Those that pause after a failure are left out."""
    pending, running = [], []
    for row in rows:
        if row["state"] == JobState.RUNNING:
            running.append(_running(row))
        elif row["not_before"] is None or row["not_before"] <= now:
            pending.append(_request(row))
    known = {node.name for node in nodes}
    here = [each for each in running if all(place.node in known for place in each.placements)]
    return Snapshot(now=now, nodes=tuple(nodes), queues=(QUEUE,), pending=tuple(pending), running=tuple(here))


def refuse_impossible(spec: JobSpec, nodes: Sequence[Node]) -> None:
    """InvalidInput, with the numbers, where no machine could run the job even if it were idle."""
    most_memory = max((node.memory_bytes for node in nodes), default=0)
    limits = [
        ("gpus", spec.gpus, max((len(node.gpus) for node in nodes), default=0), ""),
        ("cpus", spec.cpus, max((node.cpus for node in nodes), default=0), ""),
        ("memory_bytes", spec.memory_bytes or 0, most_memory, f" ({most_memory / 2**30:.4g} GiB)"),
    ]
    faults = [
        Fault(where=f"spec.{what}", given=str(asked), allowed=f"at most {most} on one machine here{words}")
        for what, asked, most, words in limits
        if asked > most
    ]
    if faults:
        raise InvalidInput("no machine here can ever run this job", faults=faults)


def _request(row: Any) -> Request:
    label = UNRESTRICTED if row["label"] is None else Label.model_validate(row["label"])
    return request_for(
        row["id"], JobSpec.model_validate(row["spec"]), submitted_at=row["created_at"], label=label
    )


def _running(row: Any) -> Running:
    request = _request(row)
    limit = request.time_limit
    return Running(
        request=request,
        placements=tuple(Placement.model_validate(each) for each in row["placements"]),
        started_at=row["started_at"],
        ends_by=None if limit is None else row["started_at"] + limit,
    )
