"""What an optimizer counts, or somebody changes, in its parameter groups while it trains: state, unlike its options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import optim

from falaj.training.runtime.state import Number

Numbers = dict[str, Number]


class GroupState:
    """Numbers of the groups that are not what the optimizer was made with; options come from the code that runs."""

    def __init__(self, optimizer: optim.Optimizer, *, has_schedule: bool) -> None:
        """Where there `has_schedule` of ours, it sets the learning rates: they are no state."""
        self._optimizer = optimizer
        self._scheduled = {"lr"} if has_schedule else set[str]()
        self._made_with = [_numbers(group) for group in optimizer.param_groups]

    def changed(self) -> list[Numbers]:
        """Of each group, what is not as it was made."""
        now = [_numbers(group) for group in self._optimizer.param_groups]
        return [
            {
                name: value
                for name, value in group.items()
                if name not in self._scheduled and (name not in made or made[name] != value)
            }
            for group, made in zip(now, self._made_with, strict=False)
        ]

    def put(self, kept: Sequence[Mapping[str, Number]]) -> None:
        """Go on with what `changed` said then; it stays state from here on."""
        for group, made, values in zip(self._optimizer.param_groups, self._made_with, kept, strict=False):
            group.update(values)
            for name in values:
                made.pop(name, None)


def _numbers(group: Mapping[str, Any]) -> Numbers:
    return {name: value for name, value in group.items() if isinstance(value, int | float | str)}
