"""What one process computes of a step: its micro-batches, each with its place and its share of the global batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from falaj.training.runtime.data import Batch, Source
from falaj.training.runtime.randomness import address


class MicroBatch(NamedTuple):
    """`share` is its part of the global batch's samples; 0 where a process has none, and computes all the same."""

    place: int
    batch: Batch
    share: float


class Reader:
    """Cuts each global batch into `count` micro-batches, and reads those of process `rank` of `size`.

    A micro-batch is the same whoever reads it: what is random about its samples depends on its place alone.
    """

    def __init__(self, source: Source, *, seed: int, count: int, rank: int = 0, size: int = 1) -> None:
        self._source, self._seed = source, seed
        self._rank, self._size = rank, size
        self._cut(-(-count // size) * size)

    def halve(self) -> int:
        """Cut each micro-batch in two from now on; how many there are then."""
        self._cut(2 * self.count)
        return self.count

    def _cut(self, count: int) -> None:
        self.count, each = count, count // self._size
        self._places = range(self._rank * each, (self._rank + 1) * each)

    def read(self, step: int, indices: Tensor) -> Iterator[MicroBatch]:
        samples, found = len(indices), False
        for place in self._places:
            start, end = (samples * edge // self.count for edge in (place, place + 1))
            if start < end:
                found = True
                yield MicroBatch(place, self._part(step, place, indices[start:end]), (end - start) / samples)
        if not found:  # it must take part in what the others do together
            place = self._places[0]
            yield MicroBatch(place, self._part(step, place, indices[:1]), 0.0)

    def _part(self, step: int, place: int, indices: Tensor) -> Batch:
        return self._source.read(indices, seed=address(b"read", self._seed, step, place))
