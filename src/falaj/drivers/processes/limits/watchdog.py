"""Checks a running attempt for hangs, its number of tasks and its disk usage, and says why it must end."""

from __future__ import annotations

import os
from typing import NamedTuple

from falaj.drivers.processes.attempt_folder import AttemptFolder
from falaj.drivers.processes.attempt_spec import AttemptSpec
from falaj.drivers.processes.diagnosis import heartbeats
from falaj.drivers.processes.limits.disk_quota import DiskPressure, DiskQuota, UsageScan
from falaj.drivers.processes.limits.disk_usage import measure_usage
from falaj.drivers.processes.limits.tasks import TaskLimit, unlinked_bytes
from falaj.drivers.processes.sandbox_init import init
from falaj.drivers.processes.supervisor.termination import StopCause

DEFAULT_TASKS = 1024
TASKS_PER_CORE = 16
"""Per process: libraries size their thread pools by the machine, whatever share of it they have."""


class WatchdogAlarm(NamedTuple):
    """Why an attempt must end."""

    cause: StopCause
    why: str


class AttemptWatchdog:
    """All periodic checks of one attempt. Every `now` is a reading of one monotonic clock."""

    def __init__(self, folder: AttemptFolder, spec: AttemptSpec, *, now: float) -> None:
        launch = spec.launch
        self._heartbeats = launch.directory / heartbeats.FOLDER
        self._heartbeat_monitor = (
            None if launch.hang_s is None else heartbeats.HeartbeatMonitor(launch.hang_s, now=now)
        )
        self._beats_at = now
        self.silent_ranks: list[int] = []
        self._device = launch.directory.stat().st_dev
        self._initial_usage = measure_usage(
            launch.directory
        )  # its code and inputs, which the quota does not count
        self._usage_scan = UsageScan(launch.directory)
        self._quota = None if launch.disk_bytes is None else DiskQuota(launch.disk_bytes)
        self._disk_pressure = DiskPressure(folder, launch.directory, reserve_bytes=spec.reserve_bytes)
        self.max_tasks = task_limit(spec)
        self._tasks = TaskLimit(self.max_tasks)

    def record_output(self, now: float) -> None:
        """Record that the attempt has printed something, which counts as a sign of life."""
        if self._heartbeat_monitor is not None:
            self._heartbeat_monitor.record_output(now)

    def check(self, now: float) -> WatchdogAlarm | None:
        """Run the checks that are due. Return an alarm if the attempt must end."""
        return self._look_for_life(now) or self._look_at_tasks(now) or self._look_at_disk(now)

    def _look_for_life(self, now: float) -> WatchdogAlarm | None:
        if self._heartbeat_monitor is None or now < self._beats_at:
            return None
        self._beats_at = now + heartbeats.CHECK_INTERVAL_S
        self._heartbeat_monitor.check(heartbeats.read_heartbeats(self._heartbeats), now)
        silent_ranks = self._heartbeat_monitor.silent_ranks(now)
        if silent_ranks and (living := living_ranks()):
            self._heartbeat_monitor.discard(set(silent_ranks) - living)
            silent_ranks = self._heartbeat_monitor.silent_ranks(now)
        if silent_ranks is None:
            return None
        self.silent_ranks = silent_ranks
        return WatchdogAlarm("hung", "")

    def _look_at_tasks(self, now: float) -> WatchdogAlarm | None:
        count = self._tasks.check(now)
        if count is None:
            return None
        return WatchdogAlarm(
            "fault",
            f"it started too many processes: {count} with their threads, of at most {self.max_tasks}",
        )

    def _look_at_disk(self, now: float) -> WatchdogAlarm | None:
        self._disk_pressure.check(now)
        if self._quota is None and not self._disk_pressure.is_short:
            return None
        usage = self._usage_scan.advance(now)
        if usage is None:
            return None
        usage.subtract(self._initial_usage)
        usage.add_unlinked(unlinked_bytes(os.getpid(), self._device))
        fault = self._quota.fault(usage) if self._quota else None
        if fault is None and self._disk_pressure.is_short:
            fault = self._disk_pressure.fault(usage)
        return None if fault is None else WatchdogAlarm("fault", fault)


def living_ranks() -> set[int]:
    """Return the ranks of living processes that have a rank in their environment."""
    return {rank for pid in init.descendants() if (rank := init.rank_of(pid)) is not None}


def task_limit(spec: AttemptSpec) -> int:
    usual = DEFAULT_TASKS + TASKS_PER_CORE * (os.cpu_count() or 1) * spec.launch.processes
    return usual if spec.max_tasks is None else spec.max_tasks
