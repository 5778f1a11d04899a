"""The loader interface, and loaders without worker processes."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from torch import Tensor

from falaj.training.runtime.data.batches import BatchPlan
from falaj.training.runtime.step.micro_batches import MicroBatch, MicroBatchReader


class BatchLoader(Protocol):
    """Provides the micro-batches of each step. Any step can be requested; consecutive steps are expected."""

    @property
    def waited_s(self) -> float:
        """Seconds spent waiting for data."""

    @property
    def reading_s(self) -> float:
        """Seconds of reading in any process; what was not waited for overlapped with computation."""

    def take(self, step: int, indices: Tensor) -> list[MicroBatch]:
        """Return the micro-batches of `step`, whose global batch is `indices`."""

    def prefetch_next(self, step: int) -> None:
        """Prefetch the step after `step`, which is being computed."""

    def close(self) -> None:
        """Stop reading, and end the threads and processes of the loader."""


class InlineLoader:
    """Reads on request, which is best for tensors: copying them is faster than handing them over."""

    def __init__(self, reader: MicroBatchReader) -> None:
        self._reader = reader
        self.waited_s = 0.0

    @property
    def reading_s(self) -> float:
        return self.waited_s

    def take(self, step: int, indices: Tensor) -> list[MicroBatch]:
        began = time.perf_counter()
        parts = self._reader.read(step, indices)
        self.waited_s += time.perf_counter() - began
        return parts

    def prefetch_next(self, step: int) -> None:
        return

    def close(self) -> None:
        return


class ThreadLoader:
    """A thread that reads ahead while a step is computed, for memory-mapped files, which release the GIL.

    Only for sources without random numbers: the thread would share the generators of the model.
    """

    def __init__(self, reader: MicroBatchReader, batches: BatchPlan, *, last: int, ahead: int) -> None:
        self._reader, self._batches, self._last, self._ahead = reader, batches, last, ahead
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="falaj-data")
        self._pending: dict[tuple[int, int], Future[list[MicroBatch]]] = {}
        self.waited_s = self.reading_s = 0.0

    def take(self, step: int, indices: Tensor) -> list[MicroBatch]:
        began, cut = time.perf_counter(), self._reader.count
        found = self._pending.pop((step, cut), None) or self._thread.submit(self._read, step, indices)
        wanted = [(after, cut) for after in range(step + 1, min(step + self._ahead, self._last) + 1)]
        self._pending = {
            key: self._pending.get(key) or self._thread.submit(self._read, key[0], None) for key in wanted
        }
        parts = found.result()
        self.waited_s += time.perf_counter() - began
        return parts

    def prefetch_next(self, step: int) -> None:
        return

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _read(self, step: int, indices: Tensor | None) -> list[MicroBatch]:
        began = time.perf_counter()
        parts = self._reader.read(step, self._batches.indices(step) if indices is None else indices)
        self.reading_s += time.perf_counter() - began
        return parts
