"""The tensors of a run that this process holds, under global names.

`model/<fully qualified name>`, `optimizer/<fully qualified parameter name>/<key>`, and `buffer/<fully qualified name>`
for buffers outside the model's state_dict (non_persistent_buffers.py). A tensor has the same name on every layout.
Tensors on the meta device are held by another process; DTensors stay DTensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor

from falaj.training.runtime.errors import InvalidTraining, TrainingFault

MODEL, OPTIMIZER, BUFFER = "model/", "optimizer/", "buffer/"

Number: TypeAlias = int | float | str | None


@dataclass(frozen=True)
class CheckpointState:
    """The state of this process in a checkpoint."""

    tensors: dict[str, Tensor]
    """Each tensor once, under the first of its names."""
    shared: dict[str, str]
    """Further names of the same memory, such as those of tied parameters, mapped to the first name."""
    numbers: dict[str, Number]
    """Values of the optimizer's state that are not tensors, by name."""
    updated: frozenset[str]
    """Tensors that only the optimizer's update changes; others may change in a forward pass."""


def collect_state(
    model: nn.Module, optimizer: optim.Optimizer, extra_buffers: Mapping[str, Tensor] | None = None
) -> CheckpointState:
    """Return the state of a run without copying it, including `extra_buffers`."""
    tensors: dict[str, Tensor] = {}
    shared: dict[str, str] = {}
    numbers: dict[str, Number] = {}
    seen: dict[tuple[Any, ...], str] = {}
    own = {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
    named_tensors = [(MODEL + name, name, tensor) for name, tensor in model_tensors(model).items()]
    named_tensors += [(BUFFER + name, name, tensor) for name, tensor in (extra_buffers or {}).items()]
    for named, name, tensor in named_tensors:
        first = seen.setdefault(_place(own.get(name, named), tensor), named)
        if first == named:
            tensors[named] = tensor
        else:
            shared[named] = first
    moved = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    places = {_place(id(parameter), parameter) for parameter in moved}
    updated = {name for place, name in seen.items() if place in places}
    for name, value in _optimizer_values(model, optimizer):
        if isinstance(value, Tensor):
            tensors[name] = value
            updated.add(name)
        else:
            numbers[name] = value
    _require_dense(tensors)
    return CheckpointState(tensors, shared, numbers, frozenset(updated))


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers that this process holds, by name; tied ones under each name."""
    state: Mapping[str, Any] = model.state_dict()
    faults = [
        TrainingFault(n, type(v).__name__, "tensors") for n, v in state.items() if not isinstance(v, Tensor)
    ]
    if faults:
        raise InvalidTraining("the model's state cannot be saved without pickle", faults=faults)
    return {name: tensor for name, tensor in state.items() if tensor.device.type != "meta"}


def parameter_names(model: nn.Module, optimizer: optim.Optimizer) -> dict[str, nn.Parameter]:
    """Return the optimizer's parameters in order, by name; one that is not the model's is named by its position."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    ordered = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {names.get(id(each), f"#{place}"): each for place, each in enumerate(ordered)}


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this process's part of `tensor`."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _optimizer_values(model: nn.Module, optimizer: optim.Optimizer) -> Iterator[tuple[str, Any]]:
    names = list(parameter_names(model, optimizer))
    for place, values in optimizer.state_dict()["state"].items():
        for key, value in values.items():
            name = f"{OPTIMIZER}{names[place]}/{key}"
            if not isinstance(value, Tensor | int | float | str | None):
                fault = TrainingFault(name, type(value).__name__, "tensors and numbers")
                raise InvalidTraining("the optimizer's state cannot be saved without pickle", faults=[fault])
            yield name, value


def _place(owner: object, tensor: Tensor) -> tuple[Any, ...]:
    """Return a key that is equal for views of the same memory; for empty tensors, for the same `owner`."""
    own = local_tensor(tensor.detach())
    if own.layout is not torch.strided or not own.numel():
        return (owner,)
    return own.device, own.data_ptr(), own.dtype, tuple(own.shape), own.stride(), tuple(tensor.shape)


def _require_dense(tensors: Mapping[str, Tensor]) -> None:
    faults = [
        TrainingFault(name, f"{tensor.layout} on {tensor.device}", "dense tensors")
        for name, tensor in tensors.items()
        if tensor.layout is not torch.strided or tensor.is_quantized
    ]
    if faults:
        raise InvalidTraining("the tensors cannot be saved in a checkpoint", faults=faults)
