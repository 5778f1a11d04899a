"""The micro-batches of one process, each with its position and its share of the global batch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

from falaj.training.runtime.data.sources import Batch, SampleSource
from falaj.training.runtime.errors import SampleUnreadable
from falaj.training.runtime.step.rng import derive_seed


class MicroBatch(NamedTuple):
    """`share` is its part of the global batch; 0 where a process has no samples but must take part."""

    place: int
    batch: Batch
    share: float


class MicroBatchIndices(NamedTuple):
    """The sample indices of a micro-batch that is not read yet."""

    place: int
    indices: Tensor
    share: float


class MicroBatchReader:
    """Splits each global batch into `count` micro-batches, and reads those of process `rank` of `size`.

    Random numbers of a micro-batch depend on its position only, so it is equal in every process.
    """

    def __init__(self, source: SampleSource, *, seed: int, count: int, rank: int = 0, size: int = 1) -> None:
        self.source, self.seed = source, seed
        self._rank, self._size = rank, size
        self._cut(-(-count // size) * size)

    def set_count(self, count: int) -> None:
        """Split each batch into `count` micro-batches from now on, rounded up to a multiple of the processes."""
        self._cut(-(-count // self._size) * self._size)

    def _cut(self, count: int) -> None:
        self.count, each = count, count // self._size
        self._places = range(self._rank * each, (self._rank + 1) * each)

    def split(self, indices: Tensor) -> Iterator[MicroBatchIndices]:
        """Yield this process's micro-batches of the global batch `indices`."""
        if self.count == 1:
            yield MicroBatchIndices(0, indices, 1.0)
            return
        samples, found = len(indices), 0
        for place in self._places:
            start, end = (samples * edge // self.count for edge in (place, place + 1))
            if start < end:
                found += 1
                yield MicroBatchIndices(place, indices[start:end], (end - start) / samples)
        if samples < self.count:  # processes with fewer must take part in collectives
            yield from [MicroBatchIndices(self._places[0], indices[:1], 0.0)] * (self._most(samples) - found)

    def _most(self, samples: int) -> int:
        """Return the largest number of non-empty micro-batches in any process."""
        edges = [samples * edge // self.count for edge in range(self.count + 1)]
        full = [start < end for start, end in pairwise(edges)]
        each = self.count // self._size
        return max(sum(full[first : first + each]) for first in range(0, self.count, each))

    def read(self, step: int, indices: Tensor) -> list[MicroBatch]:
        return [self.read_one(step, cut) for cut in self.split(indices)]

    def read_one(self, step: int, cut: MicroBatchIndices) -> MicroBatch:
        """Read a micro-batch. A sample that cannot be read is reported with its step."""
        place, indices, share = cut
        try:
            batch = self.source.read(indices, seed=derive_seed(b"read", self.seed, step, place))
        except SampleUnreadable as failure:
            failure.step = step
            raise
        return MicroBatch(place, batch, share)
