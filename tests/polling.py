"""Waiting for something that happens in another thread or process, with a limit instead of a sleep."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


PATIENCE_S = 300.0
"""The limit of every wait for a condition in the tests: what takes longer, also on a busy machine, has failed."""

A_MOMENT_S = 0.3
"""How long a test waits for what may never come, so that it can come first; the test holds either way."""


def eventually(condition: Callable[[], T], *, every: float | None = None) -> T:
    """Return the first true value of `condition`; fail after `PATIENCE_S`.

    The pauses between two calls grow from 10 ms to a second. `every` keeps them at that many seconds, for a state
    that is soon over. An AssertionError in `condition` counts as "not yet", and is shown if the limit is reached.
    """
    began = time.monotonic()
    while True:
        value, failure = attempt(condition)
        if value:
            return value
        waited = time.monotonic() - began
        if waited >= PATIENCE_S:
            raise _never_held(condition, value) from failure
        time.sleep(min(max(0.01, waited / 20), 1.0) if every is None else every)


async def eventually_async(condition: Callable[[], T]) -> T:
    """Return the first true value of `condition`, and let the event loop run meanwhile; fail after `PATIENCE_S`."""
    began, turns = time.monotonic(), 0
    while not (value := condition()):
        waited, turns = time.monotonic() - began, turns + 1
        if waited >= PATIENCE_S:
            raise _never_held(condition, value)
        await asyncio.sleep(0 if turns <= 10 else min(max(0.001, waited / 20), 1.0))
    return value


def let_pass(seconds: float) -> None:
    """Take at least so long: as slow code does, until a limit of the product is over, or up to an arbitrary kill.

    It waits for no condition, and the test holds however much longer it takes.
    """
    time.sleep(seconds)


def attempt(condition: Callable[[], T]) -> tuple[T | None, AssertionError | None]:
    try:
        return condition(), None
    except AssertionError as failure:
        return None, failure


def _never_held(condition: Callable[[], object], value: object) -> AssertionError:
    name = getattr(condition, "__name__", repr(condition))
    return AssertionError(f"{name} did not hold for {PATIENCE_S} s; last value: {value!r}")
