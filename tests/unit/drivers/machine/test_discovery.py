"""Discovery on recorded machines: a DGX-class node, MIG slices, NVLink islands, and broken drivers."""

from __future__ import annotations

from pathlib import Path

import pytest

from falaj.drivers.machine.gpus import find_cards
from falaj.ports.machine.hardware import NodeFacts, NodeInventory
from falaj.records.governance.residency import Zone
from falaj.records.scheduling.snapshot import Node
from falaj.scheduling import node_from
from recorded_machines import ReplayedNvml, machine, recording

HERE = Zone(name="local", jurisdiction="AE")
GIB = 2**30


def found(name: str, root: Path) -> NodeFacts:
    hardware: NodeInventory = machine(name, root)
    (facts,) = hardware.nodes()
    return facts


def node(name: str, root: Path) -> Node:
    return node_from(found(name, root), zone=HERE)


# ------------------------------------------------------------------------------------------- a DGX-class node


def test_a_dgx_is_described_completely(tmp_path: Path) -> None:
    facts = found("dgx-h200", tmp_path)

    assert (facts.cpus, facts.sockets, facts.numa_nodes) == (224, 2, 2)
    assert facts.memory_bytes == pytest.approx(2 * 1024 * GIB, rel=0.05)
    assert facts.isa == {"avx2", "avx512", "vnni", "amx"}
    assert facts.driver == "580.105.08"
    assert [card.numa_node for card in facts.cards] == [0, 0, 0, 0, 1, 1, 1, 1]
    first = facts.cards[0]
    assert (first.model, first.compute_capability, first.nvlinks) == ("NVIDIA H200", "9.0", 18)
    assert (first.pci_address, first.pcie_generation, first.pcie_width) == ("0000:1b:00.0", 5, 16)
    assert first.counts_energy
    assert facts.gpu_fault == ""


def test_gpus_behind_nvswitches_are_one_island(tmp_path: Path) -> None:
    assert {gpu.island for gpu in found("dgx-h200", tmp_path).gpus} == {0}


def test_gpus_behind_nvswitches_are_one_island_even_without_peer_information() -> None:
    recorded = recording("dgx-h200")["nvml"]
    recorded["calls"] = {
        call: answer for call, answer in recorded["calls"].items() if "P2PStatus" not in call
    }

    cards = find_cards(load=lambda: ReplayedNvml(recorded)).cards

    assert {card.island for card in cards} == {0}


def test_a_gpu_that_the_driver_isolates_is_in_no_island_whatever_its_links() -> None:
    recorded = recording("dgx-h200")["nvml"]
    refused = {call: 5 for call in recorded["calls"] if "P2PStatus" in call and "gpu7" in call}

    cards = find_cards(load=lambda: ReplayedNvml(recorded | {"calls": recorded["calls"] | refused})).cards

    assert [card.island for card in cards] == [0] * 7 + [1]


def test_the_fabric_is_that_of_the_active_infiniband_ports(tmp_path: Path) -> None:
    facts = found("dgx-h200", tmp_path)

    active = [port for port in facts.rdma if port.is_active]
    assert len(facts.rdma) == 12
    assert [port.rate_gbps for port in active if port.link == "infiniband"] == [400.0] * 8
    assert {port.fabric for port in facts.rdma if port.link == "ethernet"} == {None}
    assert [port.device for port in facts.rdma if port.state == "down"] == ["mlx5_2", "mlx5_8"]
    assert node("dgx-h200", tmp_path).fabric == "ib-fe80000000000001"


def test_a_node_has_the_pool_and_the_labels_of_its_configuration_and_of_its_hardware(tmp_path: Path) -> None:
    facts = found("dgx-h200", tmp_path)

    made = node_from(facts, zone=HERE, pool="research", labels=["rack-7"])

    assert made.pool == "research"
    assert made.labels == {
        "rack-7",
        "isa-avx2",
        "isa-avx512",
        "isa-vnni",
        "isa-amx",
        "gpu-nvidia-h200",
        "cuda-9.0",
        "nvlink",
        "rdma",
    }
    assert not made.shares


