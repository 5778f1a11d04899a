"""The energy that cards take, as NVML counts it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from falaj.drivers.machine.nvml import Load, load, query
from falaj.drivers.processes.metering.counters import CounterDelta

MILLI = 1e-3


class GpuEnergy:
    """Joules of some cards and slices, from now until `close`. Cards since Volta count.

    A slice is charged with its part of the card's memory: the card counts as a whole.
    """

    def __init__(self, uuids: Sequence[str], *, load: Load = load) -> None:
        self._nvml: Any = None
        self._counted: list[tuple[CounterDelta, float]] = []
        self.is_there = False
        try:
            nvml = load()
            nvml.nvmlInit()
        except Exception:  # no library, or no driver: then it cannot be known, and nothing else depends on it
            return
        self._nvml = nvml
        self._counted = [counted for uuid in uuids if (counted := self._counter(uuid)) is not None]
        self.is_there = len(self._counted) == len(uuids) and all(each.is_there for each, _ in self._counted)

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

    def more_j(self) -> float:
        """Since the last look."""
        return sum(counted.more() * share for counted, share in self._counted) * MILLI

    def close(self) -> None:
        if self._nvml is not None:
            query(self._nvml, "nvmlShutdown")
            self._nvml, self._counted = None, []


def memory_share(nvml: Any, part: Any, card: Any) -> float:
    """The part's memory of the card's; all of it where NVML does not say."""
    own, whole = query(nvml, "nvmlDeviceGetMemoryInfo", part), query(nvml, "nvmlDeviceGetMemoryInfo", card)
    return 1.0 if own is None or whole is None else min(1.0, own.total / whole.total)
