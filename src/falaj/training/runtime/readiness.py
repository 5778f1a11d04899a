"""Whether a model and a loss can be trained, seen before anything of them is run."""

from __future__ import annotations

from torch import nn

from falaj.training.runtime.errors import Fault, InvalidTraining

SHOWN = 4


def require_ready(model: object, loss: object) -> None:
    """InvalidTraining with all that is wrong: no module, parameters without values, a loss that is no function."""
    faults = model_faults(model)
    if not callable(loss):
        allowed = "a function of the model's output and the target"
        faults.append(Fault("loss", type(loss).__name__, allowed, "loss=torch.nn.functional.mse_loss"))
    if faults:
        raise InvalidTraining("this cannot be trained", faults=faults)


def model_faults(model: object) -> list[Fault]:
    if not isinstance(model, nn.Module):
        return [Fault("model", type(model).__name__, "a torch.nn.Module", "nn.Sequential(nn.Linear(4, 1))")]
    every = list(model.named_parameters())
    if lazy := [name for name, each in every if nn.parameter.is_lazy(each)]:
        fix = "call the model once on a sample before"
        return [Fault("model", f"lazy parameters without a shape: {_listed(lazy)}", "known shapes", fix)]
    if absent := [name for name, each in [*every, *model.named_buffers()] if each.is_meta]:
        fix = 'model.to_empty(device="cpu"), and initialize it; or make it on a device'
        return [Fault("model", f"on the meta device, without values: {_listed(absent)}", "values", fix)]
    if not any(each.requires_grad for _, each in every):
        given = "all parameters are frozen" if every else "no parameters"
        allowed = "at least one parameter with requires_grad=True"
        return [Fault("model", given, allowed, "model.requires_grad_(True)")]
    return []


def _listed(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
