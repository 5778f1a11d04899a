"""How much of the API one caller may occupy at a time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio


class CallerLimits:
    """Lets each caller do `most` things of a kind at a time; further ones wait for the caller's own."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._limiters: dict[str, anyio.CapacityLimiter] = {}

    @asynccontextmanager
    async def slot(self, caller: str) -> AsyncIterator[None]:
        limiter = self._limiters.get(caller)
        if limiter is None:
            limiter = self._limiters[caller] = anyio.CapacityLimiter(self._most)
        try:
            async with limiter:
                yield
        finally:
            if not limiter.borrowed_tokens and not limiter.statistics().tasks_waiting:
                self._limiters.pop(caller, None)
