"""Copy the state of a run while it continues: everything is copied before a step changes it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from falaj.training.runtime.checkpointing.storage.arena import StagedCopy


class Staging:
    """Pending copies. `finish` runs in the writer thread; the loop calls `wait` before the next update."""

    def __init__(self, now: Sequence[StagedCopy], later: Sequence[StagedCopy], device: torch.device) -> None:
        """`now` is copied before this returns, or before later work of the device; `later` before `wait` returns."""
        self._later: Sequence[StagedCopy] = later
        self._done = threading.Event()
        self._finish: Callable[[], None] = self._copy_later
        self.wait: Callable[[], None] = self._wait_for_thread
        if device.type == "cuda":
            self._copy_beside(now, later, device)
            return
        if device.type != "cpu":  # thread safety of other devices is unknown
            now, self._later = [*now, *later], ()
        for each in now:
            each.copy()

    def finish(self) -> None:
        """Wait until everything is copied."""
        try:
            self._finish()
        finally:
            self._done.set()

    def _copy_later(self) -> None:
        for each in self._later:
            each.copy()

    def _wait_for_thread(self) -> None:
        self._done.wait()

    def _copy_beside(
        self, now: Sequence[StagedCopy], later: Sequence[StagedCopy], device: torch.device
    ) -> None:
        """Copy on a separate stream, for which the compute stream waits where needed; the CPU does not wait."""
        steps, beside = torch.cuda.current_stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        beside.wait_stream(steps)
        with torch.cuda.stream(beside):
            for each in now:
                each.copy(non_blocking=True)
            steps.wait_event(beside.record_event())
            for each in later:
                each.copy(non_blocking=True)
            copied = beside.record_event()
        self._finish = copied.synchronize
        self.wait = lambda: steps.wait_event(copied)
