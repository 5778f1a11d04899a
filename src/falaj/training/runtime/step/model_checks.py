"""Checks of a model and a loss before anything of them is run."""

from __future__ import annotations

from typing import Any

from torch import nn

from falaj.training.runtime.errors import InvalidTraining, TrainingFault
from falaj.training.runtime.step.calling import accepts

SHOWN = 4


def require_trainable(model: object, loss: object) -> None:
    """Raise InvalidTraining with all faults of the model and the loss."""
    faults = model_faults(model)
    faults += loss_faults(loss)
    if isinstance(loss, nn.Module) and isinstance(model, nn.Module):
        faults += loss_parameter_faults(model, loss)
    if faults:
        raise InvalidTraining("this cannot be trained", faults=faults)


def loss_faults(loss: Any) -> list[TrainingFault]:
    """Return a fault unless `loss` is None or a function of the output, or of output and target."""
    if loss is None or (callable(loss) and (accepts(loss, 1) or accepts(loss, 2))):
        return []
    allowed = (
        "a function of the model's output and the target, or of the output; None: the loss in the output"
    )
    given = "a function with other parameters" if callable(loss) else type(loss).__name__
    return [TrainingFault("loss", given, allowed, "loss=torch.nn.functional.mse_loss")]


def loss_parameter_faults(model: nn.Module, loss: nn.Module) -> list[TrainingFault]:
    """Return a fault for trainable parameters of the loss, which the optimizer would not update."""
    own = {id(each) for each in model.parameters()}
    free = [name for name, each in loss.named_parameters() if each.requires_grad and id(each) not in own]
    if not free:
        return []
    fix = "make the loss a part of the model, or loss.requires_grad_(False)"
    return [
        TrainingFault(
            "loss", f"parameters to be trained: {_listed(free)}", "only parameters of the model", fix
        )
    ]


def memory_limit_warning(model: nn.Module, memory: int | None) -> str | None:
    """Return a warning if the memory limit is too low for a model in a single process; None otherwise."""
    trained = sum(each.nbytes for each in model.parameters() if each.requires_grad)
    least = trained + sum(each.nbytes for each in model.parameters())
    if memory is None or memory >= least:
        return None
    return (
        f"memory={memory} cannot be kept: the parameters and their gradients alone take {least} bytes in a single "
        "process. Start several processes with torchrun, or omit memory"
    )


def model_faults(model: object) -> list[TrainingFault]:
    if not isinstance(model, nn.Module):
        return [
            TrainingFault(
                "model", type(model).__name__, "a torch.nn.Module", "nn.Sequential(nn.Linear(4, 1))"
            )
        ]
    if faults := shape_faults(model):
        return faults
    every = list(model.named_parameters())
    if absent := [name for name, each in [*every, *model.named_buffers()] if each.is_meta]:
        fix = 'model.to_empty(device="cpu"), and initialize it; or make it on a device'
        return [
            TrainingFault("model", f"on the meta device, without values: {_listed(absent)}", "values", fix)
        ]
    if not any(each.requires_grad for _, each in every):
        given = "all parameters are frozen" if every else "no parameters"
        allowed = "at least one parameter with requires_grad=True"
        return [TrainingFault("model", given, allowed, "model.requires_grad_(True)")]
    return []


def shape_faults(model: nn.Module) -> list[TrainingFault]:
    """Return a fault if parameters have no shape yet."""
    lazy = [name for name, each in model.named_parameters() if nn.parameter.is_lazy(each)]
    if not lazy:
        return []
    given, fix = f"lazy parameters without a shape: {_listed(lazy)}", "call the model once on a sample first"
    return [TrainingFault("model", given, "known shapes", fix)]


def _listed(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
