"""Parallel strategies over the data: single process, replicas (ddp), exact replicas, and shards (FSDP2)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from falaj.training.runtime.parallel.buffers import BufferSync, StaticBufferCheck
from falaj.training.runtime.parallel.fsdp_blocks import fsdp_blocks
from falaj.training.runtime.parallel.fsdp_order import FsdpOrderCheck
from falaj.training.runtime.parallel.gradient_clipping import clip_gradients
from falaj.training.runtime.parallel.gradient_reduction import GradientReducer
from falaj.training.runtime.parallel.process_group import ProcessGroup
from falaj.training.runtime.parallel.tree_reduction import PairwiseSum, sum_over_processes
from falaj.training.runtime.step.micro_batches import MicroBatch


class ParallelStrategy(Protocol):
    """`module` is called in place of the model; a loss is multiplied by `loss_factor` before the backward pass."""

    module: nn.Module
    loss_factor: float

    def micro_batch(self, *, last: bool) -> AbstractContextManager[Any]:
        """Wrap the forward and backward pass of one micro-batch."""

    def add_loss(self, loss: Tensor, part: MicroBatch) -> None:
        """Add the loss of a micro-batch whose gradients have just been computed."""

    def discard_step(self) -> None:
        """Discard what was added since the last `finish`: the step is computed again."""

    def finish(self) -> Tensor:
        """Return the loss of the global batch; afterwards the gradients are those of the global batch."""

    def clip(self, parameters: list[nn.Parameter], most: float) -> None: ...

    def remove_hooks(self) -> None:
        """Remove our hooks from the model after the last step. Shards and split layers stay."""


class SingleProcessStrategy:
    """One process: gradients accumulate in place."""

    loss_factor = 1.0

    def __init__(self, model: nn.Module, world: ProcessGroup) -> None:
        """`reports_loss`: whether the loss of this process counts, or that of another one with the same samples.
        `pipeline_group`: the processes that hold the other stages of the same replica, if there is a pipeline.
        """
        self.module: nn.Module = model
        self._world = world
        self._losses: list[Tensor] = []
        self.reports_loss = True
        """Whether the loss of this process counts, or is that of another one with the same samples."""
        self.pipeline_group: dist.ProcessGroup | None = None
        """The processes that hold the other parameters of the same copy, where there is a pipeline."""

    def micro_batch(self, *, last: bool) -> AbstractContextManager[Any]:
        return nullcontext()

    def add_loss(self, loss: Tensor, part: MicroBatch) -> None:
        self._losses.append(loss)

    def discard_step(self) -> None:
        self._losses.clear()

    def finish(self) -> Tensor:
        losses, self._losses = self._losses, []
        own = losses[0]
        for loss in losses[1:]:
            own = own + loss
        if self.pipeline_group is not None:  # stages without a loss do not know its dtype
            own = own.double()
        return self._world.sum_loss(own if self.reports_loss else torch.zeros_like(own))

    def clip(self, parameters: list[nn.Parameter], most: float) -> None:
        if self.pipeline_group is not None or any(isinstance(parameter, DTensor) for parameter in parameters):
            clip_gradients(parameters, most, over=self.pipeline_group, device=self._world.device)
        else:
            nn.utils.clip_grad_norm_(parameters, most)

    def remove_hooks(self) -> None:
        pass


class DdpStrategy(SingleProcessStrategy):
    """A replica in each process, whose gradients are reduced during the last backward pass."""

    def __init__(
        self, model: nn.Module, world: ProcessGroup, mesh: DeviceMesh, control_group: dist.ProcessGroup
    ) -> None:
        super().__init__(model, world)
        group = mesh.get_group()
        self._sum = GradientReducer(local_parameters(model), group, control_group)
        self._buffers = BufferSync(model, group, control_group)

    def micro_batch(self, *, last: bool) -> AbstractContextManager[Any]:
        return self._sum.overlapping() if last else nullcontext()

    def discard_step(self) -> None:
        super().discard_step()
        self._sum.discard_step()

    def finish(self) -> Tensor:
        self._sum.finish()
        self._buffers.share()
        return super().finish()

    def remove_hooks(self) -> None:
        self._sum.remove_hooks()


class ExactDdpStrategy(SingleProcessStrategy):
    """A replica in each process, with sums in a fixed tree: bitwise equal with 1, 2, 4 … processes."""

    def __init__(self, model: nn.Module, world: ProcessGroup) -> None:
        super().__init__(model, world)
        self._parameters = local_parameters(model)
        self._loss_type = torch.float32
        self._sum = PairwiseSum()
        self._still = StaticBufferCheck(model)

    def add_loss(self, loss: Tensor, part: MicroBatch) -> None:
        self._loss_type = loss.dtype
        if part.share:  # a process without samples repeats those of another one
            self._sum.add([*(p.grad for p in self._parameters), loss], place=part.place)
        for parameter in self._parameters:
            parameter.grad = None

    def discard_step(self) -> None:
        self._sum = PairwiseSum()

    def finish(self) -> Tensor:
        self._still.require()
        world = self._world
        own = self._sum.take() or [None] * (len(self._parameters) + 1)
        if world.size > 1:
            loss_like = torch.zeros((), dtype=self._loss_type, device=world.device)
            like = [*(p.detach() for p in self._parameters), loss_like]
            own = sum_over_processes(own, like, rank=world.rank, size=world.size)
        *gradients, loss = own
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
        world.sum_loss(torch.zeros((), device=world.device))
        return torch.zeros((), device=world.device) if loss is None else loss


class FsdpStrategy(SingleProcessStrategy):
    """Parameters, gradients and optimizer state sharded over the processes (FSDP2), block by block.

    A model that an earlier run has sharded stays as it is.
    """

    def __init__(
        self, model: nn.Module, world: ProcessGroup, mesh: DeviceMesh, control_group: dist.ProcessGroup
    ) -> None:
        super().__init__(model, world)
        elsewhere = {p for p in model.parameters() if p.is_meta}
        here = [block for block in fsdp_blocks(model) if not any(p in elsewhere for p in block.parameters())]
        self._sharded: FSDPModule
        if isinstance(model, FSDPModule):
            self._sharded = model
        else:
            for block in here:
                fully_shard(block, mesh=mesh)
            self._sharded = fully_shard(model, mesh=mesh, ignored_params=elsewhere or None)
        self._order = FsdpOrderCheck(model, here, control_group)
        self._buffers = BufferSync(model, mesh.get_group(), control_group)
        self.loss_factor = float(mesh.size())

    def micro_batch(self, *, last: bool) -> AbstractContextManager[Any]:
        self._sharded.set_requires_gradient_sync(last)
        return self._order.checked()

    def finish(self) -> Tensor:
        with self._order.checked():
            self._order.compare()
            self._buffers.share()
            return super().finish()

    def remove_hooks(self) -> None:
        self._order.remove_hooks()
        self._sharded.set_requires_gradient_sync(True)


def local_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of this process, including frozen ones, which a callback may unfreeze. Those of other
    pipeline stages are meta tensors."""
    return [p for p in model.parameters() if not p.is_meta]


def broadcast_model(model: nn.Module, device: torch.device) -> None:
    """Copy the leading process's parameters and buffers to all processes, by way of `device`.

    Tensors that an earlier run has sharded are consistent already.
    """
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if isinstance(tensor, DTensor):
                continue
            sent = tensor.detach().to(device, memory_format=torch.contiguous_format)
            dist.broadcast(sent, 0)
            if sent.data_ptr() != tensor.data_ptr():
                tensor.copy_(sent)
