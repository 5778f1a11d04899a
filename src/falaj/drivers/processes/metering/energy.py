"""The energy that the CPUs and their memory take, as the processors count it (RAPL)."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

from falaj.drivers.machine.kernel_files import list_entries, read_number, read_text

CLASS = "sys/class/powercap"
MICRO = 1e-6


class CpuEnergy:
    """Joules of all packages, and of the memory beside them. Most systems let only root read it."""

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
        """Since the last look. A counter wraps within minutes on a busy machine, so look more often than that."""
        return sum(zone.advance() for zone in self._zones) * MICRO


def is_counted(zone: Path) -> bool:
    """Packages, and the memory, which lies outside of them; cores lie inside, and psys counts everything again."""
    name = read_text(zone / "name")
    if re.fullmatch(r"intel-rapl:\d+", zone.name):
        return name.startswith("package")
    return bool(re.fullmatch(r"intel-rapl:\d+:\d+", zone.name)) and name == "dram"
