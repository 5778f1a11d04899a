"""Measures the CPU time, memory and energy of an attempt, sampled by its supervisor."""

from __future__ import annotations

import os
import re
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

from falaj.drivers.machine.kernel_files import read_number, read_text
from falaj.drivers.processes.metering import process_tree
from falaj.drivers.processes.metering.energy import CounterDelta, CpuEnergy, GpuEnergy
from falaj.ports.launcher import WHOLE_GPU, AttemptUsage, Launch

INTERVAL_S = 1.0
FIRST_INTERVAL_S = 0.05
PAUSE_FACTOR = 100
"""The pause after a sample, at least, as a multiple of its duration: reading the state of much memory takes long."""

KIB = 1024 if sys.platform == "linux" else 1  # the unit of ru_maxrss


class ResourceMeter:
    """The usage of all descendants of this process, from now on.

    `group` is their cgroup (v2), which counts exactly. Without one they are sampled: peaks between two samples are
    missed, except for that of the largest process, which the kernel records.
    """

    def __init__(
        self,
        launch: Launch,
        *,
        group: Path | None = None,
        root: Path = Path("/"),
        gpu_energy: Callable[..., GpuEnergy] = GpuEnergy,
    ) -> None:
        self._launch, self._group, self._root = launch, group, root
        self._open_gpus = gpu_energy
        self._gpus: GpuEnergy | None = None
        self._cpus = CpuEnergy(root)
        self._busy = CounterDelta(lambda: process_tree.busy_ticks(root))
        self._reaped_before_s = reaped_cpu_s()
        self._cpu_s = self._charged_cpu_s = 0.0
        self._peak_bytes = 0
        self.held_bytes = 0
        """What they held at the last sample and cannot be dropped, without a cgroup: a file that is read can be."""
        self._cpu_j = self._gpu_j = 0.0
        self._pause_s = FIRST_INTERVAL_S
        self._next_at = 0.0

    def sample(self) -> None:
        """Take a sample if one is due. May be called at any rate."""
        began = time.monotonic()
        if began < self._next_at:
            return
        self._sample()
        took = time.monotonic() - began
        self._pause_s = min(INTERVAL_S, self._pause_s * 2)
        self._next_at = began + max(self._pause_s, took * PAUSE_FACTOR)

    def used(self) -> AttemptUsage:
        """Return the usage so far. Call it once more when all processes were reaped, and then `close`."""
        self._sample()
        return AttemptUsage(
            cpu_s=round(self._cpu_s, 3),
            peak_memory_bytes=self._peak_bytes or None,
            cpu_energy_j=round(self._cpu_j, 3) if self._cpus.is_available else None,
            gpu_energy_j=self._gpu_energy_j(),
        )

    def close(self) -> None:
        if self._gpus is not None:
            self._gpus.close()

    def _sample(self) -> None:
        if self._launch.gpus and self._gpus is None:  # opened late, since it would delay the start
            self._gpus = self._open_gpus(self._launch.gpus)
        processes = (
            {} if self._is_counted_by_group() else process_tree.descendants(os.getpid(), root=self._root)
        )
        self._cpu_s = max(self._cpu_s, self._cpu_now_s(processes))
        memory = process_tree.measure_memory(processes, root=self._root)
        self.held_bytes = memory.held_bytes
        self._peak_bytes = max(self._peak_bytes, self._memory_now_bytes(memory.total_bytes))
        self._charge()

    def _is_counted_by_group(self) -> bool:
        """Return whether the cgroup has the memory controller."""
        return self._group is not None and read_number(self._group / "memory.current") is not None

    def _cpu_now_s(self, processes: dict[int, process_tree.ProcessStat]) -> float:
        """Return the higher of two counts: the cgroup misses what ran before it was entered."""
        seen = reaped_cpu_s() - self._reaped_before_s + process_tree.cpu_s(processes)
        return max(seen, cgroup_cpu_s(self._group))

    def _memory_now_bytes(self, seen_bytes: int) -> int:
        if self._group is not None:
            peak = read_number(self._group / "memory.peak")  # not before Linux 5.19
            held = read_number(self._group / "memory.current") if peak is None else peak
            if held is not None:
                return held
        largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * KIB
        return max(largest, seen_bytes)

    def _charge(self) -> None:
        """Charge the attempt with energy in proportion to its part of the busy CPU time."""
        busy_s, own_s = self._busy.advance() / process_tree.TICKS, self._cpu_s - self._charged_cpu_s
        self._charged_cpu_s = self._cpu_s
        spent_j = self._cpus.read_j()
        if own_s > 0:
            self._cpu_j += spent_j * (1.0 if own_s >= busy_s else own_s / busy_s)
        if self._gpus is not None:
            self._gpu_j += self._gpus.read_j() * self._launch.gpu_milli / WHOLE_GPU

    def _gpu_energy_j(self) -> float | None:
        if not self._launch.gpus:
            return 0.0
        return round(self._gpu_j, 3) if self._gpus is not None and self._gpus.is_available else None


def reaped_cpu_s() -> float:
    """Return the CPU time of all reaped children of this process."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def cgroup_cpu_s(group: Path | None) -> float:
    """Return the CPU time of a cgroup; 0 where it is not counted."""
    text = "" if group is None else read_text(group / "cpu.stat")
    found = re.search(r"^usage_usec (\d+)$", text, re.MULTILINE)
    return int(found[1]) / 1e6 if found else 0.0
