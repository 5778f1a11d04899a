"""Metrics of the machine that a run is on, sampled in the background under MLflow's names: `system/…`."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from itertools import count

from falaj.errors import FalajError
from falaj.governance.operations.caller import start_thread
from falaj.ports.machine.hardware import NodeTelemetry

log = logging.getLogger("falaj.runs")
MEGABYTE = 1e6
STOP_S = 5.0
"""How long the end of a run waits for a sample that is being logged."""
TICK_S, MOST_TICKS = 0.01, 20
"""The kernel counts the time of CPUs in ticks; a run that ends before the next one waits for it, at most so many."""


class SystemSampler:
    """Samples a machine until it is stopped. A sample that cannot be logged is left out: the run goes on."""

    def __init__(
        self,
        log_sample: Callable[[int, Mapping[str, float]], None],
        *,
        every: timedelta,
        read: Callable[[], NodeTelemetry] | None = None,
    ) -> None:
        self._log_sample = log_sample
        self._every_s = every.total_seconds()
        self._read = read or _read_machine()
        self._stopped = threading.Event()
        self._thread = start_thread(self._run, name="system-metrics")

    def stop(self) -> None:
        """Log a last sample, and stop."""
        self._stopped.set()
        self._thread.join(STOP_S)

    def _run(self) -> None:
        try:
            before = self._read()
            for step in count():
                is_last = self._stopped.wait(self._every_s)
                now = self._read_after(before)
                self._log(step, system_metrics(before, now))
                before = now
                if is_last:
                    return
        except OSError as error:
            log.warning("system metrics ended", extra={"reason": str(error)})

    def _read_after(self, before: NodeTelemetry) -> NodeTelemetry:
        """Return a report from which the use of the CPUs since `before` can be told, if the machine tells any."""
        for _ in range(MOST_TICKS):
            now = self._read()
            if not now.cpu_s or _cpu(before, now):
                break
            time.sleep(TICK_S)
        return now

    def _log(self, step: int, sample: Mapping[str, float]) -> None:
        try:
            if sample:
                self._log_sample(step, sample)
        except FalajError as error:
            log.warning("system metrics were not logged", extra={"reason": error.message})


def system_metrics(before: NodeTelemetry, now: NodeTelemetry) -> dict[str, float]:
    """Return the metrics of the time between two reports; what the machine does not tell is left out."""
    found = _cpu(before, now) | _memory(now) | _traffic(before, now) | _disks(now)
    for number, gpu in enumerate(now.gpus):
        found |= _gpu(number, gpu.busy, gpu.memory_used_bytes, gpu.memory_total_bytes, gpu.power_w)
    return {f"system/{name}": value for name, value in found.items()}


def _cpu(before: NodeTelemetry, now: NodeTelemetry) -> dict[str, float]:
    spent = {mode: seconds - before.cpu_s.get(mode, 0.0) for mode, seconds in now.cpu_s.items()}
    total = sum(spent.values())
    idle = spent.get("idle", 0.0) + spent.get("iowait", 0.0)
    return {"cpu_utilization_percentage": 100 * (1 - idle / total)} if total > 0 else {}


def _memory(now: NodeTelemetry) -> dict[str, float]:
    total, free = now.memory_total_bytes, now.memory_available_bytes
    if not total or free is None:
        return {}
    used = total - free
    return {
        "system_memory_usage_megabytes": used / MEGABYTE,
        "system_memory_usage_percentage": 100 * used / total,
    }


def _traffic(before: NodeTelemetry, now: NodeTelemetry) -> dict[str, float]:
    """Return the bytes of all adapters and of all disks since the report before."""
    found = {}
    for name, direction, totals, earlier in (
        ("network_receive_megabytes", "received", now.network_bytes, before.network_bytes),
        ("network_transmit_megabytes", "sent", now.network_bytes, before.network_bytes),
        ("disk_read_megabytes", "read", now.disk_bytes, before.disk_bytes),
        ("disk_write_megabytes", "written", now.disk_bytes, before.disk_bytes),
    ):
        moved = [value - earlier.get(key, value) for key, value in totals.items() if key[1] == direction]
        if moved:
            found[name] = sum(moved) / MEGABYTE
    return found


def _disks(now: NodeTelemetry) -> dict[str, float]:
    """Return the use of the first volume, which is the one that the process works on."""
    for total, free in now.volumes.values():
        return {
            "disk_usage_megabytes": (total - free) / MEGABYTE,
            "disk_usage_percentage": 100 * (total - free) / total if total else 0.0,
            "disk_available_megabytes": free / MEGABYTE,
        }
    return {}


def _gpu(
    number: int, busy: float | None, used: int | None, total: int | None, power_w: float | None
) -> dict[str, float]:
    known = {
        "utilization_percentage": None if busy is None else 100 * busy,
        "memory_usage_megabytes": None if used is None else used / MEGABYTE,
        "memory_usage_percentage": 100 * used / total if used is not None and total else None,
        "power_usage_watts": power_w,
    }
    return {f"gpu_{number}_{name}": value for name, value in known.items() if value is not None}


def _read_machine() -> Callable[[], NodeTelemetry]:
    from falaj.assembly.machine_telemetry import (
        read_here,
    )  # loaded by runs that sample, and by no other client

    return read_here