def test_a_recorded_h200_is_described(tmp_path: Path) -> None:
    (card,) = found("h200", tmp_path).cards

    assert (card.model, card.memory_bytes) == ("NVIDIA H200", 150_754_820_096)
    assert (card.compute_capability, card.pci_address, card.pcie_generation) == ("9.0", "0000:00:06.0", 5)
    assert (card.nvlinks, card.numa_node, card.is_sliced) == (0, None, False)
    assert card.counts_energy


# ----------------------------------------------------------------------------------------------------- slices


def test_mig_slices_are_offered_beside_whole_gpus_and_a_partitioned_gpu_is_not(tmp_path: Path) -> None:
    facts = found("h200-mig", tmp_path)

    profiles = [gpu.profile for gpu in facts.gpus]
    assert profiles == [None, *["1g.18gb"] * 7, "3g.71gb", "2g.35gb", "1g.18gb", "1g.18gb+me"]
    assert facts.gpus[0].id == facts.cards[3].id
    assert all(gpu.id.startswith("MIG-") for gpu in facts.gpus[1:])
    assert facts.gpus[8].memory_bytes == 74_621_911_040
    assert facts.gpu_fault == "GPU 2 is in MIG mode and has no slices"


def test_mig_slices_share_no_island(tmp_path: Path) -> None:
    islands = [gpu.island for gpu in found("h200-mig", tmp_path).gpus]

    assert len(set(islands)) == len(islands)


# ---------------------------------------------------------------------------------------------------- islands


def test_nvlink_bridges_make_islands_of_adjacent_gpus(tmp_path: Path) -> None:
    facts = found("two-islands", tmp_path)

    assert [(card.index, card.island) for card in facts.cards] == [(0, 0), (2, 0), (1, 1), (3, 1)]
    assert [gpu.id for gpu in facts.gpus] == [card.id for card in facts.cards]
    assert [card.nvlinks for card in facts.cards] == [11] * 4
    assert facts.driver == "470.256.02"


# ----------------------------------------------------------------------------------- none, and broken drivers


def test_a_machine_without_gpus_reports_the_reason(tmp_path: Path) -> None:
    facts = found("no-gpu", tmp_path)

    assert (facts.gpus, facts.cards, facts.rdma) == ((), (), ())
    assert facts.gpu_fault == "NVML failed: NVML Shared Library Not Found"
    assert node("no-gpu", tmp_path).fabric is None


def test_broken_driver_hides_only_the_gpus(tmp_path: Path) -> None:
    facts = found("broken-driver", tmp_path)

    assert facts.gpu_fault == "NVML failed: Driver/library version mismatch"
    assert facts.cpus == 8


def test_a_lost_gpu_is_left_out_and_an_unresponsive_one_is_described_partially(tmp_path: Path) -> None:
    facts = found("half-broken", tmp_path)

    assert [card.model for card in facts.cards] == ["Tesla T4", "Tesla K80"]
    assert facts.gpu_fault == "GPU 0: GPU is lost"
    old = facts.cards[1]
    assert (old.compute_capability, old.pci_address, old.numa_node, old.counts_energy) == (
        None,
        None,
        None,
        False,
    )
    assert facts.driver == ""
    assert [gpu.island for gpu in facts.gpus] == [0, 1]


def test_a_gpu_without_its_own_memory_counts_and_a_lost_one_does_not() -> None:
    recorded = recording("h200")["nvml"]
    call = "nvmlDeviceGetMemoryInfo(gpu0)"

    recorded["calls"][call] = {"error": "Not Supported"}
    shared = find_cards(load=ReplayedNvml(recorded).itself)
    recorded["calls"][call] = {"error": "GPU is lost"}
    lost = find_cards(load=ReplayedNvml(recorded).itself)

    assert [card.memory_bytes for card in shared.cards] == [0]
    assert (lost.cards, lost.fault) == ((), "GPU 0: GPU is lost")


def test_a_session_with_nvml_is_closed_whatever_happens() -> None:
    for name in ("dgx-h200", "half-broken"):
        nvml = ReplayedNvml(recording(name)["nvml"])

        find_cards(load=nvml.itself)

        assert nvml.sessions == 0


def test_no_library_means_no_gpus_and_a_reason() -> None:
    def absent() -> None:
        raise ModuleNotFoundError("No module named 'pynvml'")

    assert find_cards(load=absent).fault == "nvidia-ml-py is not installed"
