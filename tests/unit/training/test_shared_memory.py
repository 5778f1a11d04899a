"""Shared memory of worker batches is reused, but never while a tensor still uses it."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import Tensor

from falaj.training.runtime.data.batches import BatchPlan
from falaj.training.runtime.data.dataloading.loaders import InlineLoader
from falaj.training.runtime.data.dataloading.shared_memory import MAX_INLINE_BYTES, round_up_size
from falaj.training.runtime.data.dataloading.start_method import StartMethod
from falaj.training.runtime.data.dataloading.worker_pool import WorkerPoolLoader
from falaj.training.runtime.data.sources import DatasetSource
from falaj.training.runtime.errors import RaggedBatch, SampleUnreadable
from falaj.training.runtime.step import allocator
from falaj.training.runtime.step.micro_batches import MicroBatchReader

SAMPLES, BATCH_SIZE, WIDTH = 64, 8, 2000
BATCHES = BatchPlan(SAMPLES, BATCH_SIZE, seed=5)


class Rows:
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return torch.full((WIDTH,), float(index)) + torch.randn(WIDTH), index


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


class AllKinds(Rows):
    """Large and small tensors of many types, nested, and values that are not tensors."""

    def __getitem__(self, index: int) -> Any:
        large = torch.full((3, WIDTH), float(index)) + torch.randn(3, WIDTH)
        odd = large.double() if index % 2 else large
        return {
            "kinds": [large.bfloat16(), large > 0, large.to(torch.complex64), large.long()],
            "pair": Pair(large.T, large[0, :3]),
            "numpy": (large.numpy(), numpy.float32(index), numpy.arange(3)),
            "plain": (index, float(index), f"sample {index}", True),
            "none of it": torch.empty(0, 3),
            "odd": odd,
        }


class Torn(Rows):
    def __getitem__(self, index: int) -> Any:
        if index == 17:
            raise ValueError("a torn page")
        return super().__getitem__(index)


class Ragged(Rows):
    def __getitem__(self, index: int) -> Any:
        row, number = super().__getitem__(index)
        return (row[:-1] if index == 17 else row), number


class OfManyLengths(Rows):
    """Each batch differs in length from the one before."""

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        length = 1000 * (1 + sum(indices) % 40)
        return [torch.full((length,), float(index)) for index in indices]


@pytest.fixture(autouse=True)
def no_worker_is_left() -> Iterator[None]:
    yield
    assert multiprocessing.active_children() == []


def workers_over(dataset: Any, *, count: int = 1, cuts: int = 1) -> WorkerPoolLoader:
    items = DatasetSource(dataset)
    reader = MicroBatchReader(items, seed=5, count=cuts)
    return WorkerPoolLoader(
        reader, items, BATCHES, last=1000, count=count, prefetch=2, start_method=StartMethod("fork")
    )


def inline_over(dataset: Any, *, cuts: int = 1) -> InlineLoader:
    return InlineLoader(MicroBatchReader(DatasetSource(dataset), seed=5, count=cuts))


def are_the_same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, Tensor):
        return ours.dtype is theirs.dtype and ours.stride() == theirs.stride() and torch.equal(ours, theirs)
    if type(ours) is not type(theirs):
        return False
    if isinstance(ours, dict):
        return list(ours) == list(theirs) and all(are_the_same(ours[name], theirs[name]) for name in ours)
    if isinstance(ours, tuple | list):
        return len(ours) == len(theirs) and all(map(are_the_same, ours, theirs))
    return bool(ours == theirs)


def mappings() -> int:
    """Return the number of torch's shared memory files of this process."""
    return Path("/proc/self/maps").read_text().count("/torch_")


@pytest.mark.parametrize("cuts", [1, 3])
def test_batches_of_all_types_equal_those_read_without_workers(cuts: int) -> None:
    with closing(workers_over(AllKinds(), count=2, cuts=cuts)) as loader:
        for step in range(1, 13):
            indices = BATCHES.indices(step)

            ours = loader.take(step, indices)

            theirs = inline_over(AllKinds(), cuts=cuts).take(step, indices)
            assert [part.place for part in ours] == [part.place for part in theirs]
            assert all(are_the_same(a.batch, b.batch) for a, b in zip(ours, theirs, strict=True))


