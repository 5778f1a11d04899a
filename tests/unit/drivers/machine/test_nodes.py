"""Nodes and their free resources, as the service, the command line and the doctor show them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from falaj.apps.cli.commands import nodes
from falaj.assembly.doctor import hardware
from falaj.control.service import free_capacity, machine_record
from falaj.governance.operations.caller import acting_as
from falaj.ports.hardware import NodeFacts
from falaj.records.governance.identity import Role
from falaj.records.governance.residency import Zone
from falaj.records.scheduling.hardware import Machine
from falaj.records.scheduling.snapshot import Node, Placement
from falaj.records.training.jobs import JobSpec
from falaj.scheduling import node_from
from platforms import TWO_ZONES, OwnPlatform, make_platform
from recorded_machines import machine

GIB = 2**30


def recorded(name: str, root: Path) -> tuple[NodeFacts, Node]:
    (facts,) = machine(name, root).nodes()
    return facts, node_from(facts, zone=Zone(name="local", jurisdiction="AE"))


def running(node: Node, *gpus: int, where: str | None = None, **spec: Any) -> Any:
    """The row of a job that runs on some GPUs of `node`, or elsewhere."""
    placed = Placement(replica=0, node=where or node.name, gpus=tuple(node.gpus[at].id for at in gpus))
    asked = JobSpec(name="job", script="train.py", gpus=len(gpus), **spec)
    return SimpleNamespace(spec=asked, placements=(placed,))


# ------------------------------------------------------------------------------------------------ what is free


def test_an_idle_machine_is_all_free(tmp_path: Path) -> None:
    _, node = recorded("dgx-h200", tmp_path)

    free = free_capacity(node, [])

    assert (free.cpus, free.memory_bytes, free.gpus) == (node.cpus, node.memory_bytes, 8)
    assert free.gpu_milli == (1000,) * 8


def test_what_running_jobs_hold_is_not_free_parts_of_a_card_included(tmp_path: Path) -> None:
    _, node = recorded("dgx-h200", tmp_path)
    rows = [
        running(node, 0, 1, cpus=16, memory_bytes=64 * GIB),
        running(node, 7, cpus=2, gpu_milli=300),
        running(node, 7, cpus=2, gpu_milli=500),
        running(node, 3, where="elsewhere"),
    ]

    free = free_capacity(node, rows)

    assert (free.cpus, free.memory_bytes) == (node.cpus - 20, node.memory_bytes - 64 * GIB)
    assert free.gpu_milli == (0, 0, 1000, 1000, 1000, 1000, 1000, 200)
    assert free.gpus == 5


# --------------------------------------------------------------------------------------------------- the room


def test_anyone_who_is_known_sees_the_machines(light_platform: OwnPlatform) -> None:
    worker = light_platform.join("worker", Role.DEVELOPER)

    with acting_as(worker):
        (found,) = light_platform.parts.services.nodes.list()

    assert found.node.zone == "local"
    assert found.free.cpus == found.node.cpus >= 1
    assert found.cards or found.gpu_fault


def test_falaj_toml_says_the_pool_and_the_labels(tmp_path: Path) -> None:
    toml = TWO_ZONES + '\n[node]\npool = "cpu-only"\nlabels = ["rack-7"]\n'

    with make_platform(tmp_path, toml=toml) as platform:
        (found,) = platform.nodes.list()

    assert found.node.pool == "cpu-only"
    assert "rack-7" in found.node.labels
    assert {f"isa-{each}" for each in found.isa} <= found.node.labels


# ------------------------------------------------------------------------------------------- the command line


def shown(name: str, root: Path, *rows: dict[str, Any]) -> Machine:
    return machine_record(*recorded(name, root), rows)


def test_a_list_has_a_line_for_each_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nodes._print_all([shown("dgx-h200", tmp_path / "a"), shown("h200-mig", tmp_path / "b")])

    _, dgx, mig = capsys.readouterr().out.splitlines()
    assert "8 of 8" in dgx
    assert "8 NVIDIA H200" in dgx
    assert "ib-fe80000000000001" in dgx
    assert "8 NVIDIA H200 1g.18gb, 1 NVIDIA H200 3g.71gb" in mig


def test_a_machine_is_shown_with_its_cards_and_adapters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes._print_each([shown("dgx-h200", tmp_path)])

    out = capsys.readouterr().out
    assert "2 sockets, 2 NUMA nodes" in out
    assert "0000:1b:00.0 gen 5 x16" in out
    assert out.count("NVIDIA H200  140 GiB") == 8
    assert out.count("infiniband") == 8
    assert "400" in out


# ------------------------------------------------------------------------------------------------- the doctor


def test_the_doctor_tells_of_cards_islands_and_mps(tmp_path: Path) -> None:
    facts, _ = recorded("dgx-h200", tmp_path)

    (finding,) = hardware.check_gpus(facts, Path("/run/mps"))

    assert finding.status == "ok"
    assert finding.words.startswith("8 NVIDIA H200, in 1 NVLink island")
    assert "no MPS in /run/mps" in finding.words


def test_the_doctor_warns_of_a_card_that_is_lost(tmp_path: Path) -> None:
    facts, _ = recorded("half-broken", tmp_path)

    found = list(hardware.check_gpus(facts, Path("/run/mps")))

    assert [finding.status for finding in found] == ["ok", "warn"]
    assert found[1].words == "GPU 0: GPU is lost"


def test_the_doctor_warns_of_a_broken_driver_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts, _ = recorded("broken-driver", tmp_path)
    monkeypatch.setattr(hardware, "has_device", lambda: True)

    (finding,) = hardware.check_gpus(facts, Path("/run/mps"))

    assert finding.status == "warn"


def test_the_doctor_says_which_energy_is_counted(tmp_path: Path) -> None:
    facts, _ = recorded("half-broken", tmp_path)

    assert hardware.check_energy(facts, counts_cpus=False).words == "counted of 1 of 2 GPUs (NVML)"
    assert "RAPL" in hardware.check_energy(facts, counts_cpus=True).words
