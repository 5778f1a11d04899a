"""The limits of jobs that name none."""

from __future__ import annotations

import pytest

from falaj.control.jobs.default_limits import default_disk_bytes, default_memory_bytes
from falaj.records.scheduling.snapshot import Gpu, Node
from falaj.records.training.jobs import JobSpec

GIB = 1 << 30


def node(*, cpus: int = 64, memory_gib: int = 512, gpus: int = 0) -> Node:
    cards = tuple(Gpu(id=f"gpu-{each}", model="H200", memory_bytes=GIB) for each in range(gpus))
    return Node(
        name="here", zone="local", jurisdiction="AE", cpus=cpus, memory_bytes=memory_gib * GIB, gpus=cards
    )


def spec(**fields: object) -> JobSpec:
    return JobSpec.model_validate({"name": "job", "script": "train.py", **fields})


@pytest.mark.parametrize(
    ("fields", "machine", "gib"),
    [
        ({"cpus": 32}, node(), 230),  # half of what jobs may have
        ({"cpus": 64}, node(), 460),  # never all of the memory
        ({"cpus": 1}, node(), 7),
        ({"cpus": 1}, node(memory_gib=64), 4),  # what a process needs at least
        ({"cpus": 1, "processes": 4}, node(memory_gib=64), 16),
        ({"cpus": 1, "processes": 4}, node(memory_gib=8), 4),  # but not more than half of the machine
        ({"cpus": 1, "gpus": 4}, node(gpus=8), 230),  # the larger of its shares
        ({"cpus": 1, "gpus": 1, "gpu_milli": 500}, node(gpus=1), 230),
    ],
)
def test_memory_is_the_share_of_the_machine(fields: dict[str, object], machine: Node, gib: int) -> None:
    assert default_memory_bytes(spec(**fields), machine) // GIB == gib


@pytest.mark.parametrize(
    ("cpus", "free_gib", "gib"), [(32, 1000, 500), (1, 1000, 15), (1, 100, 10), (1, 10, 5), (64, 10, 10)]
)
def test_disk_is_the_share_of_what_is_free(cpus: int, free_gib: int, gib: int) -> None:
    assert default_disk_bytes(spec(cpus=cpus), node(), free_bytes=free_gib * GIB) // GIB == gib


def test_replicas_that_share_a_machine_share_its_default() -> None:
    small, large = node(memory_gib=8), node()

    assert default_memory_bytes(spec(nodes=2), small, replicas=2) // GIB == 2  # together half of the machine
    assert default_memory_bytes(spec(nodes=2, cpus=64), large, replicas=2) // GIB == 230
    assert default_memory_bytes(spec(nodes=2, cpus=16), large, replicas=1) // GIB == 115
    assert default_disk_bytes(spec(nodes=4), node(), free_bytes=10 * GIB, replicas=4) == 5 * GIB // 4


def test_a_job_always_has_limits() -> None:
    bare = node(cpus=0, memory_gib=0)

    assert default_memory_bytes(spec(), bare) == 1
    assert default_disk_bytes(spec(), bare, free_bytes=0) == 1
