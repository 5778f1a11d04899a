"""The ways to spread a model over data: alone, copies, copies that add up exactly, and shards (FSDP2)."""

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
from falaj.training.runtime.parallel.fsdp_order import FsdpOrderCheck
from falaj.training.runtime.parallel.gradient_clipping import clip_gradients
from falaj.training.runtime.parallel.gradient_reduction import GradientReducer
from falaj.training.runtime.parallel.process_group import ProcessGroup
from falaj.training.runtime.parallel.tree_reduction import PairwiseSum, sum_over_processes
from falaj.training.runtime.step.micro_batches import MicroBatch


class ParallelStrategy(Protocol):
    """`run` is called in the place of the model; a loss is multiplied by `factor` before it is differentiated."""

    module: nn.Module
    loss_factor: float

    def micro_batch(self, *, last: bool) -> AbstractContextManager[Any]:
        """Around the forward and backward pass of one micro-batch."""

    def add_loss(self, loss: Tensor, part: MicroBatch) -> None:
        """The loss of the micro-batch `part`, whose gradients have just been computed."""

    def discard_step(self) -> None:
        """Drop what was added since the last `finish`: the step is computed again."""

    def finish(self) -> Tensor:
        """The loss of the global batch; from here on the gradients are its gradients."""

    def clip(self, parameters: list[nn.Parameter], most: float) -> None: ...

    def remove_hooks(self) -> None:
        """There are no more steps: take off the model what listened in it. Shards and cut layers stay."""


class SingleProcessStrategy:
    """One process: gradients add up where they are."""

    loss_factor = 1.0

    def __init__(self, model: nn.Module, world: ProcessGroup) -> None:
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
        if self.pipeline_group is not None:  # those that have no loss do not know its type either
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
    """A copy in each process, whose gradients are added while the last backward pass goes on."""

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
    """A copy in each process, and sums in one fixed tree: the same to the bit with 1, 2, 4 … processes."""

    def __init__(self, model: nn.Module, world: ProcessGroup) -> None:
        super().__init__(model, world)
        self._parameters = local_parameters(model)
        self._loss_type = torch.float32
        self._sum = PairwiseSum()
        self._still = StaticBufferCheck(model)

    def add_loss(self, loss: Tensor, part: MicroBatch) -> None:
        self._loss_type = loss.dtype
        if (
            part.share
        ):  # a process without samples computes with those of another one, which has them in its sum
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
    """Parameters, gradients and optimizer state cut over the processes (FSDP2), block by block.

    A model that an earlier run has cut stays as it is.
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
    """The parameters that this process may train, frozen ones too: a callback may thaw them. Those of other stages of a
    pipeline lie nowhere here."""
    return [p for p in model.parameters() if not p.is_meta]


def fsdp_blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated parts of a model, each of which is gathered by itself: members of lists, the innermost first.

    A part that shares parameters with another one is gathered with the rest.
    """
    holders: dict[nn.Parameter, set[int]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            holders.setdefault(parameter, set()).add(id(module))
    found: dict[int, nn.Module] = {}
    for parent in reversed(list(model.modules())):
        if isinstance(parent, nn.ModuleList | nn.Sequential) and parent is not model:
            found |= {id(child): child for child in parent}
    return [part for part in found.values() if is_self_contained(part, holders)]


def is_self_contained(part: nn.Module, holders: dict[nn.Parameter, set[int]]) -> bool:
    within = {id(module) for module in part.modules()}
    parameters = list(part.parameters())
    return bool(parameters) and all(holders[parameter] <= within for parameter in parameters)


def broadcast_model(model: nn.Module, device: torch.device) -> None:
    """Every process begins with the leading one's parameters and buffers, wherever they lie; they go by `device`.

    What an earlier run has cut belongs together already.
    """
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if isinstance(tensor, DTensor):
                continue
            sent = tensor.detach().to(device, memory_format=torch.contiguous_format)
            dist.broadcast(sent, 0)
            if sent.data_ptr() != tensor.data_ptr():
                tensor.copy_(sent)
