"""The order of a stage's work on the micro-batches of a step: one forward, one backward (1F1B)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

ScheduledPass = tuple[Literal["forward", "backward"], int]


def schedule_1f1b(parts: int, *, later_stages: int) -> Iterator[ScheduledPass]:
    """The turns of a stage with `behind` stages after it. At most `behind + 1` micro-batches are under way at once.

    Each stage goes through the micro-batches in order, forward and backward, so gradients add up as in one process.
    """
    ahead = min(parts, later_stages)
    yield from (("forward", number) for number in range(ahead))
    for number in range(parts - ahead):
        yield "forward", ahead + number
        yield "backward", number
    yield from (("backward", number) for number in range(parts - ahead, parts))
