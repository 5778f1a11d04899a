"""The state of a step that a loop keeps by itself: put back only where it belongs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn, optim

from falaj.training.runtime.errors import CheckpointMismatch, TrainingFault


def with_plain_rates(state: dict[str, Any]) -> dict[str, Any]:
    """`state` of an optimizer with learning rates as numbers, also where a graph reads them from tensors."""
    groups = [{**group, "lr": float(group["lr"])} for group in state["param_groups"]]
    return {**state, "param_groups": groups}


def put_into_model(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise CheckpointMismatch(f"the state is of another model: {error}") from error


def put_into_optimizer(optimizer: optim.Optimizer, saved: Mapping[str, Any]) -> None:
    groups: list[dict[str, Any]] = optimizer.state_dict()["param_groups"]
    kind, theirs = type(optimizer).__name__, saved["param_groups"]
    sizes = [[len(group["params"]) for group in each] for each in (groups, theirs)]
    if saved["class"] != kind or sizes[0] != sizes[1]:
        fault = TrainingFault(
            "optimizer", f"{kind} of {sizes[0]} parameters", f"{saved['class']} of {sizes[1]}"
        )
        raise CheckpointMismatch("the state is of another optimizer", faults=[fault])
    for own, their in zip(groups, theirs, strict=True):
        own |= {name: their[name] for name in ("lr", "initial_lr") if name in their}
    optimizer.load_state_dict({"state": saved["state"], "param_groups": groups})
