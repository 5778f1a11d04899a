"""Records of jobs, nodes and attempts for tests of the console."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from falaj.records.names import ObjectId, PrincipalId
from falaj.records.scheduling.hardware import FreeResources, GpuCard, Machine
from falaj.records.scheduling.snapshot import Gpu, Node, Placement
from falaj.records.training.jobs import Job, JobSpec, JobState

NOON = datetime(2026, 11, 17, 12, tzinfo=UTC)
HOSTILE = "<script>alert(1)</script>"
RTL = "\u202egnp.exe"


def job(
    name: str = "train", state: str = "done", *, spec: dict[str, Any] | None = None, **fields: Any
) -> Job:
    """Return a job that ran from 11:00 to 11:30, and was submitted at 10:59."""
    times: dict[str, Any] = {"submitted_at": NOON - timedelta(minutes=61)}
    if state not in ("queued",):
        times["started_at"] = NOON - timedelta(minutes=60)
    if JobState(state).ended:
        times["ended_at"] = NOON - timedelta(minutes=30)
    given = {
        "id": ObjectId(f"job_{name}"),
        "workspace": ObjectId("workspace_1"),
        "name": name,
        "state": JobState(state),
        "run": ObjectId("run_1"),
        "owner": PrincipalId("user_1"),
        "spec": JobSpec.model_validate({"name": "train", "script": "train.py", **(spec or {})}),
        **times,
        **fields,
    }
    return Job.model_validate(given)


def placed(node: str, *gpus: str) -> Placement:
    return Placement(replica=0, node=node, gpus=gpus)


def machine(name: str, *gpus: str) -> Machine:
    """Return a node with these GPUs, which the driver counts from 4 on."""
    return Machine(
        node=Node(
            name=name,
            zone="abu-dhabi",
            jurisdiction="AE",
            cpus=64,
            memory_bytes=1 << 38,
            gpus=tuple(Gpu(id=gpu, model="H200", memory_bytes=1 << 37) for gpu in gpus),
        ),
        free=FreeResources(cpus=64, memory_bytes=1 << 38, gpus=len(gpus)),
        cards=tuple(
            GpuCard(id=gpu, index=4 + at, model="H200", memory_bytes=1 << 37) for at, gpu in enumerate(gpus)
        ),
    )
