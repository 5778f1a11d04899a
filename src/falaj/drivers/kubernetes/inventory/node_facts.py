"""What a Node object says of its machine: hardware, place, and whether it takes jobs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from falaj.drivers.kubernetes.inventory.gpu_devices import (
    GpuResource,
    devices_of,
    plugin_resources,
    unhealthy,
)
from falaj.drivers.kubernetes.inventory.node_state import autoscaling_of, keeps_off, state_of, taints_of
from falaj.drivers.kubernetes.inventory.quantities import read_count, read_quantity
from falaj.ports.cluster.maintenance import MIG_CONFIG, MIG_STATE, PLUGIN_CONFIG
from falaj.ports.machine.hardware import ClusterNode, NodeFacts
from falaj.records.config import KubernetesConfig
from falaj.records.scheduling.hardware import label_part
from falaj.records.scheduling.snapshot import Gpu

HOSTNAME = "kubernetes.io/hostname"
PRODUCT = "nvidia.com/gpu.product"
CLIQUE = "nvidia.com/gpu.clique"
ZONE = "topology.kubernetes.io/zone"
REGION = "topology.kubernetes.io/region"
RACK = "topology.kubernetes.io/rack"
BLOCKS = ("cloud.google.com/gce-topology-block", "topology.k8s.aws/network-node-layer-1")
"""Labels of cloud providers for nodes behind one switch of the training network."""
RDMA_RESOURCES = ("rdma/", "vpc.amazonaws.com/efa")
RDMA_LABELS = ("feature.node.kubernetes.io/rdma.available", "feature.node.kubernetes.io/rdma.capable")
SPOT = {
    ("karpenter.sh/capacity-type", "spot"),
    ("eks.amazonaws.com/capacityType", "SPOT"),
    ("cloud.google.com/gke-spot", "true"),
    ("kubernetes.azure.com/scalesetpriority", "spot"),
}
CPU_FEATURES = {
    "AVX2": "avx2",
    "AVX512F": "avx512",
    "AVX512VNNI": "vnni",
    "AVXVNNI": "vnni",
    "AMXTILE": "amx",
    "ASIMD": "neon",
    "SVE": "sve",
}
"""Labels of node feature discovery below feature.node.kubernetes.io/cpu-cpuid., and the instruction set of each."""


def facts_of(node: Mapping[str, Any], config: KubernetesConfig) -> NodeFacts:
    """Return the facts of a Node object."""
    metadata, status = node.get("metadata") or {}, node.get("status") or {}
    labels: Mapping[str, str] = metadata.get("labels") or {}
    allocatable: Mapping[str, str] = status.get("allocatable") or {}
    capacity: Mapping[str, str] = status.get("capacity") or allocatable
    gpus = plugin_resources(labels, capacity, allocatable)
    devices = devices_of(metadata["name"], gpus)
    state, reason, since = state_of(node, config)
    return NodeFacts(
        name=metadata["name"],
        cpus=read_count(allocatable.get("cpu", "0")),
        memory_bytes=read_count(allocatable.get("memory", "0")),
        isa=frozenset(_instruction_sets(labels)),
        gpus=devices,
        driver=labels.get("nvidia.com/cuda.driver-version.full", ""),
        gpu_fault=unhealthy(capacity, allocatable),
        cluster=ClusterNode(
            state=state,
            reason=reason,
            since=since,
            keeps_off=keeps_off(node, config),
            autoscaling=autoscaling_of(node),
            mig_config=labels.get(MIG_CONFIG) or None,
            mig_state=labels.get(MIG_STATE, ""),
            sharing_config=labels.get(PLUGIN_CONFIG) or None,
            zone=config.zones.get(labels.get(ZONE, "")) or config.zones.get(labels.get(REGION, "")),
            pool=_name(labels.get(config.pool_label or "")),
            fabric=fabric_of_labels(labels, config),
            labels=frozenset(
                [*_gpu_labels(labels, gpus, devices), *_place_labels(labels, allocatable, config)]
            ),
            taints=taints_of(node),
            cpus_milli=int(read_quantity(allocatable.get("cpu", "0")) * 1000),
            resources=_resources(allocatable),
            selector={key: labels[key] for key in _selectors(config) if key in labels},
        ),
    )


def fabric_of_labels(labels: Mapping[str, str], config: KubernetesConfig) -> str | None:
    """Return the fabric: by the configured label, else the NVLink domain, else the provider's network block."""
    if config.fabric_label is not None:
        return _name(labels.get(config.fabric_label))
    if clique := _name(labels.get(CLIQUE)):
        return f"nvl-{clique}"[:128]
    block = next((labels[key] for key in BLOCKS if labels.get(key)), None)
    return None if block is None else _name(f"block-{block}")


def _gpu_labels(
    labels: Mapping[str, str], resources: list[GpuResource], devices: tuple[Gpu, ...]
) -> Iterator[str]:
    """Yield the labels of the GPUs that jobs can ask for, spelled as those of a single machine."""
    yield from (f"gpu-{label_part(each.model)}" for each in resources if label_part(each.model))
    major, minor = (labels.get(f"nvidia.com/gpu.compute.{part}") for part in ("major", "minor"))
    if devices and major and minor and f"{major}{minor}".isdecimal():
        yield f"cuda-{major}.{minor}"
    islands = {gpu.island for gpu in devices}
    has = {
        "nvlink": len(islands) < len(devices) or CLIQUE in labels,
        "mig": any(re.match(r"\d+g\.", each.profile or "") for each in resources),
        "mps": any(each.strategy == "mps" for each in resources),
        "time-slicing": any(each.strategy == "time-slicing" for each in resources),
    }
    yield from (name for name, present in has.items() if present)


def _place_labels(
    labels: Mapping[str, str], allocatable: Mapping[str, str], config: KubernetesConfig
) -> Iterator[str]:
    """Yield the labels for the network and the place of a node."""
    offers = any(name.startswith(RDMA_RESOURCES) and read_count(allocatable[name]) for name in allocatable)
    if offers or any(labels.get(key) == "true" for key in RDMA_LABELS):
        yield "rdma"
    if SPOT & set(labels.items()):
        yield "spot"
    places = {
        "rack": labels.get(config.rack_label or RACK),
        "zone": labels.get(ZONE),
        "region": labels.get(REGION),
        "instance": labels.get("node.kubernetes.io/instance-type"),
        "arch": labels.get("kubernetes.io/arch"),
        "nvlink-domain": labels.get(CLIQUE),
    }
    yield from (
        f"{kind}-{part}"[:128].rstrip("-") for kind, value in places.items() if (part := _name(value))
    )


def _instruction_sets(labels: Mapping[str, str]) -> Iterator[str]:
    prefix = "feature.node.kubernetes.io/cpu-cpuid."
    return (name for feature, name in CPU_FEATURES.items() if labels.get(prefix + feature) == "true")


def _resources(allocatable: Mapping[str, str]) -> dict[str, int]:
    """Return the amounts that pods request by name, beside CPUs and memory."""
    beside = ("cpu", "memory", "pods")
    return {
        name: read_count(amount)
        for name, amount in sorted(allocatable.items())
        if name not in beside and not name.startswith("hugepages-")
    }


def _selectors(config: KubernetesConfig) -> tuple[str, ...]:
    own = (config.pool_label, config.fabric_label, config.rack_label, *config.topology)
    return (HOSTNAME, "kubernetes.io/os", PRODUCT, CLIQUE, ZONE, REGION, *(key for key in own if key))


def _name(value: str | None) -> str | None:
    """Return the value of a label as a name of Falaj; none if nothing is left of it."""
    return None if not value else label_part(value) or None
