"""The NVIDIA cards of this machine and their MIG slices, as NVML tells of them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from falaj.drivers.machine.files import number
from falaj.drivers.machine.nvlink import find_islands, links_up
from falaj.drivers.machine.nvml import Load, ask, load, pci_address, session, text
from falaj.records.scheduling.hardware import GpuCard, MigSlice
from falaj.records.scheduling.snapshot import Gpu

MIB = 2**20
MOST_SLICES = 8


@dataclass(frozen=True)
class Cards:
    """What was found; `fault` says why some or all are missing, empty if none is."""

    cards: tuple[GpuCard, ...] = ()
    driver: str = ""
    fault: str = ""


def find_cards(*, root: Path = Path("/"), load: Load = load) -> Cards:
    """Every card in the order of the bus, those of one NVLink island side by side."""
    try:
        nvml = load()
    except ImportError:
        return Cards(fault="nvidia-ml-py is not installed")
    try:
        with session(nvml):
            return list_cards(nvml, root)
    except nvml.NVMLError as error:
        return Cards(fault=f"NVML does not answer: {error}")


def gpus_of(cards: tuple[GpuCard, ...]) -> tuple[Gpu, ...]:
    """What can be handed out. No slice is joined with another, so each is an island of its own."""
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


def list_cards(nvml: Any, root: Path) -> Cards:
    """A card that fails is left out."""
    handles, cards, faults = [], [], []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            card = describe(nvml, handle, index, root)
        except nvml.NVMLError as error:
            faults.append(f"GPU {index}: {error}")
            continue
        if card.is_sliced and not card.slices:
            faults.append(f"GPU {index} is in MIG mode, and has no slices")
        handles.append(handle)
        cards.append(card)
    islands = find_islands(nvml, handles, [card.pci_address or "" for card in cards])
    placed = [card.model_copy(update={"island": island}) for card, island in zip(cards, islands, strict=True)]
    placed.sort(key=lambda card: (card.island, card.index))
    return Cards(tuple(placed), text(ask(nvml, "nvmlSystemGetDriverVersion")), "; ".join(faults))


def describe(nvml: Any, handle: Any, index: int, root: Path) -> GpuCard:
    capability = ask(nvml, "nvmlDeviceGetCudaComputeCapability", handle)
    pci = ask(nvml, "nvmlDeviceGetPciInfo", handle)
    address = None if pci is None else pci_address(text(pci.busId))
    modes = ask(nvml, "nvmlDeviceGetMigMode", handle)
    is_sliced = modes is not None and modes[0] == nvml.NVML_DEVICE_MIG_ENABLE
    return GpuCard(
        id=text(nvml.nvmlDeviceGetUUID(handle)),
        index=index,
        model=text(nvml.nvmlDeviceGetName(handle)),
        memory_bytes=memory_of(nvml, handle),
        compute_capability=None if capability is None else ".".join(map(str, capability)),
        pci_address=address,
        pcie_generation=ask(nvml, "nvmlDeviceGetMaxPcieLinkGeneration", handle),
        pcie_width=ask(nvml, "nvmlDeviceGetCurrPcieLinkWidth", handle),
        numa_node=None if address is None else number(root / f"sys/bus/pci/devices/{address}/numa_node"),
        nvlinks=len(links_up(nvml, handle)),
        is_sliced=is_sliced,
        slices=slices_of(nvml, handle) if is_sliced else (),
        counts_energy=ask(nvml, "nvmlDeviceGetTotalEnergyConsumption", handle) is not None,
    )


def memory_of(nvml: Any, handle: Any) -> int:
    """Nothing where the card has none of its own, but that of the CPUs; a card that is lost says something else."""
    try:
        return int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    except nvml.NVMLError as error:
        if "Not Supported" in str(error):
            return 0
        raise


def slices_of(nvml: Any, handle: Any) -> tuple[MigSlice, ...]:
    """The slices that the card is cut into now."""
    found = []
    for index in range(ask(nvml, "nvmlDeviceGetMaxMigDeviceCount", handle) or MOST_SLICES):
        part = ask(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", handle, index)
        uuid = text(ask(nvml, "nvmlDeviceGetUUID", part)) if part is not None else ""
        memory = ask(nvml, "nvmlDeviceGetMemoryInfo", part) if uuid else None
        if memory is not None:
            found.append(MigSlice(id=uuid, profile=profile(nvml, part), memory_bytes=memory.total))
    return tuple(found)


def profile(nvml: Any, part: Any) -> str:
    """What the slice was cut by, like 1g.18gb: from its name, or else from its measures."""
    named = re.search(r" MIG (\S+)$", text(ask(nvml, "nvmlDeviceGetName", part)))
    if named:
        return named[1]
    told = ask(nvml, "nvmlDeviceGetAttributes", part)
    if told is None:
        return "unknown"
    whole, computing = told.gpuInstanceSliceCount, told.computeInstanceSliceCount
    prefix = "" if computing == whole else f"{computing}c."
    return f"{prefix}{whole}g.{math.ceil(told.memorySizeMB / 1024)}gb"
