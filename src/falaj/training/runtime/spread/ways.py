"""The ways to spread a model over data: alone, copies (DDP), copies that add up exactly, and shards (FSDP2)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from falaj.training.runtime.spread.norms import clip_gradients, local
from falaj.training.runtime.spread.tree import PairwiseSum, sum_over_processes
from falaj.training.runtime.world import World


class Spread(Protocol):
    """`run` is called in the place of the model; a loss is multiplied by `factor` before it is differentiated."""

    run: nn.Module
    factor: float

    def part(self, *, last: bool) -> AbstractContextManager[Any]:
        """Around the forward and backward pass of one micro-batch."""

    def add(self, loss: Tensor) -> None:
        """The loss of the micro-batch whose gradients have just been computed."""

    def forget(self) -> None:
        """Drop what was added since the last `finish`: the step is computed again."""

    def finish(self) -> Tensor:
        """The loss of the global batch; from here on the gradients are its gradients."""

    def clip(self, parameters: list[nn.Parameter], most: float) -> None: ...


class Alone:
    """One process: gradients add up where they are."""

    factor = 1.0

    def __init__(self, model: nn.Module, world: World) -> None:
        self.run: nn.Module = model
        self._world = world
        self._losses: list[Tensor] = []
        self.speaks = True
        """Whether the loss of this process counts, or is that of another one with the same samples."""

    def part(self, *, last: bool) -> AbstractContextManager[Any]:
        return nullcontext()

    def add(self, loss: Tensor) -> None:
        self._losses.append(loss)

    def forget(self) -> None:
        self._losses.clear()

    def finish(self) -> Tensor:
        losses, self._losses = self._losses, []
        own = losses[0]
        for loss in losses[1:]:
            own = own + loss
        return self._world.total(own if self.speaks else torch.zeros_like(own))

    def clip(self, parameters: list[nn.Parameter], most: float) -> None:
        if any(isinstance(parameter, DTensor) for parameter in parameters):
            clip_gradients(parameters, most, over=None)
        else:
            nn.utils.clip_grad_norm_(parameters, most)


class Copies(Alone):
    """A copy in each process; torch's DDP averages the gradients while the last backward pass goes on."""

    def __init__(self, model: nn.Module, world: World, mesh: DeviceMesh, *, unused: bool) -> None:
        super().__init__(model, world)
        self._copy = DistributedDataParallel(model, device_mesh=mesh, find_unused_parameters=unused)
        self.run, self.factor = self._copy, float(mesh.size())

    def part(self, *, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else self._copy.no_sync()


class CutCopies(Alone):
    """Copies of a model whose tensors are cut: gradients are added once the last backward pass is over.

    torch's DDP takes such parameters apart, so that norms and checkpoints would be those of a piece.
    """

    def __init__(self, model: nn.Module, world: World, mesh: DeviceMesh) -> None:
        super().__init__(model, world)
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._group = mesh.get_group()

    def finish(self) -> Tensor:
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(local(parameter.grad), group=self._group)
        return super().finish()


class ExactCopies(Alone):
    """A copy in each process, and sums in one fixed tree: the same to the bit with 1, 2, 4 … processes."""

    def __init__(self, model: nn.Module, world: World) -> None:
        super().__init__(model, world)
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._sum = PairwiseSum()

    def add(self, loss: Tensor) -> None:
        self._sum.add([*(p.grad for p in self._parameters), loss])
        for parameter in self._parameters:
            parameter.grad = None

    def forget(self) -> None:
        self._sum = PairwiseSum()

    def finish(self) -> Tensor:
        own, world = self._sum.take(), self._world
        if world.size > 1:
            like = [*(p.detach() for p in self._parameters), torch.zeros((), device=world.device)]
            own = sum_over_processes(own, like, rank=world.rank, size=world.size)
        *gradients, loss = own
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
        world.total(torch.zeros((), device=world.device))
        return torch.zeros((), device=world.device) if loss is None else loss


class Shards(Alone):
    """Parameters, gradients and optimizer state cut over the processes (FSDP2), block by block."""

    def __init__(self, model: nn.Module, world: World, mesh: DeviceMesh) -> None:
        super().__init__(model, world)
        for block in blocks(model):
            fully_shard(block, mesh=mesh)
        self._sharded = fully_shard(model, mesh=mesh)
        self.factor = float(mesh.size())

    def part(self, *, last: bool) -> AbstractContextManager[Any]:
        self._sharded.set_requires_gradient_sync(last)
        return nullcontext()


def blocks(model: nn.Module) -> list[nn.Module]:
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
    return [part for part in found.values() if stands_alone(part, holders)]


def stands_alone(part: nn.Module, holders: dict[nn.Parameter, set[int]]) -> bool:
    within = {id(module) for module in part.modules()}
    parameters = list(part.parameters())
    return bool(parameters) and all(holders[parameter] <= within for parameter in parameters)


def same_start(model: nn.Module) -> None:
    """Every process begins with the leading one's parameters and buffers."""
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.detach(), 0)
