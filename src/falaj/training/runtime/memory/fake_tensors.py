"""Copies of a model, loss, optimizer and batch on fake tensors, which have shapes but no storage."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch._subclasses.fake_tensor import FakeTensorMode

from falaj.training.runtime.data.sources import Batch, map_tensors
from falaj.training.runtime.parallel.tensor_plan import Cut
from falaj.training.runtime.step.calling import Loss
from falaj.training.runtime.step.optimizers import OptimizerChoice, make_optimizer


@dataclass(frozen=True)
class FakeStep:
    """The parts of a training step on fake tensors. They are valid inside `mode`."""

    mode: FakeTensorMode
    model: nn.Module
    loss: Loss
    optimizer: optim.Optimizer
    batch: Batch

    @property
    def trained(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]


def make_fake_step(
    model: nn.Module,
    loss: Loss,
    choice: OptimizerChoice,
    sample: Batch,
    *,
    size: int,
    fused: bool,
    foreach: bool,
    halved: Mapping[str, Cut] | None = None,
) -> FakeStep:
    """Return a fake step over `size` samples like the one in `sample`; `foreach`: as optimizers work on a GPU.

    The layers in `halved` are those of one of two processes in a tensor-parallel group.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    memo = fake_tensors(mode, model, loss)
    with mode:
        fake = copy.deepcopy(model, memo).train()
        for name, cut in (halved or {}).items():
            halve_layer(fake.get_submodule(name), cut)
        optimizer = _fake_optimizer(choice, fake, memo, fused=fused)
        if foreach and not fused:
            for group in optimizer.param_groups:
                if group.get("foreach", False) is None and not group.get("fused"):
                    group["foreach"] = True
        fake_loss = copy.deepcopy(loss, memo) if isinstance(loss, nn.Module) else loss
        return FakeStep(mode, fake, fake_loss, optimizer, fake_batch(sample, size))


def halve_layer(layer: nn.Module, cut: Cut) -> None:
    """Keep half of the outputs (column) or inputs (row) of a linear layer."""
    for name, parameter in list(layer.named_parameters(recurse=False)):
        if cut == "column" or parameter.dim() > 1:
            half = torch.chunk(parameter.detach(), 2, 0 if cut == "column" else 1)[0]
            setattr(layer, name, nn.Parameter(half.clone(), requires_grad=parameter.requires_grad))


def fake_tensors(mode: FakeTensorMode, *holders: Any) -> dict[int, Any]:
    """Return a memo for `copy.deepcopy` that replaces each tensor of the modules by a fake one."""
    memo: dict[int, Any] = {}
    with mode:
        for holder in holders:
            for tensor in _tensors_of(holder):
                memo.setdefault(id(tensor), _fake(tensor))
    return memo


def fake_batch(sample: Batch, size: int) -> Batch:
    """Return a batch of `size` samples, each like the only one in `sample`. Inside a fake mode it is fake."""

    def widen(tensor: Tensor) -> Tensor:
        shape = (size, *tensor.shape[1:]) if tensor.dim() else ()
        return torch.empty(shape, dtype=tensor.dtype)

    return map_tensors(sample, widen)


def _fake(tensor: Tensor) -> Tensor:
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    if not isinstance(tensor, nn.Parameter):
        return made
    return nn.Parameter(made, requires_grad=tensor.requires_grad)


def _tensors_of(holder: Any) -> Iterable[Tensor]:
    if not isinstance(holder, nn.Module):
        return []
    others = [value for module in holder.modules() for value in vars(module).values()]
    return [*holder.parameters(), *holder.buffers(), *(each for each in others if isinstance(each, Tensor))]


def _fake_optimizer(
    choice: OptimizerChoice, model: nn.Module, memo: dict[int, Any], *, fused: bool
) -> optim.Optimizer:
    """Return an optimizer over the fake parameters without state; the first step creates it."""
    if not isinstance(choice, optim.Optimizer):
        trained = [p for p in model.parameters() if p.requires_grad]
        return make_optimizer(choice, trained, lr=1e-3, fused=fused)
    made = copy.copy(choice)
    groups = [{**group, "params": [memo[id(p)] for p in group["params"]]} for group in choice.param_groups]
    made.__setstate__({"state": {}, "param_groups": groups, "defaults": dict(choice.defaults)})
    made.state = defaultdict(dict)
    for name, value in vars(choice).items():  # attributes of a subclass
        if name not in vars(made):
            setattr(made, name, value)
    return made
