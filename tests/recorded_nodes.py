"""Node objects and ResourceSlices as clusters return them, without what no test reads."""

from __future__ import annotations

import copy
from typing import Any

READY = [
    {"type": "MemoryPressure", "status": "False", "reason": "KubeletHasSufficientMemory"},
    {"type": "DiskPressure", "status": "False", "reason": "KubeletHasNoDiskPressure"},
    {"type": "PIDPressure", "status": "False", "reason": "KubeletHasSufficientPID"},
    {
        "type": "Ready",
        "status": "True",
        "reason": "KubeletReady",
        "message": "kubelet is posting ready status",
    },
]
UNREACHABLE = [
    {
        "type": "Ready",
        "status": "Unknown",
        "reason": "NodeStatusUnknown",
        "message": "Kubelet stopped posting node status.",
    }
]
GPU_TAINT = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}


def node(
    name: str,
    *,
    labels: dict[str, str],
    allocatable: dict[str, str],
    capacity: dict[str, str] | None = None,
    taints: list[dict[str, Any]] | None = None,
    unschedulable: bool = False,
    conditions: list[dict[str, str]] = READY,
) -> dict[str, Any]:
    """Return a Node object."""
    common = {
        "kubernetes.io/hostname": name,
        "kubernetes.io/os": "linux",
        "kubernetes.io/arch": "amd64",
        "beta.kubernetes.io/arch": "amd64",
    }
    spec: dict[str, Any] = {"podCIDR": "10.1.0.0/24", "providerID": f"bare://{name}"}
    spec |= {"taints": taints} if taints else {}
    spec |= {"unschedulable": True} if unschedulable else {}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "uid": f"uid-of-{name}",
            "resourceVersion": "8123",
            "creationTimestamp": "2026-01-04T08:12:44Z",
            "annotations": {"volumes.kubernetes.io/controller-managed-attach-detach": "true"},
            "labels": common | labels,
        },
        "spec": spec,
        "status": {
            "capacity": allocatable | (capacity or {}),
            "allocatable": allocatable,
            "conditions": conditions,
            "nodeInfo": {"architecture": "amd64", "kubeletVersion": "v1.37.0", "operatingSystem": "linux"},
        },
    }


def patched(before: dict[str, Any], change: dict[str, Any] | None) -> dict[str, Any]:
    """Return the node after a JSON merge patch."""
    after = copy.deepcopy(before)

    def merge(target: dict[str, Any], part: dict[str, Any]) -> None:
        for key, value in part.items():
            if value is None:
                target.pop(key, None)
            elif isinstance(value, dict):
                merge(target.setdefault(key, {}), value)
            else:
                target[key] = value

    merge(after, change or {})
    return after


GFD_H100 = {
    "nvidia.com/cuda.driver-version.full": "570.124.06",
    "nvidia.com/cuda.driver.major": "570",
    "nvidia.com/gpu.compute.major": "9",
    "nvidia.com/gpu.compute.minor": "0",
    "nvidia.com/gpu.count": "8",
    "nvidia.com/gpu.family": "hopper",
    "nvidia.com/gpu.machine": "DGXH100",
    "nvidia.com/gpu.memory": "81559",
    "nvidia.com/gpu.mode": "compute",
    "nvidia.com/gpu.present": "true",
    "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3",
    "nvidia.com/gpu.replicas": "1",
    "nvidia.com/gpu.sharing-strategy": "none",
    "nvidia.com/mig.capable": "true",
    "nvidia.com/mig.config": "all-disabled",
    "nvidia.com/mig.config.state": "success",
    "nvidia.com/mig.strategy": "mixed",
    "nvidia.com/mps.capable": "false",
}
DGX_SIZES = {
    "cpu": "223500m",
    "memory": "2113336724Ki",
    "ephemeral-storage": "1720177934336",
    "hugepages-1Gi": "0",
    "hugepages-2Mi": "0",
    "pods": "110",
}

