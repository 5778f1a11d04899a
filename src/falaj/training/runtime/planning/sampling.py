"""A few samples of a dataset, kept in memory while plans are tried: what is compared is the computing."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from falaj.training.runtime.data.sources import Batch, DatasetSource, SampleSource, TensorSource
from falaj.training.runtime.errors import InvalidTraining

SAMPLES_AT_MOST = 256
SAMPLES_AT_LEAST = 8
READING_S = 1.0


class SampledSource:
    """Stands for a dataset of `count` samples; those that were read stand for all of them."""

    def __init__(self, columns: TensorSource, count: int) -> None:
        self._columns, self._count = columns, count

    def __len__(self) -> int:
        return self._count

    def read(self, indices: Tensor, *, seed: int) -> Batch:
        return self._columns.read(indices % len(self._columns), seed=seed)


def sample_items(items: DatasetSource) -> tuple[SampleSource, float]:
    """Some of `items` in memory, and the seconds that it takes to read one; itself, if they are more than tensors."""
    first = min(len(items), SAMPLES_AT_LEAST)
    items.read(torch.arange(first), seed=0)  # what is opened or imported at the first time
    began = time.perf_counter()
    batch = items.read(torch.arange(first), seed=0)
    sample_s = (time.perf_counter() - began) / first
    count = min(len(items), SAMPLES_AT_MOST, int(READING_S / max(sample_s, 1e-9)))
    if count > first:
        began = time.perf_counter()
        batch = items.read(torch.arange(count), seed=0)
        sample_s = (time.perf_counter() - began) / count
    try:
        return SampledSource(TensorSource(batch, where="data"), len(items)), sample_s
    except InvalidTraining:
        return items, sample_s
