"""Copies the state of a run aside while it goes on: whatever a step may change is copied before it does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from falaj.training.runtime.checkpointing.storage.arena import StagedCopy


class Staging:
    """Copies under way. `finish` runs in the thread that writes; the loop calls `wait` before the next update."""

    def __init__(self, now: Sequence[StagedCopy], later: Sequence[StagedCopy], device: torch.device) -> None:
        """`now` are copied before this returns, or before the device does anything else; `later` until `wait`."""
        self._later: Sequence[StagedCopy] = later
        self._done = threading.Event()
        self._finish: Callable[[], None] = self._copy_later
        self.wait: Callable[[], None] = self._wait_for_thread
        if device.type == "cuda":
            self._copy_beside(now, later, device)
            return
        if device.type != "cpu":  # what other threads may do there is not known
            now, self._later = [*now, *later], ()
        for each in now:
            each.copy()

    def finish(self) -> None:
        """Return when everything is copied."""
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
        """On a stream of its own, for which the stream of the steps waits where it must; the CPU waits for neither."""
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
