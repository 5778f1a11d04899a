"""What a run must remember to go on exactly where it was: captured, verified, and put back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor, nn, optim

from falaj.training.runtime.agent import Agent
from falaj.training.runtime.checkpoint_format import Contents, decode, encode
from falaj.training.runtime.errors import CheckpointDamaged, CheckpointMismatch, Fault, InvalidTraining
from falaj.training.runtime.spread.tensors import laid_out, whole
from falaj.training.runtime.steps import Step

Facts = Mapping[str, int | str | bool]

ADDRESSING = ("seed", "batch_size", "samples", "drop_last")
"""Facts that define which samples a step sees; a run cannot go on under others."""


@dataclass(frozen=True)
class Position:
    """Where a run stands, besides its tensors. Step 0 is the beginning."""

    step: int = 0
    ledger: str | None = None
    best_step: int | None = None
    best_score: float | None = None
    stale: int = 0


def capture(step: Step, position: Position, facts: Facts) -> list[memoryview]:
    """The checkpoint of a run that stands at `position`."""
    tensors = {f"model/{name}": whole(tensor) for name, tensor in _model_state(step.model).items()}
    numbers: dict[str, Any] = {}
    for place, name, value in _optimizer_state(step.optimizer):
        if isinstance(value, Tensor):
            tensors[f"optimizer/{place}/{name}"] = whole(value)
        else:
            numbers[f"{place}/{name}"] = value
    manifest = {
        "position": asdict(position),
        "facts": dict(facts),
        "optimizer": {"class": type(step.optimizer).__name__, "numbers": numbers},
        "scaler": step.scaler.state_dict() if step.scaler else None,
    }
    return encode(manifest, tensors)


def newest(agent: Agent) -> bytearray | None:
    """The newest checkpoint that verifies, or None if there is none; a damaged one is skipped with a word."""
    steps = agent.checkpoint_steps()
    for step in steps:
        try:
            data = agent.load_checkpoint(step)
            decode(data)
            return data
        except CheckpointDamaged as damage:
            agent.say(f"skipped the checkpoint of step {step}: {damage.message}")
    if steps:
        raise CheckpointDamaged(f"none of the checkpoints verifies (steps {', '.join(map(str, steps))})")
    return None


def restore(contents: Contents, step: Step, facts: Facts) -> tuple[Position, list[str]]:
    """Put `contents` into the model and optimizer of `step`; with what differs now, but does no harm."""
    manifest = contents.manifest
    differing = _compare_facts(manifest["facts"], facts)
    _restore_model(step.model, _below("model/", contents.tensors))
    _restore_optimizer(step.optimizer, manifest["optimizer"], _below("optimizer/", contents.tensors))
    if step.scaler and manifest["scaler"]:
        step.scaler.load_state_dict(manifest["scaler"])
    return Position(**manifest["position"]), differing


def _compare_facts(then: Facts, now: Facts) -> list[str]:
    changed = [name for name in now if then.get(name) != now[name]]
    faults = [Fault(name, now[name], str(then.get(name))) for name in changed if name in ADDRESSING]
    if faults:
        raise CheckpointMismatch(
            "the checkpoint belongs to a run over other batches; undo the change, or start a new run",
            faults=faults,
        )
    return [f"{name} is {now[name]}, was {then.get(name)}" for name in changed]


def _restore_model(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    own = _model_state(model)
    faults = [Fault(name, "not in the checkpoint") for name in own.keys() - saved.keys()]
    faults += [Fault(name, "not in the model") for name in saved.keys() - own.keys()]
    for name in own.keys() & saved.keys():
        if own[name].shape != saved[name].shape or own[name].dtype != saved[name].dtype:
            faults.append(Fault(name, f"{_kind(saved[name])} in the checkpoint", f"{_kind(own[name])}"))
    if faults:
        faults.sort(key=lambda fault: fault.where)
        raise CheckpointMismatch("the checkpoint is of another model", faults=faults)
    model.load_state_dict({name: laid_out(tensor, like=own[name]) for name, tensor in saved.items()})


def _restore_optimizer(
    optimizer: optim.Optimizer, saved: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """State comes from the checkpoint; options, such as the learning rate, come from the code that runs."""
    if saved["class"] != (kind := type(optimizer).__name__):
        raise CheckpointMismatch(
            "the checkpoint is of another optimizer", faults=[Fault("optimizer", kind, saved["class"])]
        )
    state: dict[int, dict[str, Any]] = {}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for key, value in {**tensors, **saved["numbers"]}.items():
        place, _, name = key.partition("/")
        if isinstance(value, Tensor):
            own = parameters[int(place)]
            # frombuffer shares the memory of the file's bytes; the optimizer must own what it changes
            value = laid_out(value.clone(), like=own) if value.shape == own.shape else value.clone()
        state.setdefault(int(place), {})[name] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _model_state(model: nn.Module) -> dict[str, Tensor]:
    state: dict[str, Any] = model.state_dict()
    faults = [Fault(n, type(v).__name__, "tensors") for n, v in state.items() if not isinstance(v, Tensor)]
    if faults:
        raise InvalidTraining("the model's state cannot be kept without pickle", faults=faults)
    return state


def _optimizer_state(optimizer: optim.Optimizer) -> Iterable[tuple[int, str, Any]]:
    """What the optimizer keeps: the parameter's place, the name, and a tensor or number."""
    for place, values in optimizer.state_dict()["state"].items():
        for name, value in values.items():
            if not isinstance(value, Tensor | int | float | str | None):
                where = f"optimizer/{place}/{name}"
                faults = [Fault(where, type(value).__name__, "tensors and numbers")]
                raise InvalidTraining("the optimizer's state cannot be kept without pickle", faults=faults)
            yield place, name, value


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
