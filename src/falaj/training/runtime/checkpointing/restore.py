"""Puts what a checkpoint holds into a model and an optimizer, on whatever layout they have now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor

from falaj.training.runtime.checkpointing.state import (
    BUFFER,
    MODEL,
    OPTIMIZER,
    Number,
    model_tensors,
    parameter_names,
)
from falaj.training.runtime.errors import TrainingFault
from falaj.training.runtime.step.non_persistent_buffers import buffers_to_restore, restore_buffers


@dataclass(frozen=True)
class TensorInfo:
    """What a whole tensor is like."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


@dataclass(frozen=True)
class RestorePlan:
    """What this process needs of a checkpoint, by name: a tensor laid out as the one that is given, or a whole one."""

    layouts: dict[str, Tensor | None]
    faults: list[TrainingFault]
    """What it needs and the checkpoint does not have, or has in another kind."""


def plan_restore(
    model: nn.Module, loss: object, optimizer: optim.Optimizer, saved: Mapping[str, TensorInfo]
) -> RestorePlan:
    """What there is to read of the tensors that were `saved`, under all their names."""
    layouts: dict[str, Tensor | None] = {}
    faults = []
    for name, own in model_tensors(model).items():
        kind = TensorInfo(own.dtype, tuple(own.shape))
        found = saved.get(MODEL + name)
        if found is None:
            faults.append(TrainingFault(name, "not in the checkpoint"))
        elif found != kind:
            faults.append(TrainingFault(name, f"{found} in the checkpoint", str(kind)))
        layouts[MODEL + name] = own
    parameters = parameter_names(model, optimizer)
    for name, found in saved.items():
        parameter = parameters.get(parameter_of(name)) if name.startswith(OPTIMIZER) else None
        if parameter is not None:
            layouts[name] = parameter if tuple(parameter.shape) == found.shape else None
    shapes = {name.removeprefix(BUFFER): k.shape for name, k in saved.items() if name.startswith(BUFFER)}
    layouts |= {BUFFER + name: own for name, own in buffers_to_restore(model, loss, shapes).items()}
    return RestorePlan(layouts, faults)


def parameter_of(name: str) -> str:
    """The parameter that something of the optimizer's belongs to."""
    return name.removeprefix(OPTIMIZER).rpartition("/")[0]


def restore_model(model: nn.Module, loss: object, pieces: Mapping[str, Tensor], device: torch.device) -> None:
    """Put what was read, laid out as the model is, into the model, and what is the loss's into the loss."""
    own = model_tensors(model)
    found = {name: _laid_out(pieces[MODEL + name], tensor) for name, tensor in own.items()}
    model.load_state_dict(found, strict=False)  # the names were compared; other stages hold the others
    extra_buffers = {name.removeprefix(BUFFER): p for name, p in pieces.items() if name.startswith(BUFFER)}
    restore_buffers(model, loss, extra_buffers, device)


def restore_optimizer(
    model: nn.Module,
    optimizer: optim.Optimizer,
    pieces: Mapping[str, Tensor],
    numbers: Mapping[str, Number],
    *,
    layouts: Mapping[str, Tensor | None],
) -> None:
    """State comes from the checkpoint; options, such as the learning rate, come from the code that runs."""
    parameters = parameter_names(model, optimizer)
    places = {name: place for place, name in enumerate(parameters)}
    state: dict[int, dict[str, Tensor | Number]] = {}
    for name, value in {**pieces, **numbers}.items():
        owner, key = parameter_of(name), name.rpartition("/")[2]
        if not name.startswith(OPTIMIZER) or owner not in places:
            continue
        if isinstance(value, Tensor) and (like := layouts[name]) is not None:
            value = _laid_out(value, like)
        state.setdefault(places[owner], {})[key] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    ordered = list(parameters.values())
    for place, kept in state.items():
        _keep_kinds(optimizer.state[ordered[place]], kept)


def _keep_kinds(now: dict[str, Any], kept: Mapping[str, Tensor | Number]) -> None:
    """Undo what torch does to an optimizer's state: it makes all but the count of steps of the parameter's type."""
    for key, value in kept.items():
        found = now.get(key)
        if key == "step" or not isinstance(value, Tensor) or not isinstance(found, Tensor):
            continue
        if found.dtype != value.dtype:
            now[key] = value.to(found.device)


def _laid_out(piece: Tensor, like: Tensor) -> Tensor:
    """`piece`, which is what this process has of a tensor, as a tensor of the layout of `like`."""
    if not isinstance(like, DTensor):
        return piece
    return DTensor.from_local(
        piece.to(like.device),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
