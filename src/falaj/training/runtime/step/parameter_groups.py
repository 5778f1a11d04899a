"""Values in an optimizer's parameter groups that change during training: they are state, unlike its options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, optim

Value: TypeAlias = Any
"""A number, string or list of values; or a tensor as {"tensor": numbers, "dtype": name}, for JSON."""

Values = dict[str, Value]

NO_OPTIONS = ("params", "param_names")


class ParameterGroupState:
    """The group values that differ from those at creation; options come from the running code."""

    def __init__(self, optimizer: optim.Optimizer, *, has_schedule: bool) -> None:
        """With `has_schedule` the learning rates are set by the schedule and are not state."""
        self._optimizer = optimizer
        self._scheduled = {"lr"} if has_schedule else set[str]()
        self._made_with = [group_values(group) for group in optimizer.param_groups]

    def changed(self) -> list[Values]:
        """Return the changed values of each group."""
        now = [group_values(group) for group in self._optimizer.param_groups]
        return [
            {
                name: value
                for name, value in group.items()
                if name not in self._scheduled and (name not in made or made[name] != value)
            }
            for group, made in zip(now, self._made_with, strict=False)
        ]

    def put(self, kept: Sequence[Mapping[str, Value]]) -> None:
        """Restore the values that `changed` returned; they stay state from now on."""
        for group, made, values in zip(self._optimizer.param_groups, self._made_with, kept, strict=False):
            for name, value in values.items():
                group[name] = restore_value(value, group.get(name))
                made.pop(name, None)


def group_values(group: Mapping[str, Any]) -> Values:
    """Return the values of a parameter group that can be stored."""
    found = {name: storable_value(value) for name, value in group.items() if name not in NO_OPTIONS}
    return {name: value for name, value in found.items() if value is not None}


def storable_value(value: object) -> Value | None:
    """Return the stored form of `value`; None for other types."""
    if isinstance(value, int | float | str):
        return value
    if isinstance(value, Tensor):
        is_one = value.numel() == 1 and not value.is_complex()
        return {"tensor": value.tolist(), "dtype": dtype_name(value.dtype)} if is_one else None
    if isinstance(value, tuple | list):
        forms = [storable_value(each) for each in value]
        return None if None in forms else forms
    return None


def restore_value(kept: Value, now: object) -> object:
    """Return the `kept` value with the type of the current one; a tensor is filled in place, as others may hold it."""
    if isinstance(kept, list):
        before = now if isinstance(now, tuple | list) and len(now) == len(kept) else [None] * len(kept)
        found = [restore_value(value, old) for value, old in zip(kept, before, strict=True)]
        return found if isinstance(now, list) else tuple(found)
    if isinstance(kept, Mapping):
        kept = torch.tensor(kept["tensor"], dtype=getattr(torch, kept["dtype"]))
    if isinstance(now, Tensor) and isinstance(kept, Tensor | int | float):
        with torch.no_grad():
            return now.copy_(torch.as_tensor(kept).reshape(now.shape))
    return kept


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of `dtype` without the prefix of torch."""
    return str(dtype).removeprefix("torch.")