DGX_H100 = node(
    "dgx-01",
    labels=GFD_H100
    | {
        "feature.node.kubernetes.io/cpu-cpuid.AMXTILE": "true",
        "feature.node.kubernetes.io/cpu-cpuid.AVX2": "true",
        "feature.node.kubernetes.io/cpu-cpuid.AVX512F": "true",
        "feature.node.kubernetes.io/cpu-cpuid.AVX512VNNI": "true",
        "feature.node.kubernetes.io/rdma.available": "true",
        "feature.node.kubernetes.io/rdma.capable": "true",
        "topology.kubernetes.io/region": "me-central-1",
        "topology.kubernetes.io/zone": "me-central-1b",
        "example.com/rack": "R07",
        "example.com/ib-fabric": "fabric-A",
        "example.com/pool": "training",
    },
    allocatable=DGX_SIZES | {"nvidia.com/gpu": "8", "rdma/rdma_shared_device_a": "63"},
    taints=[GPU_TAINT],
)

MIG_MIXED = node(
    "a100-mig",
    labels={
        "nvidia.com/cuda.driver-version.full": "550.90.07",
        "nvidia.com/gpu.compute.major": "8",
        "nvidia.com/gpu.compute.minor": "0",
        "nvidia.com/gpu.count": "6",
        "nvidia.com/gpu.memory": "81920",
        "nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB",
        "nvidia.com/gpu.replicas": "1",
        "nvidia.com/gpu.sharing-strategy": "none",
        "nvidia.com/mig-1g.10gb.count": "7",
        "nvidia.com/mig-1g.10gb.memory": "9728",
        "nvidia.com/mig-1g.10gb.product": "NVIDIA-A100-SXM4-80GB-MIG-1g.10gb",
        "nvidia.com/mig-1g.10gb.replicas": "1",
        "nvidia.com/mig-1g.10gb.sharing-strategy": "none",
        "nvidia.com/mig-3g.40gb.count": "2",
        "nvidia.com/mig-3g.40gb.memory": "40192",
        "nvidia.com/mig-3g.40gb.product": "NVIDIA-A100-SXM4-80GB-MIG-3g.40gb",
        "nvidia.com/mig-3g.40gb.replicas": "1",
        "nvidia.com/mig-3g.40gb.sharing-strategy": "none",
        "nvidia.com/mig.capable": "true",
        "nvidia.com/mig.strategy": "mixed",
    },
    allocatable={
        "cpu": "127",
        "memory": "1031Gi",
        "ephemeral-storage": "900Gi",
        "pods": "110",
        "nvidia.com/gpu": "6",
        "nvidia.com/mig-1g.10gb": "7",
        "nvidia.com/mig-3g.40gb": "2",
    },
)

MIG_SINGLE = node(
    "h200-single",
    labels={
        "nvidia.com/gpu.compute.major": "9",
        "nvidia.com/gpu.compute.minor": "0",
        "nvidia.com/gpu.count": "14",
        "nvidia.com/gpu.memory": "16384",
        "nvidia.com/gpu.product": "NVIDIA-H200-MIG-1g.18gb",
        "nvidia.com/gpu.replicas": "1",
        "nvidia.com/gpu.sharing-strategy": "none",
        "nvidia.com/mig.strategy": "single",
    },
    allocatable={"cpu": "64", "memory": "512Gi", "pods": "110", "nvidia.com/gpu": "14"},
)

TIME_SLICED = node(
    "t4-shared",
    labels={
        "nvidia.com/gpu.compute.major": "7",
        "nvidia.com/gpu.compute.minor": "5",
        "nvidia.com/gpu.count": "2",
        "nvidia.com/gpu.memory": "15360",
        "nvidia.com/gpu.product": "Tesla-T4-SHARED",
        "nvidia.com/gpu.replicas": "4",
        "nvidia.com/gpu.sharing-strategy": "time-slicing",
        "nvidia.com/mig.capable": "false",
        "karpenter.sh/capacity-type": "spot",
        "node.kubernetes.io/instance-type": "g4dn.12xlarge",
    },
    allocatable={"cpu": "47810m", "memory": "182Gi", "pods": "58", "nvidia.com/gpu": "8"},
)

RENAMED = node(
    "t4-renamed",
    labels={
        "nvidia.com/gpu.count": "2",
        "nvidia.com/gpu.memory": "15360",
        "nvidia.com/gpu.product": "Tesla-T4",
        "nvidia.com/gpu.replicas": "4",
        "nvidia.com/gpu.sharing-strategy": "time-slicing",
    },
    allocatable={
        "cpu": "47",
        "memory": "182Gi",
        "pods": "58",
        "nvidia.com/gpu": "0",
        "nvidia.com/gpu.shared": "8",
    },
)

