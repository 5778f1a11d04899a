"""Waiting for something that happens in another thread or process, with a deadline instead of a sleep."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


PATIENCE = 5
"""How much slower than an idle machine one may be beside other work."""


def eventually(condition: Callable[[], T], within: float = 5.0, every: float = 0.01) -> T:
    """Return the first true value of `condition`, called every `every` seconds.

    It fails after `within` seconds, as they pass on an idle machine: on a busy one it waits longer.
    An AssertionError in `condition` counts as "not yet", and is shown if the deadline passes.
    """
    deadline = time.monotonic() + within * PATIENCE
    while True:
        value, failure = attempt(condition)
        if value:
            return value
        if time.monotonic() >= deadline:
            name = getattr(condition, "__name__", repr(condition))
            raise AssertionError(
                f"{name} did not hold within {within * PATIENCE} s; last value: {value!r}"
            ) from failure
        time.sleep(every)


def attempt(condition: Callable[[], T]) -> tuple[T | None, AssertionError | None]:
    try:
        return condition(), None
    except AssertionError as failure:
        return None, failure
