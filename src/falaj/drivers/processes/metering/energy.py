"""The energy that CPUs and GPUs use, from the counters of RAPL and NVML."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from falaj.drivers.machine.kernel_files import list_entries, read_number, read_text
from falaj.drivers.machine.nvml import Load, load, query

CLASS = "sys/class/powercap"
MICRO = 1e-6
MILLI = 1e-3


class CpuEnergy:
    """The energy of all CPU packages and their memory in joules, by RAPL. Most systems permit only root to read it."""

    def __init__(self, root: Path) -> None:
        self._zones = [
            CounterDelta(
                partial(read_number, zone / "energy_uj"), limit=read_number(zone / "max_energy_range_uj")
            )
            for zone in list_entries(root / CLASS)
            if is_counted(zone)
        ]
        self.is_available = bool(self._zones) and all(zone.is_available for zone in self._zones)

    def read_j(self) -> float:
        """Return the energy since the last call. Counters wrap within minutes on a busy machine."""
        return sum(zone.advance() for zone in self._zones) * MICRO


def is_counted(zone: Path) -> bool:
    """Return whether to count a zone: packages and memory. Cores are part of packages, and psys includes all."""
    name = read_text(zone / "name")
    if re.fullmatch(r"intel-rapl:\d+", zone.name):
        return name.startswith("package")
    return bool(re.fullmatch(r"intel-rapl:\d+:\d+", zone.name)) and name == "dram"


class GpuEnergy:
    """The energy of some cards and MIG slices in joules, by NVML, until `close`. Supported since Volta.

    Cards count as a whole: a slice is charged with its fraction of the card's memory.
    """

    def __init__(self, uuids: Sequence[str], *, load: Load = load) -> None:
        self._nvml: Any = None
        self._counted: list[tuple[CounterDelta, float]] = []
        self.is_available = False
        try:
            nvml = load()
            nvml.nvmlInit()
        except Exception:  # no library or no driver: energy is not available
            return
        self._nvml = nvml
        self._counted = [counted for uuid in uuids if (counted := self._counter(uuid)) is not None]
        self.is_available = len(self._counted) == len(uuids) and all(
            each.is_available for each, _ in self._counted
        )

    def _counter(self, uuid: str) -> tuple[CounterDelta, float] | None:
        nvml = self._nvml
        found = query(nvml, "nvmlDeviceGetHandleByUUID", uuid)
        if found is None:
            return None
        card, share = found, 1.0
        if uuid.startswith("MIG-"):
            card = query(nvml, "nvmlDeviceGetDeviceHandleFromMigDeviceHandle", found)
            share = memory_share(nvml, found, card)
        return CounterDelta(lambda: query(nvml, "nvmlDeviceGetTotalEnergyConsumption", card)), share

    def read_j(self) -> float:
        """Return the energy since the last call."""
        return sum(counted.advance() * share for counted, share in self._counted) * MILLI

    def close(self) -> None:
        if self._nvml is not None:
            query(self._nvml, "nvmlShutdown")
            self._nvml, self._counted = None, []


def memory_share(nvml: Any, part: Any, card: Any) -> float:
    """Return the fraction of the card's memory that a slice has; 1 if NVML does not say."""
    own, whole = query(nvml, "nvmlDeviceGetMemoryInfo", part), query(nvml, "nvmlDeviceGetMemoryInfo", card)
    return 1.0 if own is None or whole is None else min(1.0, own.total / whole.total)


class CounterDelta:
    """The increments of a counter since it was first read.

    `limit` is where it wraps to zero; none: it never wraps, and a smaller value means that it was reset.
    """

    def __init__(self, read: Callable[[], int | None], *, limit: int | None = None) -> None:
        self._read, self._limit = read, limit
        self._last = read()
        self.is_available = self._last is not None

    def advance(self) -> int:
        """Return the increment since the last call; 0 while the counter cannot be read."""
        now, last = self._read(), self._last
        if now is None or last is None:
            return 0
        self._last = now
        if now >= last:
            return now - last
        return now + (self._limit - last if self._limit else 0)
