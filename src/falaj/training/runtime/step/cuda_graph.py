"""The whole step as one CUDA graph, from sample indices to the loss, without synchronizing with the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from falaj.training.runtime.data.sources import Batch, SampleSource, TensorSource, map_tensors, to_device
from falaj.training.runtime.step.step import Step

WARMUP_STEPS = 3  # eager steps before the capture


class CudaGraphStep:
    """Replays steps over full batches of `batch_size`. A step that cannot be captured runs without a graph.

    Random numbers depend on the step as elsewhere: a graph reads the seed of its generator when it is replayed.
    """

    def __init__(self, step: Step, source: SampleSource, *, batch_size: int) -> None:
        self._step, self._source, self._batch_size = step, source, batch_size
        self._graph: torch.cuda.CUDAGraph | None = None
        self._done = 0
        self._stream = torch.cuda.Stream(step.device)  # type: ignore[no-untyped-call]
        self._indices = torch.zeros(batch_size, dtype=torch.int64, device=step.device)
        self.reads = isinstance(source, TensorSource) and source.device.type == "cuda"
        """Whether the samples are on the device and read by the graph itself."""
        self._order: tuple[Tensor, Tensor] | None = (
            None  # on the host, which keeps its place there, and the device
        )
        self._slots: list[Tensor] = []
        self._batch: Batch = None
        self._form: Batch = None
        self._buffers: dict[str, Tensor] = {}

    def takes(self, indices: Tensor) -> bool:
        """Return whether the batch is full: the last one of an epoch may be shorter."""
        return len(indices) == self._batch_size

    def run(self, number: int, indices: Tensor, batch: Batch) -> Tensor:
        """Run step `number` and return its loss; `batch` is None where the graph reads it."""
        self._fill(indices, batch)
        self._step.set_rates(number)
        self._step.rng.seed_step(number, 0)
        if self._graph is not None:
            self._graph.replay()
            return self._loss.clone()
        if self._done == WARMUP_STEPS:
            self._refuse_new_buffers()
            return self._capture(number)
        self._buffers = dict(self._step.model.named_buffers())
        self._done += 1
        return self._aside(self._whole)

    def _refuse_new_buffers(self) -> None:
        """Raise RuntimeError if `forward` replaces a buffer: a graph would keep reading the old one."""
        before, self._buffers = self._buffers, {}
        now = self._step.model.named_buffers()
        if names := [name for name, buffer in now if before.get(name) is not buffer]:
            raise RuntimeError(
                f"forward replaces the buffer {', '.join(names)}, instead of changing it in place"
            )

    def _capture(self, number: int) -> Tensor:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        clear_cublas_workspaces()
        # another thread may stage a checkpoint meanwhile
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            self._loss = self._whole()
        clear_cublas_workspaces()
        self._graph = graph
        self._step.rng.seed_step(number, 0)
        graph.replay()
        return self._loss.clone()

    def _whole(self) -> Tensor:
        batch = self._source.read(self._indices, seed=0) if self.reads else self._batch
        loss = self._step.backward(self._step.to_memory_format(batch))
        self._step.clip()
        self._step.optimizer.step()
        return loss

    def _aside(self, work: Callable[[], Tensor]) -> Tensor:
        """Run `work` on the stream of the capture, where the gradients must be allocated."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            result = work()
        torch.cuda.current_stream().wait_stream(self._stream)
        return result

    def _fill(self, indices: Tensor, batch: Batch) -> None:
        if self.reads:
            self._indices.copy_(self._on_device(indices), non_blocking=True)
            return
        form = map_tensors(batch, shape_and_dtype)
        if self._batch is None:
            self._form = form
            self._batch = map_tensors(to_device(batch, self._step.device), torch.clone)
            self._slots = list_tensors(self._batch)
        elif (
            form != self._form
        ):  # a copy into the slots would broadcast, and skip values that are not tensors
            raise RuntimeError("the batches differ by more than the values of their tensors")
        else:
            for slot, tensor in zip(self._slots, list_tensors(batch), strict=True):
                slot.copy_(tensor, non_blocking=True)

    def _on_device(self, indices: Tensor) -> Tensor:
        """Return `indices` as a slice of the epoch's order, which is copied to the device once."""
        if self._order is None or self._order[0].data_ptr() != indices.untyped_storage().data_ptr():
            order = torch.empty(0, dtype=torch.int64).set_(indices.untyped_storage())
            self._order = order, order.to(self._step.device)
        start = indices.storage_offset()
        return self._order[1][start : start + len(indices)]

    def take_rates(self) -> None:
        """Make learning rates that change tensors, which captured kernels read."""
        if self._step.rates_change:
            for group in self._step.optimizer.param_groups:
                group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32).to(self._step.device)


def clear_cublas_workspaces() -> None:
    """Clear cuBLAS workspaces, so that a graph allocates its own, which nothing else frees."""
    drop = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if drop is not None:
        drop()


def shape_and_dtype(tensor: Tensor) -> Any:
    """Return the shape and dtype of a tensor, which must stay equal for a graph."""
    return tensor.shape, tensor.dtype


def list_tensors(batch: Batch) -> list[Tensor]:
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Any:
        found.append(tensor)
        return tensor

    map_tensors(batch, note)
    return found
