"""What is read from Node objects and ResourceSlices, on recorded ones."""

from __future__ import annotations

import copy
from fractions import Fraction
from typing import Any

import pytest

from falaj.drivers.kubernetes.inventory.gpu_devices import dra_devices, model_and_profile
from falaj.drivers.kubernetes.inventory.node_facts import facts_of
from falaj.drivers.kubernetes.inventory.quantities import read_quantity
from falaj.drivers.kubernetes.nodes import read_node
from falaj.ports.machine.hardware import ClusterNode, NodeFacts, NodeTaint
from falaj.records.config import Config, KubernetesConfig
from falaj.records.governance.residency import Zone
from falaj.scheduling import node_from
from falaj.scheduling.capacity.resources import slice_thousandths
from recorded_nodes import (
    CONTROL_PLANE,
    CPU_ONLY,
    DGX_H100,
    GB200,
    MIG_MIXED,
    MIG_SINGLE,
    MPS_SHARED,
    TIME_SLICED,
    UNREACHABLE,
    dra_gpu,
    dra_mig,
    node,
    resource_slice,
)

MIB = 2**20
PLAIN = KubernetesConfig()
LABELLED = KubernetesConfig(
    zones={"me-central-1": "dubai", "eu-central-1a": "frankfurt"},
    pool_label="example.com/pool",
    fabric_label="example.com/ib-fabric",
    rack_label="example.com/rack",
)
DUBAI = Zone(name="dubai", jurisdiction="AE")


def read(recorded: dict[str, Any], config: KubernetesConfig = PLAIN) -> tuple[NodeFacts, ClusterNode]:
    facts = facts_of(recorded, config)
    assert facts.cluster is not None
    return facts, facts.cluster


# ---------------------------------------------------------------------------------------------- hardware


def test_a_dgx_has_eight_gpus_in_one_island() -> None:
    facts, there = read(DGX_H100, LABELLED)

    assert (facts.name, facts.cpus, facts.memory_bytes) == ("dgx-01", 223, 2113336724 * 1024)
    assert len(facts.gpus) == 8
    assert len({gpu.id for gpu in facts.gpus}) == 8
    assert {gpu.model for gpu in facts.gpus} == {"NVIDIA H100 80GB HBM3"}
    assert {(gpu.memory_bytes, gpu.island, gpu.profile) for gpu in facts.gpus} == {(81559 * MIB, 0, None)}
    assert facts.isa == {"amx", "avx2", "avx512", "vnni"}
    assert facts.driver == "570.124.06"
    assert there.resources == {
        "ephemeral-storage": 1720177934336,
        "nvidia.com/gpu": 8,
        "rdma/rdma_shared_device_a": 63,
    }


def test_the_place_of_a_node_is_read_from_the_configured_labels() -> None:
    facts, there = read(DGX_H100, LABELLED)

    made = node_from(facts, zone=DUBAI)

    assert (there.zone, there.pool, there.fabric) == ("dubai", "training", "fabric-a")
    assert (made.pool, made.fabric) == ("training", "fabric-a")
    assert made.labels >= {
        *("gpu-nvidia-h100-80gb-hbm3", "cuda-9.0", "nvlink", "rdma", "isa-amx", "arch-amd64"),
        *("rack-r07", "zone-me-central-1b", "region-me-central-1"),
    }
    assert there.selector["nvidia.com/gpu.product"] == "NVIDIA-H100-80GB-HBM3"


def test_a_zone_is_found_by_its_zone_label_before_its_region() -> None:
    mapped = KubernetesConfig(zones={"me-central-1": "dubai", "me-central-1b": "abu-dhabi"})

    assert read(DGX_H100, mapped)[1].zone == "abu-dhabi"
    assert read(DGX_H100, LABELLED)[1].zone == "dubai"
    assert read(CPU_ONLY, LABELLED)[1].zone == "frankfurt"
    assert read(MIG_MIXED, LABELLED)[1].zone is None


