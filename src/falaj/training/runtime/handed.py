"""The batches of a loop that is not ours: each is handed in as it comes, and cut where it must be."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from falaj.training.runtime.data.sources import Batch, map_tensors
from falaj.training.runtime.errors import InvalidTraining, TrainingFault
from falaj.training.runtime.step.cuda_graph import list_tensors
from falaj.training.runtime.step.micro_batches import MicroBatch, MicroBatchIndices, MicroBatchReader


class BatchSource:
    """The batch that the loop has just handed in, as a source of its rows."""

    def __init__(self) -> None:
        self.batch: Batch = None
        self.rows = 0
        self._places: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return self.rows

    def take(self, batch: Batch) -> Tensor:
        """From now on this is the source of `batch`; the numbers of its rows."""
        first = batch[0] if isinstance(batch, tuple) and batch else batch
        tensors = [first] if isinstance(first, Tensor) else list_tensors(batch)
        if not tensors or not tensors[0].dim() or not len(tensors[0]):
            fault = TrainingFault(
                "batch", type(batch).__name__, "tensors with a row per sample", "(inputs, target)"
            )
            raise InvalidTraining("this batch cannot be trained on", faults=[fault])
        self.batch, self.rows = batch, len(tensors[0])
        if self.rows not in self._places:
            self._places[self.rows] = torch.arange(self.rows)
        return self._places[self.rows]

    def read(self, indices: Tensor, *, seed: int) -> Batch:
        if len(indices) == self.rows:
            return self.batch
        start, count = int(indices[0]), len(indices)
        return map_tensors(self.batch, lambda each: each[start : start + count] if each.dim() else each)


class LocalBatchReader(MicroBatchReader):
    """Cuts the batch of this process, which is one of `ways` parts of the global batch."""

    def __init__(self, source: BatchSource, *, seed: int, count: int, ways: int) -> None:
        super().__init__(source, seed=seed, count=count)
        self._handed, self._ways = source, ways

    def read(self, step: int, indices: Tensor) -> list[MicroBatch]:
        if self.count == 1:
            return [MicroBatch(0, self._handed.batch, 1 / self._ways)]
        return super().read(step, indices)

    def cuts(self, indices: Tensor) -> Iterator[MicroBatchIndices]:
        found = super().cuts(indices)
        return found if self._ways == 1 else (cut._replace(share=cut.share / self._ways) for cut in found)


class UnseededRng:
    """Dice that nobody rolls: random numbers are drawn as they come."""

    def seed_step(self, step: int, micro_batch: int) -> None:
        pass