MPS_SHARED = node(
    "l40s-mps",
    labels={
        "nvidia.com/gpu.compute.major": "8",
        "nvidia.com/gpu.compute.minor": "9",
        "nvidia.com/gpu.count": "4",
        "nvidia.com/gpu.memory": "46068",
        "nvidia.com/gpu.product": "NVIDIA-L40S-SHARED",
        "nvidia.com/gpu.replicas": "2",
        "nvidia.com/gpu.sharing-strategy": "mps",
        "nvidia.com/mps.capable": "true",
    },
    allocatable={"cpu": "32", "memory": "250Gi", "pods": "110", "nvidia.com/gpu": "8"},
)

CPU_ONLY = node(
    "cpu-7",
    labels={
        "feature.node.kubernetes.io/cpu-cpuid.AVX2": "true",
        "topology.kubernetes.io/region": "eu-central-1",
        "topology.kubernetes.io/zone": "eu-central-1a",
    },
    allocatable={"cpu": "15890m", "memory": "60455420Ki", "ephemeral-storage": "95Gi", "pods": "58"},
)

GB200 = node(
    "gb200-3",
    labels={
        "nvidia.com/gpu.clique": "7b968a6d-c8aa-45e1-9e07-e1e51be99c31.1",
        "nvidia.com/gpu.compute.major": "10",
        "nvidia.com/gpu.compute.minor": "0",
        "nvidia.com/gpu.count": "4",
        "nvidia.com/gpu.memory": "189471",
        "nvidia.com/gpu.product": "NVIDIA-GB200",
        "nvidia.com/gpu.replicas": "1",
    },
    allocatable={"cpu": "143", "memory": "880Gi", "pods": "110", "nvidia.com/gpu": "4"},
)

CONTROL_PLANE = node(
    "cp-0",
    labels={"node-role.kubernetes.io/control-plane": ""},
    allocatable={"cpu": "4", "memory": "16Gi", "pods": "110"},
    taints=[{"key": "node-role.kubernetes.io/control-plane", "effect": "NoSchedule"}],
)

DRA_NODE = node("dra-1", labels={}, allocatable={"cpu": "64", "memory": "512Gi", "pods": "110"})


def resource_slice(node_name: str, devices: list[dict[str, Any]], *, generation: int = 1) -> dict[str, Any]:
    """Return a ResourceSlice of NVIDIA's driver."""
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": f"{node_name}-gpu.nvidia.com-x{generation}"},
        "spec": {
            "driver": "gpu.nvidia.com",
            "nodeName": node_name,
            "pool": {"name": node_name, "generation": generation, "resourceSliceCount": 1},
            "devices": devices,
        },
    }


def dra_gpu(number: int) -> dict[str, Any]:
    """Return a whole GPU as a device of a ResourceSlice."""
    return {
        "name": f"gpu-{number}",
        "attributes": {
            "type": {"string": "gpu"},
            "productName": {"string": "NVIDIA H100 80GB HBM3"},
            "uuid": {"string": f"GPU-4cf8db2d-06c0-7d70-1a51-e59b25b2c16{number}"},
            "architecture": {"string": "Hopper"},
            "cudaComputeCapability": {"version": "9.0.0"},
        },
        "capacity": {"memory": {"value": "81559Mi"}},
    }


def dra_mig(number: int, *, possible: bool = False) -> dict[str, Any]:
    """Return a MIG device: one that was cut, or one that may be."""
    device: dict[str, Any] = {
        "name": f"gpu-7-mig-1g10gb-{number}",
        "attributes": {
            "type": {"string": "mig"},
            "productName": {"string": "NVIDIA H100 80GB HBM3"},
            "profile": {"string": "1g.10gb"},
        },
        "capacity": {"memory": {"value": "9856Mi"}},
    }
    if possible:
        counters = {"memory-slice-0": {"value": "1"}}
        return device | {"consumesCounters": [{"counterSet": "gpu-7", "counters": counters}]}
    uuid = {"uuid": {"string": f"MIG-7b11-{number}"}}
    return device | {"attributes": device["attributes"] | uuid}
