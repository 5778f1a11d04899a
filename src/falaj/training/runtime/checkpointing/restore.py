"""Resume a run: compare the newest valid checkpoint with it, and restore it on any layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor

from falaj.training.runtime.checkpointing.position import ANOTHER_RUN, Facts, compare_facts, with_last_fix
from falaj.training.runtime.checkpointing.state import (
    BUFFER,
    MODEL,
    OPTIMIZER,
    Number,
    model_tensors,
    parameter_names,
)
from falaj.training.runtime.errors import CheckpointMismatch, TrainingFault
from falaj.training.runtime.step.non_persistent_buffers import buffers_to_restore, restore_buffers
from falaj.training.runtime.step.parameter_groups import dtype_name
from falaj.training.runtime.step.step import Step

if TYPE_CHECKING:
    from falaj.training.runtime.checkpointing.checkpointer import Checkpointer
    from falaj.training.runtime.checkpointing.storage.manifest import Manifest


@dataclass(frozen=True)
class TensorInfo:
    """Dtype and shape of a whole tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)} {list(self.shape)}"


@dataclass(frozen=True)
class RestorePlan:
    """The tensors that this process reads from a checkpoint, by name: with the layout of the given tensor, or whole."""

    layouts: dict[str, Tensor | None]
    faults: list[TrainingFault]
    """Tensors that are missing in the checkpoint, or have another dtype or shape."""


def restore_newest(
    checkpointer: Checkpointer, step: Step, facts: Facts, *, notify: Callable[[str], None]
) -> tuple[Mapping[str, Any], list[str]] | None:
    """Restore the newest valid checkpoint into the model and optimizer.

    Return its run section and descriptions of changed facts; None if there is no checkpoint.
    """
    layouts: dict[str, Tensor | None] = {}
    differing: list[str] = []

    def choose(manifest: Manifest) -> Mapping[str, Tensor | None]:
        nonlocal layouts, differing
        differing = compare_facts(manifest.run["facts"], facts)
        layouts = compare_tensors(checkpointer, step, manifest)
        return layouts

    found = checkpointer.load(choose, notify=notify)
    if found is None:
        return None
    manifest, pieces = found
    restore_model(step.model, step.loss, pieces, step.device)
    restore_optimizer(step.model, step.optimizer, pieces, manifest.numbers, layouts=layouts)
    step.groups.put(manifest.run.get("groups", ()))
    if step.scaler and manifest.run["scaler"]:
        step.scaler.load_state_dict(manifest.run["scaler"])
    notify(f"resuming after step {manifest.save_id.step}")
    for difference in differing:
        notify(f"not bitwise equal to earlier steps: {difference}")
    return manifest.run, differing


def compare_tensors(checkpointer: Checkpointer, step: Step, manifest: Manifest) -> dict[str, Tensor | None]:
    """Return what this process reads; raise CheckpointMismatch in all processes if one needs another tensor."""
    model, optimizer, saved = step.model, step.optimizer, manifest.all_tensor_infos
    wanted = plan_restore(model, step.loss, optimizer, saved)
    own = wanted.faults, list(model_tensors(model)), list(parameter_names(model, optimizer))
    faults, names, parameters = set[TrainingFault](), set[str](), set[str]()
    for their_faults, their_names, their_parameters in checkpointer.gather(own):
        faults |= set(their_faults)
        names |= set(their_names)
        parameters |= set(their_parameters)
    stored = {name.removeprefix(MODEL) for name in saved if name.startswith(MODEL)}
    faults |= {TrainingFault(name, "not in the model") for name in stored - names}
    if faults:
        ordered = sorted(faults, key=lambda fault: fault.where)
        fixed = with_last_fix(ordered, f"the model that the run started with; or {ANOTHER_RUN}")
        raise CheckpointMismatch("the checkpoint is of another model", faults=fixed)
    compare_optimizers(manifest, type(optimizer).__name__, parameters)
    return wanted.layouts


def compare_optimizers(manifest: Manifest, now: str, parameters: set[str]) -> None:
    """Raise CheckpointMismatch for the state of another optimizer class or of unknown parameters."""
    then = manifest.run["optimizer"]
    kept = {parameter_of(name) for name in manifest.tensor_infos if name.startswith(OPTIMIZER)}
    faults = [TrainingFault(name, "not in the optimizer") for name in sorted(kept - parameters)]
    if then != now:
        faults = [TrainingFault("optimizer", now, then)]
    if faults:
        fixed = with_last_fix(faults, f"the optimizer that the run started with, {then}; or {ANOTHER_RUN}")
        raise CheckpointMismatch("the checkpoint is of another optimizer", faults=fixed)


def plan_restore(
    model: nn.Module, loss: object, optimizer: optim.Optimizer, saved: Mapping[str, TensorInfo]
) -> RestorePlan:
    """Return what this process reads of the `saved` tensors, under all their names."""
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
    """Return the parameter to which an optimizer entry belongs."""
    return name.removeprefix(OPTIMIZER).rpartition("/")[0]


def restore_model(model: nn.Module, loss: object, pieces: Mapping[str, Tensor], device: torch.device) -> None:
    """Load the tensors that were read into the model and the loss."""
    own = model_tensors(model)
    found = {name: _laid_out(pieces[MODEL + name], tensor) for name, tensor in own.items()}
    model.load_state_dict(found, strict=False)  # names were compared before; other stages hold the rest
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
    """Load the optimizer's state; options such as the learning rate come from the running code."""
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
    """Restore the saved dtypes: torch casts an optimizer's state, except the step count, to the parameter's dtype."""
    for key, value in kept.items():
        found = now.get(key)
        if key == "step" or not isinstance(value, Tensor) or not isinstance(found, Tensor):
            continue
        if found.dtype != value.dtype:
            now[key] = value.to(found.device)


def _laid_out(piece: Tensor, like: Tensor) -> Tensor:
    """Return `piece`, this process's part of a tensor, with the layout of `like`."""
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
