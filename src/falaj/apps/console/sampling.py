"""Samples of what is measured and makes no event, such as the load of a server: one question for all who look at it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from nicegui import background_tasks

from falaj.apps.console.page import PageContext
from falaj.errors import Denied, FalajError, NotFound, Unauthenticated
from falaj.sdk.platform import Platform

log = logging.getLogger("falaj.console")
T = TypeVar("T")


@dataclass(eq=False)
class _Viewer:
    """An open page that takes samples; `ask` is what it would ask itself."""

    context: PageContext
    ask: Callable[[Platform], Any]
    take: Callable[[Any], None]
    may_ask: bool = False
    """Whether it has asked once itself: it gets answers to others only then."""


@dataclass(eq=False)
class _Sampler:
    """Asks as one of the viewers after the other, so that each is found out who may no longer ask."""

    every_s: float
    viewers: list[_Viewer] = field(default_factory=list)
    turn: int = 0

    async def run(self) -> None:
        while self.viewers:
            await self._sample()
            await asyncio.sleep(self.every_s)

    async def _sample(self) -> None:
        """Ask once, as a viewer who sees the page, and give the answer to all who do."""
        while seeing := [each for each in self.viewers if each.context.is_visible]:
            self.turn += 1
            new = [each for each in seeing if not each.may_ask]
            asking = new[0] if new else seeing[self.turn % len(seeing)]
            try:
                found = await asking.context.ask(asking.ask)
                asking.may_ask = True
            except (Denied, NotFound, Unauthenticated):
                self.leave(asking)
                continue
            except FalajError as error:
                log.info("a sample was not taken", extra={"reason": error.message})
                return
            if len(new) > 1:
                continue
            for each in seeing:
                if each in self.viewers and not each.context.client.is_deleted:
                    each.take(found)
            return

    def leave(self, viewer: _Viewer) -> None:
        if viewer in self.viewers:
            self.viewers.remove(viewer)


_samplers: dict[Hashable, _Sampler] = {}


def sample_together(
    context: PageContext,
    key: Hashable,
    ask: Callable[[Platform], T],
    take: Callable[[T], None],
    *,
    every_s: float,
) -> None:
    """Call `take` with a sample every so many seconds, while the page is open and seen.

    All pages with the same `key` share one question: what `ask` returns must be the same for all who may ask it.
    """
    sampler, viewer = _samplers.get(key), _Viewer(context, ask, take)
    if sampler is None:
        sampler = _samplers[key] = _Sampler(every_s)
        background_tasks.create(_run(key, sampler), name="sampler")
    sampler.viewers.append(viewer)
    context.client.on_delete(lambda: sampler.leave(viewer))


async def _run(key: Hashable, sampler: _Sampler) -> None:
    try:
        await asyncio.sleep(0)  # the first viewer enters
        await sampler.run()
    finally:
        if _samplers.get(key) is sampler:
            del _samplers[key]
