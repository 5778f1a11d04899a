"""Refreshes of what makes no event, such as metric points and the load of a server: only while a page is seen."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from nicegui import ui

from falaj.apps.console.page import PageContext
from falaj.errors import FalajError, Unauthenticated

log = logging.getLogger("falaj.console")


def follow(
    context: PageContext,
    refresh: Callable[[], Awaitable[None]],
    *,
    every_s: float,
    going_on: Callable[[], bool] = lambda: True,
) -> ui.timer:
    """Call `refresh` every so many seconds while `going_on` says so and the page is visible."""

    async def tick() -> None:
        if not going_on() or not await context.is_seen():
            return
        try:
            await refresh()
        except Unauthenticated:
            return
        except (
            FalajError
        ) as error:  # a region shows its own errors; a chart stays as it is until the next time
            log.info("what a page follows was not refreshed", extra={"reason": error.message})

    return ui.timer(every_s, tick, immediate=False)
