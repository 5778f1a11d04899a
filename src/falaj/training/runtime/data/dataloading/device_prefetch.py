"""Copies the micro-batches of the next step to the device while one is computed."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from falaj.training.runtime.data.batches import BatchPlan
from falaj.training.runtime.data.dataloading.loaders import BatchLoader, InlineLoader
from falaj.training.runtime.data.sources import Batch, DatasetSource, map_tensors
from falaj.training.runtime.errors import WorkerLost
from falaj.training.runtime.step.micro_batches import MicroBatch, MicroBatchReader
from falaj.training.runtime.step.rng import preserved_rng_state


class DeviceTransfer(Protocol):
    """Transfer to the device, beside the compute stream."""

    def send(self, batch: Batch) -> tuple[Batch, Any]:
        """Start the copy; return the batch on the device and the event of its completion."""

    def receive(self, batch: Batch, event: Any) -> None:
        """Let later computation wait for `moment`, and keep `batch` until it was used."""

    def mark(self) -> None:
        """Mark the work that was submitted to the device so far."""

    def is_idle(self) -> bool:
        """Return whether the device has finished everything up to the last mark."""


class PrefetchedStep(NamedTuple):
    step: int
    cut: int
    parts: list[MicroBatch]
    events: list[Any]


class DevicePrefetcher:
    """A loader that copies the micro-batches of `loader` to the device one step ahead."""

    def __init__(
        self,
        loader: BatchLoader,
        reader: MicroBatchReader,
        batches: BatchPlan,
        transfer: DeviceTransfer,
        *,
        last: int,
    ) -> None:
        self._loader, self._reader, self._batches = loader, reader, batches
        self._transfer, self._last = transfer, last
        self._pending: PrefetchedStep | None = None
        self._lost: WorkerLost | None = None
        self._draws = isinstance(loader, InlineLoader) and isinstance(reader.source, DatasetSource)
        self.waited_s = 0.0

    @property
    def reading_s(self) -> float:
        return self._loader.reading_s

    def take(self, step: int, indices: Tensor) -> list[MicroBatch]:
        if self._lost is not None:  # else another worker would read this step and hide the loss
            raise self._lost
        found, self._pending = self._pending, None
        if found is None or (found.step, found.cut) != (step, self._reader.count):
            began = time.perf_counter()
            found = self._sent(step, indices)
            self.waited_s += time.perf_counter() - began
        for part, event in zip(found.parts, found.events, strict=True):
            self._transfer.receive(part.batch, event)
        return found.parts

    def prefetch_next(self, step: int) -> None:
        """Start the copy of the next step. A failure to read it is raised by the next step."""
        if step >= self._last:
            return
        began = time.perf_counter()
        self._transfer.mark()
        try:
            with preserved_rng_state() if self._draws else nullcontext():
                self._pending = self._sent(step + 1, self._batches.indices(step + 1))
        except WorkerLost as lost:
            self._lost = lost
        except Exception:
            self._pending = None
        if self._transfer.is_idle():  # the device was idle for at least a part of this time
            self.waited_s += time.perf_counter() - began

    def close(self) -> None:
        self._pending = None
        self._loader.close()

    def _sent(self, step: int, indices: Tensor) -> PrefetchedStep:
        parts = self._loader.take(step, indices)
        sent = [self._transfer.send(part.batch) for part in parts]
        on_device = [part._replace(batch=batch) for part, (batch, _) in zip(parts, sent, strict=True)]
        return PrefetchedStep(step, self._reader.count, on_device, [event for _, event in sent])


class CudaTransfer:
    """Transfer through pinned memory on a separate stream.

    torch keeps the pinned memory until a non-blocking copy is done, and the device memory of this stream until the
    compute stream, which is recorded, has used it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._computed = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def send(self, batch: Batch) -> tuple[Batch, torch.cuda.Event]:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            there = map_tensors(batch, lambda tensor: copy_to_device(self._device, tensor))
            event.record(self._stream)
        return there, event

    def receive(self, batch: Batch, event: torch.cuda.Event) -> None:
        computing = torch.cuda.current_stream(self._device)
        computing.wait_event(event)

        def keep(tensor: Tensor) -> Tensor:
            tensor.record_stream(computing)
            return tensor

        map_tensors(batch, keep)

    def mark(self) -> None:
        self._computed.record(torch.cuda.current_stream(self._device))

    def is_idle(self) -> bool:
        return bool(self._computed.query())  # type: ignore[no-untyped-call]


def copy_to_device(device: torch.device, tensor: Tensor) -> Tensor:
    """Start the copy of `tensor` to `device`; a tensor on a device need not be pinned."""
    source = tensor.pin_memory() if tensor.device.type == "cpu" else tensor
    return source.to(device, non_blocking=True)