def test_mixed_mig_offers_whole_gpus_and_slices_of_each_profile() -> None:
    facts, there = read(MIG_MIXED)

    kinds = [(gpu.profile, gpu.memory_bytes // MIB) for gpu in facts.gpus]
    whole = [gpu for gpu in facts.gpus if gpu.profile is None]
    slices = [gpu for gpu in facts.gpus if gpu.profile]

    assert kinds.count((None, 81920)) == 6
    assert kinds.count(("1g.10gb", 9728)) == 7
    assert kinds.count(("3g.40gb", 40192)) == 2
    assert {gpu.model for gpu in facts.gpus} == {"NVIDIA A100-SXM4-80GB"}
    assert len({gpu.island for gpu in whole}) == 1
    assert len({gpu.island for gpu in slices} | {gpu.island for gpu in whole}) == 10
    assert {"mig", "nvlink"} <= there.labels


def test_single_mig_has_its_profile_in_the_product() -> None:
    facts, _ = read(MIG_SINGLE)

    assert len(facts.gpus) == 14
    assert {(gpu.model, gpu.profile) for gpu in facts.gpus} == {("NVIDIA H200", "1g.18gb")}


@pytest.mark.parametrize(
    ("recorded", "profile", "model", "label"),
    [
        (TIME_SLICED, "1/4", "Tesla T4", "time-slicing"),
        (MPS_SHARED, "1/2", "NVIDIA L40S", "mps"),
    ],
)
def test_shared_gpus_are_parts_that_count_as_such(
    recorded: dict[str, Any], profile: str, model: str, label: str
) -> None:
    facts, there = read(recorded)

    assert len(facts.gpus) == 8
    assert {(gpu.profile, gpu.model) for gpu in facts.gpus} == {(profile, model)}
    assert len({gpu.island for gpu in facts.gpus}) == 8
    assert label in there.labels
    assert slice_thousandths(profile) == 1000 // int(profile[2:])
    parts = 1000 // slice_thousandths(profile)
    assert (
        facts.gpus[0].memory_bytes * parts
        <= int(recorded["metadata"]["labels"]["nvidia.com/gpu.memory"]) * MIB
    )


def test_sharing_is_seen_where_the_label_of_replicas_lags_behind() -> None:
    recorded = copy.deepcopy(TIME_SLICED)
    recorded["metadata"]["labels"] |= {
        "nvidia.com/gpu.replicas": "1",
        "nvidia.com/gpu.sharing-strategy": "none",
        "nvidia.com/gpu.product": "Tesla-T4",
    }

    assert {gpu.profile for gpu in read(recorded)[0].gpus} == {"1/4"}


def test_nodes_of_one_nvlink_domain_share_a_fabric() -> None:
    facts, there = read(GB200)

    assert there.fabric == "nvl-7b968a6d-c8aa-45e1-9e07-e1e51be99c31-1"
    assert "nvlink-domain-7b968a6d-c8aa-45e1-9e07-e1e51be99c31-1" in there.labels
    assert {gpu.island for gpu in facts.gpus} == {0}


def test_gpus_without_nvlink_are_islands_of_their_own() -> None:
    recorded = copy.deepcopy(DGX_H100)
    recorded["metadata"]["labels"]["nvidia.com/gpu.product"] = "NVIDIA-H100-PCIe"

    facts, there = read(recorded)

    assert len({gpu.island for gpu in facts.gpus}) == 8
    assert "nvlink" not in there.labels


def test_a_node_without_gpus_or_labels_offers_its_cpus() -> None:
    facts, there = read(CPU_ONLY)

    assert (facts.cpus, facts.gpus, facts.gpu_fault) == (15, (), "")
    assert (there.state, there.pool, there.fabric) == ("ready", None, None)
    assert facts.isa == {"avx2"}


def test_gpus_without_labels_have_no_model() -> None:
    bare = node("bare", labels={}, allocatable={"cpu": "2", "memory": "8Gi", "nvidia.com/gpu": "8"})

    facts, _ = read(bare)

    assert [(gpu.model, gpu.memory_bytes) for gpu in facts.gpus] == [("", 0)] * 8


def test_unhealthy_gpus_are_left_out_and_reported() -> None:
    recorded = copy.deepcopy(DGX_H100)
    recorded["status"]["allocatable"]["nvidia.com/gpu"] = "7"

    facts, _ = read(recorded)

    assert len(facts.gpus) == 7
    assert facts.gpu_fault == "1 of 8 nvidia.com/gpu are unhealthy"


# ------------------------------------------------------------------------------------------------- state


def test_a_gpu_taint_is_tolerated_and_others_keep_jobs_off() -> None:
    assert read(DGX_H100)[1].state == "ready"
    assert read(DGX_H100)[1].taints == (NodeTaint("nvidia.com/gpu", "present", "NoSchedule"),)
    assert (read(CONTROL_PLANE)[1].state, read(CONTROL_PLANE)[1].reason) == (
        "cordoned",
        "taint node-role.kubernetes.io/control-plane:NoSchedule",
    )
    assert (
        read(DGX_H100, KubernetesConfig(tolerate=()))[1].reason == "taint nvidia.com/gpu=present:NoSchedule"
    )


def test_cordoned_deleted_and_lost_nodes_are_told_apart() -> None:
    sizes = {"cpu": "4", "memory": "8Gi"}
    cordon = [{"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}]
    cordoned = node("a", labels={}, allocatable=sizes, unschedulable=True, taints=cordon)
    deleted = node("b", labels={}, allocatable=sizes)
    deleted["metadata"]["deletionTimestamp"] = "2026-03-01T00:00:00Z"
    lost = node("c", labels={}, allocatable=sizes, conditions=UNREACHABLE, unschedulable=True)
    new = node("d", labels={}, allocatable=sizes, conditions=[])

    assert [(read(each)[1].state, read(each)[1].reason) for each in (cordoned, deleted, lost, new)] == [
        ("cordoned", "cordoned by kubectl or another program"),
        ("cordoned", "being deleted"),
        ("lost", "not ready: Kubelet stopped posting node status."),
        ("lost", "not ready: its kubelet has not reported"),
    ]


def test_a_node_that_says_nonsense_offers_nothing() -> None:
    odd = node(
        "odd",
        labels={
            "nvidia.com/gpu.memory": "lots",
            "nvidia.com/gpu.replicas": "-3",
            "nvidia.com/gpu.count": "0",
        },
        allocatable={"cpu": "many", "memory": "", "nvidia.com/gpu": "1e30", "nvidia.com/mig-": "0"},
    )
    empty = {"metadata": {"name": "empty"}}

    facts, _ = read(odd)

    assert (facts.cpus, facts.memory_bytes) == (0, 0)
    assert len(facts.gpus) == 4096
    assert read(empty)[0].cpus == 0
    assert read(empty)[1].state == "lost"


def test_a_node_that_cannot_be_used_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    long = node("n" * 200, labels={}, allocatable={"cpu": "4"})
    odd = node("odd", labels={}, allocatable={"cpu": "4", f"nvidia.com/mig-{'x' * 90}": "1"})

    assert [read_node(each, PLAIN) for each in (long, odd)] == [None, None]
    assert [getattr(each, "node", None) for each in caplog.records] == ["n" * 200, "odd"]


# --------------------------------------------------------------------------------------------------- DRA


def test_dra_devices_have_their_uuids() -> None:
    offered = dra_devices([resource_slice("dra-1", [dra_gpu(0), dra_gpu(1), dra_mig(3)])])

    assert [gpu.id for gpu in offered["dra-1"]] == [
        "GPU-4cf8db2d-06c0-7d70-1a51-e59b25b2c160",
        "GPU-4cf8db2d-06c0-7d70-1a51-e59b25b2c161",
        "MIG-7b11-3",
    ]
    assert [(gpu.profile, gpu.memory_bytes // MIB) for gpu in offered["dra-1"]] == [
        (None, 81559),
        (None, 81559),
        ("1g.10gb", 9856),
    ]


def test_dra_counts_the_newest_generation_and_no_slice_that_may_be_cut() -> None:
    slices = [
        resource_slice("dra-1", [dra_gpu(0), dra_gpu(1)], generation=1),
        resource_slice("dra-1", [dra_gpu(0), dra_mig(0, possible=True)], generation=2),
        {"spec": resource_slice("dra-1", [dra_gpu(5)])["spec"] | {"driver": "compute-domain.nvidia.com"}},
    ]

    assert [gpu.id[-1] for gpu in dra_devices(slices)["dra-1"]] == ["0"]


# ------------------------------------------------------------------------------------------------ values


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1930m", Fraction(193, 100)),
        ("64", 64),
        ("2113336724Ki", 2113336724 * 1024),
        ("1.5Gi", 3 * 2**29),
        ("12e6", 12_000_000),
        ("1k", 1000),
        ("", 0),
        ("-1", 0),
        ("1Qi", 0),
    ],
)
def test_quantities(text: str, number: Fraction) -> None:
    assert read_quantity(text) == number


@pytest.mark.parametrize(
    ("product", "model"),
    [
        ("NVIDIA-A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB"),
        ("NVIDIA-A100-80GB-PCIe", "NVIDIA A100 80GB PCIe"),
        ("Tesla-V100-PCIE-16GB", "Tesla V100-PCIE-16GB"),
        ("NVIDIA-H200", "NVIDIA H200"),
        ("Tesla-T4-SHARED", "Tesla T4"),
    ],
)
def test_models_are_spelled_as_on_a_single_machine(product: str, model: str) -> None:
    assert model_and_profile(product) == (model, None)


def test_a_zone_that_nodes_map_to_must_exist() -> None:
    with pytest.raises(ValueError, match="me-central-1 to mars, which is none of the zones local"):
        Config(kubernetes=KubernetesConfig(zones={"me-central-1": "mars"}))
