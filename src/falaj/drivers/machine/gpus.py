"""The NVIDIA GPUs of this machine and their MIG slices, by NVML."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from falaj.drivers.machine.kernel_files import read_number
from falaj.drivers.machine.nvlink import find_islands, links_up
from falaj.drivers.machine.nvml import Load, load, pci_address, query, session, to_text
from falaj.records.scheduling.hardware import GpuCard, MigSlice
from falaj.records.scheduling.snapshot import Gpu

MIB = 2**20
MAX_SLICES = 8


@dataclass(frozen=True)
class GpuDiscovery:
    """The cards that were found. `fault` says why cards are missing, and is empty if none is."""

    cards: tuple[GpuCard, ...] = ()
    driver: str = ""
    fault: str = ""


def find_cards(*, root: Path = Path("/"), load: Load = load) -> GpuDiscovery:
    """Return all cards in bus order, with those of one NVLink island next to each other."""
    try:
        nvml = load()
    except ImportError:
        return GpuDiscovery(fault="nvidia-ml-py is not installed")
    try:
        with session(nvml):
            return list_cards(nvml, root)
    except nvml.NVMLError as error:
        return GpuDiscovery(fault=f"NVML failed: {error}")


def schedulable_gpus(cards: tuple[GpuCard, ...]) -> tuple[Gpu, ...]:
    """Return the schedulable devices. MIG slices have no NVLink, so that each is an island of its own."""
    gpus = [
        Gpu(id=card.id, model=card.model, memory_bytes=card.memory_bytes, island=card.island)
        for card in cards
        if not card.is_sliced
    ]
    island = max((gpu.island for gpu in gpus), default=-1)
    for card in cards:
        for each in card.slices:
            island += 1
            gpus.append(
                Gpu(
                    id=each.id,
                    model=card.model,
                    memory_bytes=each.memory_bytes,
                    island=island,
                    profile=each.profile,
                )
            )
    return tuple(gpus)


def list_cards(nvml: Any, root: Path) -> GpuDiscovery:
    """Return all cards that respond; a failed card is reported in `fault`."""
    handles, cards, faults = [], [], []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            card = describe_card(nvml, handle, index, root)
        except nvml.NVMLError as error:
            faults.append(f"GPU {index}: {error}")
            continue
        if card.is_sliced and not card.slices:
            faults.append(f"GPU {index} is in MIG mode and has no slices")
        handles.append(handle)
        cards.append(card)
    islands = find_islands(nvml, handles, [card.pci_address or "" for card in cards])
    placed = [card.model_copy(update={"island": island}) for card, island in zip(cards, islands, strict=True)]
    placed.sort(key=lambda card: (card.island, card.index))
    return GpuDiscovery(tuple(placed), to_text(query(nvml, "nvmlSystemGetDriverVersion")), "; ".join(faults))


def describe_card(nvml: Any, handle: Any, index: int, root: Path) -> GpuCard:
    capability = query(nvml, "nvmlDeviceGetCudaComputeCapability", handle)
    pci = query(nvml, "nvmlDeviceGetPciInfo", handle)
    address = None if pci is None else pci_address(to_text(pci.busId))
    modes = query(nvml, "nvmlDeviceGetMigMode", handle)
    is_sliced = modes is not None and modes[0] == nvml.NVML_DEVICE_MIG_ENABLE
    return GpuCard(
        id=to_text(nvml.nvmlDeviceGetUUID(handle)),
        index=index,
        model=to_text(nvml.nvmlDeviceGetName(handle)),
        memory_bytes=card_memory_bytes(nvml, handle),
        compute_capability=None if capability is None else ".".join(map(str, capability)),
        pci_address=address,
        pcie_generation=query(nvml, "nvmlDeviceGetMaxPcieLinkGeneration", handle),
        pcie_width=query(nvml, "nvmlDeviceGetCurrPcieLinkWidth", handle),
        numa_node=None if address is None else read_number(root / f"sys/bus/pci/devices/{address}/numa_node"),
        nvlinks=len(links_up(nvml, handle)),
        is_sliced=is_sliced,
        slices=list_slices(nvml, handle) if is_sliced else (),
        counts_energy=query(nvml, "nvmlDeviceGetTotalEnergyConsumption", handle) is not None,
    )


def card_memory_bytes(nvml: Any, handle: Any) -> int:
    """Return the memory of a card; 0 if it shares the CPU's memory. Raise if the card is lost."""
    try:
        return int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    except nvml.NVMLError as error:
        if "Not Supported" in str(error):
            return 0
        raise


def list_slices(nvml: Any, handle: Any) -> tuple[MigSlice, ...]:
    """Return the MIG slices of a card."""
    found = []
    for index in range(query(nvml, "nvmlDeviceGetMaxMigDeviceCount", handle) or MAX_SLICES):
        part = query(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", handle, index)
        uuid = to_text(query(nvml, "nvmlDeviceGetUUID", part)) if part is not None else ""
        memory = query(nvml, "nvmlDeviceGetMemoryInfo", part) if uuid else None
        if memory is not None:
            found.append(MigSlice(id=uuid, profile=slice_profile(nvml, part), memory_bytes=memory.total))
    return tuple(found)


def slice_profile(nvml: Any, part: Any) -> str:
    """Return the MIG profile, like 1g.18gb: from the name of the slice, or else from its attributes."""
    named = re.search(r" MIG (\S+)$", to_text(query(nvml, "nvmlDeviceGetName", part)))
    if named:
        return named[1]
    attributes = query(nvml, "nvmlDeviceGetAttributes", part)
    if attributes is None:
        return "unknown"
    whole, computing = attributes.gpuInstanceSliceCount, attributes.computeInstanceSliceCount
    prefix = "" if computing == whole else f"{computing}c."
    return f"{prefix}{whole}g.{math.ceil(attributes.memorySizeMB / 1024)}gb"