def test_a_batch_that_is_still_referenced_is_never_overwritten() -> None:
    kept, inline = [], inline_over(Rows())
    with closing(workers_over(Rows())) as loader:
        for step in range(1, 21):
            (part,) = loader.take(step, BATCHES.indices(step))
            kept.append(part.batch[0][3:].detach())  # a view is enough
            del part

    for step, view in enumerate(kept, start=1):  # also after the worker and its memory are gone
        (part,) = inline.take(step, BATCHES.indices(step))
        assert torch.equal(view, part.batch[0][3:])


def test_unreferenced_batches_reuse_their_memory() -> None:
    before, places = mappings(), set()
    with closing(workers_over(Rows())) as loader:
        for step in range(1, 31):
            (part,) = loader.take(step, BATCHES.indices(step))
            places.add(part.batch[0].data_ptr())
            del part

        assert len(places) <= 4  # one in use, two prefetched, and one that was just released
        assert mappings() - before == len(places)
    del loader
    assert mappings() == before


def test_batches_of_many_lengths_do_not_accumulate_memory() -> None:
    before = mappings()
    with closing(workers_over(OfManyLengths())) as loader:
        for step in range(1, 61):
            (part,) = loader.take(step, BATCHES.indices(step))
            assert torch.equal(part.batch[:, -1], BATCHES.indices(step).float())
            del part

        assert mappings() - before <= 5


@pytest.mark.parametrize(("dataset", "error"), [(Torn(), SampleUnreadable), (Ragged(), RaggedBatch)])
def test_a_step_that_fails_leaves_no_memory_behind(dataset: Rows, error: type[Exception]) -> None:
    failing = next(step for step in range(1, 9) if 17 in BATCHES.indices(step))
    fine = failing % 8 + 1
    before = mappings()
    with closing(workers_over(dataset)) as loader:
        for _ in range(8):
            with pytest.raises(error, match="17"):
                loader.take(failing, BATCHES.indices(failing))
            (part,) = loader.take(fine, BATCHES.indices(fine))
            assert part.batch[1].tolist() == BATCHES.indices(fine).tolist()
            del part

        assert mappings() - before <= 5


@pytest.mark.parametrize("size_bytes", [MAX_INLINE_BYTES + 1, 100_000, 1 << 20, (1 << 24) + 1, 10**9])
def test_blocks_are_slightly_larger_than_their_content(size_bytes: int) -> None:
    assert size_bytes <= round_up_size(size_bytes) <= max(2 * MAX_INLINE_BYTES, 1.126 * size_bytes)
    assert round_up_size(round_up_size(size_bytes)) == round_up_size(size_bytes)


# ------------------------------------------------------------------------ memory that is freed in a step


STEPS_OF_24_MB = """
import resource, runpy, sys
runpy.run_path(sys.argv[1])["retain_heap"]()
for number in range(14):
    if number == 4:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    rows = [bytes(bytearray(b"x") * (1 << 22)) for _ in range(6)]
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(**environment: str) -> int:
    """Return the page faults of steps, after the first ones."""
    words = [sys.executable, "-c", STEPS_OF_24_MB, allocator.__file__]
    return int(subprocess.run(words, capture_output=True, text=True, env=environment, check=True).stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc")
def test_steps_reuse_memory_freed_by_the_previous_step() -> None:
    assert faults() < 6000


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc")
@pytest.mark.parametrize(
    "chosen", [{"MALLOC_TRIM_THRESHOLD_": "131072"}, {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"}]
)
def test_allocator_settings_of_the_user_are_kept(chosen: dict[str, str]) -> None:
    assert faults(**chosen) > 20_000  # 6000 pages a step
