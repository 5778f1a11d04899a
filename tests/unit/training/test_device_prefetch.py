"""The order in which batches are copied ahead to a device and used, on a recording device."""

from __future__ import annotations

import random
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import Tensor

from falaj.training.runtime.data.batches import BatchPlan
from falaj.training.runtime.data.dataloading.device_prefetch import DevicePrefetcher, copy_to_device
from falaj.training.runtime.data.dataloading.loaders import InlineLoader
from falaj.training.runtime.data.sources import Batch, DatasetSource, TensorSource
from falaj.training.runtime.errors import WorkerLost
from falaj.training.runtime.step.micro_batches import MicroBatch, MicroBatchReader
from falaj.training.runtime.step.rng import StepRng

ROWS = torch.arange(64.0)
BATCHES = BatchPlan(64, 8, seed=5)


class RecordedTransfer:
    """Records the calls; a batch is on the device once it was received."""

    def __init__(self, *, idle: bool = False) -> None:
        self.notes: list[str] = []
        self.idle = idle
        self._sent = 0

    def send(self, batch: Batch) -> tuple[Batch, Any]:
        self._sent += 1
        self.notes.append(f"send {self._sent}")
        return batch.clone(), self._sent

    def receive(self, batch: Batch, event: Any) -> None:
        self.notes.append(f"receive {event}")

    def mark(self) -> None:
        self.notes.append("computed")

    def is_idle(self) -> bool:
        return self.idle


class FailsAtStep3(InlineLoader):
    """Cannot read step 3."""

    def take(self, step: int, indices: Tensor) -> list[MicroBatch]:
        if step == 3:
            raise OSError("torn")
        return super().take(step, indices)


def staged(
    transfer: RecordedTransfer, *, count: int = 1, last: int = 4, kind: type[InlineLoader] = InlineLoader
) -> tuple[DevicePrefetcher, MicroBatchReader]:
    reader = MicroBatchReader(TensorSource(ROWS, where="data"), seed=5, count=count)
    return DevicePrefetcher(kind(reader), reader, BATCHES, transfer, last=last), reader


def compute(loader: DevicePrefetcher, step: int) -> list[MicroBatch]:
    parts = loader.take(step, BATCHES.indices(step))
    loader.prefetch_next(step)
    return parts


def test_a_step_is_sent_while_the_one_before_is_computed_and_none_after_the_last() -> None:
    transfer = RecordedTransfer()
    loader, _ = staged(transfer, last=3)

    with closing(loader):
        found = [compute(loader, step)[0].batch for step in (1, 2, 3)]

    assert transfer.notes == [
        *("send 1", "receive 1", "computed"),
        *("send 2", "receive 2", "computed"),
        *("send 3", "receive 3"),
    ]
    assert all(torch.equal(batch, ROWS[BATCHES.indices(step)]) for step, batch in enumerate(found, 1))


def test_every_part_of_a_step_is_received_before_it_is_used() -> None:
    transfer = RecordedTransfer()
    loader, _ = staged(transfer, count=2)

    compute(loader, 1)
    parts = compute(loader, 2)

    assert transfer.notes[:7] == [
        *("send 1", "send 2", "receive 1", "receive 2", "computed"),
        "send 3",
        "send 4",
    ]
    assert [part.place for part in parts] == [0, 1]
    assert torch.equal(torch.cat([part.batch for part in parts]), ROWS[BATCHES.indices(2)])


def test_a_prefetched_batch_of_another_step_or_split_is_not_used() -> None:
    transfer = RecordedTransfer()
    loader, reader = staged(transfer)
    compute(loader, 1)

    (jumped,) = compute(loader, 3)
    reader.set_count(2)
    halves = compute(loader, 4)

    assert torch.equal(jumped.batch, ROWS[BATCHES.indices(3)])
    assert len(halves) == 2
    assert torch.equal(torch.cat([part.batch for part in halves]), ROWS[BATCHES.indices(4)])


def test_an_unreadable_step_fails_when_it_is_due() -> None:
    loader, _ = staged(RecordedTransfer(), kind=FailsAtStep3)

    compute(loader, 1)
    compute(loader, 2)

    with pytest.raises(OSError, match="torn"):
        loader.take(3, BATCHES.indices(3))


class LosesWorker(InlineLoader):
    """Loses a worker at the first request of step 2; another worker would read it."""

    lost = False

    def take(self, step: int, indices: Tensor) -> list[MicroBatch]:
        if step == 2 and not self.lost:
            self.lost = True
            raise WorkerLost("a process that reads samples was killed")
        return super().take(step, indices)


def test_a_worker_lost_while_prefetching_is_reported() -> None:
    loader, _ = staged(RecordedTransfer(), kind=LosesWorker)

    compute(loader, 1)

    with pytest.raises(WorkerLost):
        loader.take(2, BATCHES.indices(2))


def test_a_tensor_already_on_a_device_is_not_pinned() -> None:
    there = torch.zeros(2, device="meta")  # as little CPU time as a GPU would take

    assert copy_to_device(torch.device("meta"), there) is there


class Drawn:
    """Samples of random numbers only."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        return torch.rand(1) + random.random()


def test_random_numbers_between_steps_do_not_depend_on_prefetching() -> None:
    reader = MicroBatchReader(DatasetSource(Drawn()), seed=5, count=1)
    ahead = DevicePrefetcher(InlineLoader(reader), reader, BATCHES, RecordedTransfer(), last=4)
    plain = InlineLoader(reader)

    def drawn(loader: DevicePrefetcher | InlineLoader) -> list[float]:
        found, rng = [], StepRng(5, torch.device("cpu"))
        for step in (1, 2, 3):
            (part,) = loader.take(step, BATCHES.indices(step))
            rng.seed_step(step, 0)
            found += [part.batch.sum().item(), random.random()]  # as a model may in its forward pass
            loader.prefetch_next(step)
            found.append(torch.rand(1).item())
        return found

    assert drawn(ahead) == drawn(plain)


@pytest.mark.parametrize("idle", [True, False])
def test_reading_counts_as_waiting_only_while_the_device_has_nothing_to_do(idle: bool) -> None:
    loader, _ = staged(RecordedTransfer(idle=idle))
    loader.take(1, BATCHES.indices(1))
    first = loader.waited_s
    loader.prefetch_next(1)

    assert first > 0
    assert (loader.waited_s > first) == idle
    assert loader.reading_s > 0
