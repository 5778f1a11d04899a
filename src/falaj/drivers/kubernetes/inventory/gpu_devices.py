"""The GPUs of a node from what the device plugin, GPU feature discovery and DRA drivers say of it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from falaj.drivers.kubernetes.inventory.quantities import read_count
from falaj.records.scheduling.snapshot import Gpu

DOMAIN = "nvidia.com"
GPU = f"{DOMAIN}/gpu"
MIG = f"{DOMAIN}/mig-"
SHARED = ".shared"
DRA_DRIVER = "gpu.nvidia.com"
MIB = 2**20
MOST_DEVICES = 4096
MOST_BYTES = 2**50
"""A node that claims more devices of one kind, or more memory of one, is taken to be mistaken."""

DEVICE = re.compile(r"[^/]+/((?:gpu|mig-[^/]+?)(?:\.shared)?)-\d+")
"""A device that a plugin offers: its node, its resource without the domain, and its number."""
DRA_DEVICE = re.compile(r"(GPU|MIG)-[0-9a-f]{8}-|[^/]+/dra-")
NVLINKED = re.compile(r"SXM|HBM3|HGX|\b(G?[BH]200|G?B300|GH200)\b(?! NVL)")
"""Models that are only built into machines in which all GPUs are joined by NVLink."""


class GpuResource(NamedTuple):
    """An extended resource whose units are GPUs: whole ones, MIG slices, or equal parts shared by several pods."""

    name: str
    units: int
    model: str
    memory_bytes: int
    profile: str | None
    strategy: str


def plugin_resources(
    labels: Mapping[str, str], capacity: Mapping[str, str], allocatable: Mapping[str, str]
) -> list[GpuResource]:
    """Return the GPU resources that a device plugin offers on a node."""
    names = sorted(name for name in allocatable if name in (GPU, GPU + SHARED) or name.startswith(MIG))
    found = [_resource(name, labels, capacity, allocatable) for name in names]
    return [each for each in found if each.units]


def _resource(
    name: str, labels: Mapping[str, str], capacity: Mapping[str, str], allocatable: Mapping[str, str]
) -> GpuResource:
    stem = name.removesuffix(SHARED)
    product = labels.get(f"{stem}.product") or labels.get(f"{GPU}.product", "")
    model, single = model_and_profile(product)
    profile = stem.removeprefix(MIG) if stem.startswith(MIG) else single
    replicas = _replicas(stem, labels, read_count(capacity.get(name, "0")))
    memory_bytes = min(read_count(labels.get(f"{stem}.memory", "0")) * MIB, MOST_BYTES) // replicas
    strategy = labels.get(f"{stem}.sharing-strategy", "") if replicas > 1 else ""
    if replicas > 1:
        profile = f"{profile}.shared-{replicas}" if profile else f"1/{replicas}"
    units = min(read_count(allocatable[name]), MOST_DEVICES)
    return GpuResource(name, units, model, memory_bytes, profile, strategy)


def _replicas(stem: str, labels: Mapping[str, str], capacity: int) -> int:
    """Return by how many pods a GPU is shared. The label can lag behind the plugin: then the numbers tell."""
    cards = read_count(labels.get(f"{stem}.count", "0"))
    if cards and capacity > cards and capacity % cards == 0:
        return capacity // cards
    labelled = max(1, read_count(labels.get(f"{stem}.replicas", "1")))
    return 1 if cards and capacity == cards else labelled


def model_and_profile(product: str) -> tuple[str, str | None]:
    """Return the model as NVML spells it, and the MIG profile that the label of the single strategy contains.

    NVIDIA-A100-SXM4-80GB-MIG-1g.10gb is NVIDIA A100-SXM4-80GB and 1g.10gb.
    """
    name, _, profile = product.removesuffix("-SHARED").partition("-MIG-")
    spaced = name.replace("-", " ")
    return re.sub(r"(\w+) (SXM\d?|PCIE) (\w+)", r"\1-\2-\3", spaced), profile or None


def devices_of(node: str, resources: Iterable[GpuResource]) -> tuple[Gpu, ...]:
    """Return one GPU for each unit of the resources. The cluster names no device, so they are numbered."""
    gpus: list[Gpu] = []
    for each in resources:
        joined = each.profile is None and NVLINKED.search(each.model)
        first = max((gpu.island for gpu in gpus), default=-1) + 1
        kind = each.name.partition("/")[2]
        gpus += [
            Gpu(
                id=f"{node[:96]}/{kind}-{number}",
                model=each.model,
                memory_bytes=each.memory_bytes,
                island=first if joined else first + number,
                profile=each.profile,
            )
            for number in range(each.units)
        ]
    return tuple(gpus)


def resource_of_device(device: str) -> str | None:
    """Return the resource that a pod asks for to get a device of `devices_of`; none for one that only DRA hands out."""
    kind = DEVICE.fullmatch(device)
    if kind is not None:
        return f"{DOMAIN}/{kind[1]}"
    return None if DRA_DEVICE.match(device) else GPU


def unhealthy(capacity: Mapping[str, str], allocatable: Mapping[str, str]) -> str:
    """Return which GPUs the device plugin has, but does not offer, in words; empty if it offers all."""
    names = [name for name in capacity if name in (GPU, GPU + SHARED) or name.startswith(MIG)]
    missing = {name: read_count(capacity[name]) - read_count(allocatable.get(name, "0")) for name in names}
    return "; ".join(
        f"{count} of {read_count(capacity[name])} {name} are unhealthy"
        for name, count in sorted(missing.items())
        if count > 0
    )


# ---------------------------------------------------------------------------------------------------- DRA


def dra_devices(slices: Iterable[Mapping[str, Any]]) -> dict[str, tuple[Gpu, ...]]:
    """Return the GPUs that ResourceSlices of NVIDIA's DRA driver offer, by node.

    Of each pool only the newest generation counts. A MIG device that is still to be cut from a GPU is not counted: its
    GPU is.
    """
    specs = [each["spec"] for each in slices if each.get("spec", {}).get("driver") == DRA_DRIVER]
    newest: dict[str, int] = {}
    for spec in specs:
        pool = spec["pool"]
        newest[pool["name"]] = max(newest.get(pool["name"], 0), pool.get("generation", 0))
    found: dict[str, list[Gpu]] = {}
    for spec in specs:
        if spec.get("nodeName") and spec["pool"].get("generation", 0) == newest[spec["pool"]["name"]]:
            there = found.setdefault(spec["nodeName"], [])
            for device in spec.get("devices") or ():
                if (gpu := _dra_device(spec["nodeName"], device, island=len(there))) is not None:
                    there.append(gpu)
    return {node: tuple(gpus) for node, gpus in found.items() if gpus}


def _dra_device(node: str, device: Mapping[str, Any], *, island: int) -> Gpu | None:
    device = device.get("basic") or device
    attributes = {name: _value(each) for name, each in (device.get("attributes") or {}).items()}
    kind = attributes.get("type", "gpu")
    if kind not in ("gpu", "mig") or (kind == "mig" and device.get("consumesCounters")):
        return None
    model = str(attributes.get("productName", ""))
    memory = ((device.get("capacity") or {}).get("memory") or {}).get("value", "0")
    profile = str(attributes["profile"])[:64] if kind == "mig" and attributes.get("profile") else None
    return Gpu(
        id=str(attributes.get("uuid") or f"{node[:96]}/dra-{device.get('name', island)}")[:128],
        model=model,
        memory_bytes=min(read_count(memory), MOST_BYTES),
        island=0 if profile is None and NVLINKED.search(model) else island,
        profile=profile,
    )


def _value(attribute: Mapping[str, Any]) -> Any:
    return next(iter(attribute.values()), None)
