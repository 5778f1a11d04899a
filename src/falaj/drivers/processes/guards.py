"""Watches over what an attempt may use while it runs: life, disk and processes. Each says why it has to end."""

from __future__ import annotations

import os
from typing import NamedTuple

from falaj.drivers.processes import hang, inside
from falaj.drivers.processes.counting import TaskCount, unlinked_bytes
from falaj.drivers.processes.disk import measure
from falaj.drivers.processes.folder import Folder
from falaj.drivers.processes.order import Order
from falaj.drivers.processes.quota import Measuring, Quota, Shortage
from falaj.drivers.processes.stopping import Cause

TASKS = 1024
TASKS_PER_CORE = 16
"""Of each process: libraries make pools of threads as large as the machine, whatever share of it they have."""


class Alarm(NamedTuple):
    cause: Cause
    why: str


class Guards:
    """All that is looked at from time to time; `now` is a reading of one monotonic clock."""

    def __init__(self, folder: Folder, order: Order, *, now: float) -> None:
        launch = order.launch
        self._heartbeats = launch.directory / hang.HEARTBEAT
        self._silence = None if launch.hang_s is None else hang.Silence(launch.hang_s, now=now)
        self._beats_at = now
        self.silent: list[int] = []
        self._device = launch.directory.stat().st_dev
        self._given = measure(launch.directory)  # its code and inputs, for which it is not to blame
        self._measuring = Measuring(launch.directory)
        self._quota = None if launch.disk_bytes is None else Quota(launch.disk_bytes)
        self._shortage = Shortage(folder, launch.directory, reserve_bytes=order.reserve_bytes)
        self.most_tasks = most_tasks(order)
        self._tasks = TaskCount(self.most_tasks)

    def heard(self, now: float) -> None:
        """Something was printed."""
        if self._silence is not None:
            self._silence.heard(now)

    def look(self, now: float) -> Alarm | None:
        """Whatever is due for a look; none: it may go on."""
        return self._look_for_life(now) or self._look_at_tasks(now) or self._look_at_disk(now)

    def _look_for_life(self, now: float) -> Alarm | None:
        if self._silence is None or now < self._beats_at:
            return None
        self._beats_at = now + hang.LOOK_S
        self._silence.look(hang.beats(self._heartbeats), now)
        silent = self._silence.silent(now)
        if silent and (living := living_ranks()):
            self._silence.void(set(silent) - living)
            silent = self._silence.silent(now)
        if silent is None:
            return None
        self.silent = silent
        return Alarm("hung", "")

    def _look_at_tasks(self, now: float) -> Alarm | None:
        count = self._tasks.look(now)
        if count is None:
            return None
        return Alarm(
            "fault",
            f"it started too many processes: {count} with their threads, of at most {self.most_tasks}",
        )

    def _look_at_disk(self, now: float) -> Alarm | None:
        self._shortage.look(now)
        if self._quota is None and not self._shortage.is_short:
            return None
        usage = self._measuring.advance(now)
        if usage is None:
            return None
        usage.leave_out(self._given)
        usage.hold(unlinked_bytes(os.getpid(), self._device))
        fault = self._quota.fault(usage) if self._quota else None
        if fault is None and self._shortage.is_short:
            fault = self._shortage.fault(usage)
        return None if fault is None else Alarm("fault", fault)


def living_ranks() -> set[int]:
    """The numbers of the ranks that live, as far as processes have them in their environment."""
    return {rank for pid in inside.descendants() if (rank := inside.rank_of(pid)) is not None}


def most_tasks(order: Order) -> int:
    usual = TASKS + TASKS_PER_CORE * (os.cpu_count() or 1) * order.launch.processes
    return usual if order.most_tasks is None else order.most_tasks
