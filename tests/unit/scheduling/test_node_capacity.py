"""The CPUs and the memory of a node, from recorded files and from this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from falaj.drivers.machine.gpus import GpuDiscovery
from falaj.drivers.machine.inventory import LocalMachine, node_name
from falaj.ports.machine.hardware import NodeInventory
from falaj.records.governance.residency import Zone
from falaj.scheduling import node_from

GIB = 2**30
SAPPHIRE_RAPIDS = """\
processor\t: 0
model name\t: Intel(R) Xeon(R) Platinum 8480C
flags\t\t: fpu vme sse2 avx avx2 avx512f avx512_vnni amx_bf16 amx_tile amx_int8
"""


def recorded(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def machine(root: Path, *, cpus: int = 16, **files: str) -> LocalMachine:
    given = {name.replace("__", "/").replace("_max", ".max"): text for name, text in files.items()}
    base = {"proc/meminfo": f"MemTotal:   {64 * 2**20} kB\n", "proc/cpuinfo": SAPPHIRE_RAPIDS}
    where = recorded(root, base | given)
    return LocalMachine(
        root=where, name="box", usable_cpus=cpus, cards=lambda: GpuDiscovery(fault="none here")
    )


def test_a_machine_without_limits(tmp_path: Path) -> None:
    (facts,) = machine(tmp_path).nodes()

    assert (facts.name, facts.cpus, facts.memory_bytes) == ("box", 16, 64 * GIB)
    assert facts.cpu_model == "Intel(R) Xeon(R) Platinum 8480C"
    assert facts.isa == {"avx2", "avx512", "vnni", "amx"}
    assert facts.gpu_fault == "none here"


def test_a_container_offers_what_its_cgroup_allows(tmp_path: Path) -> None:
    limited = machine(
        tmp_path,
        proc__self__cgroup="0::/\n",
        sys__fs__cgroup__cpu_max="250000 100000\n",
        sys__fs__cgroup__memory_max=f"{8 * GIB}\n",
    )

    (facts,) = limited.nodes()

    assert (facts.cpus, facts.memory_bytes) == (2, 8 * GIB)


def test_a_limit_on_a_group_above_binds_too(tmp_path: Path) -> None:
    limited = machine(
        tmp_path,
        proc__self__cgroup="0::/slice/falaj\n",
        sys__fs__cgroup__slice__cpu_max="400000 100000\n",
        sys__fs__cgroup__slice__falaj__cpu_max="max 100000\n",
        sys__fs__cgroup__slice__falaj__memory_max="max\n",
    )

    (facts,) = limited.nodes()

    assert (facts.cpus, facts.memory_bytes) == (4, 64 * GIB)


def test_a_share_of_one_cpu_is_still_a_cpu(tmp_path: Path) -> None:
    (facts,) = machine(tmp_path, sys__fs__cgroup__cpu_max="50000 100000\n").nodes()

    assert facts.cpus == 1


def test_affinity_binds_below_the_cgroup(tmp_path: Path) -> None:
    (facts,) = machine(tmp_path, cpus=2, sys__fs__cgroup__cpu_max="800000 100000\n").nodes()

    assert facts.cpus == 2


def test_the_capacity_of_this_machine_is_plausible() -> None:
    hardware: NodeInventory = LocalMachine()

    (facts,) = hardware.nodes()
    node = node_from(facts, zone=Zone(name="local", jurisdiction="AE"))

    assert node.cpus >= 1
    assert node.memory_bytes > 2**28
    assert node.jurisdiction == "AE"
    assert node.gpus or facts.gpu_fault


@pytest.mark.parametrize(
    ("host", "name"),
    [("DGX-01.corp.ae", "dgx-01-corp-ae"), ("my_laptop", "my-laptop"), ("", "this-machine")],
)
def test_a_host_name_becomes_a_name(host: str, name: str) -> None:
    assert node_name(host) == name
