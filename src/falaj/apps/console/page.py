"""What a page is: its address, the function that draws it, and what it may use while it is open."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar
from urllib.parse import quote, urlencode

from nicegui import background_tasks, ui
from nicegui.client import Client
from starlette.requests import Request

from falaj.apps.console.components.states import error_card
from falaj.apps.console.live import LiveFeed
from falaj.apps.console.sessions import ConsoleSession
from falaj.apps.console.times import Times
from falaj.errors import Denied, FalajError, NotFound, Unauthenticated
from falaj.records.governance.events import Event
from falaj.sdk.platform import Platform

log = logging.getLogger("falaj.console")
T = TypeVar("T")
THREADS = 16
"""Calls to the API at a time, of all sessions; each takes milliseconds."""
ANSWER_S = 3.0
"""A browser that does not answer for so long shows nothing."""
REDRAW_S = 0.5
"""Events are gathered for so long before a region is loaded again."""

_threads = ThreadPoolExecutor(THREADS, thread_name_prefix="api-call")


@dataclass(frozen=True)
class ConsolePage:
    """A page of the console; a module in `pages/` has one as `PAGE`, or several as `PAGES`."""

    path: str
    """Like /w/{workspace}/jobs/{job}; every page of a workspace begins with /w/{workspace}."""
    title: str
    draw: Callable[[PageContext], Awaitable[None]]
    entry: str
    """The entry of the navigation that it belongs to, like "jobs"; see `navigation.ENTRIES`."""
    reads: tuple[str, ...] = ()
    """The operations that it reads with; a test calls them as the least of the roles that may."""
    actions: tuple[str, ...] = ()
    """The operations that its buttons perform: `context.may` tells which the person may."""


@dataclass(eq=False)
class PageContext:
    """One open page of one person. Pages act on the platform through `ask` alone."""

    page: ConsolePage
    session: ConsoleSession
    feed: LiveFeed
    client: Client
    request: Request
    end_session: Callable[[ConsoleSession], None]
    is_dark: bool = False
    workspaces: tuple[str, ...] = ()
    _regions: list[Region[Any]] = field(default_factory=list)

    @property
    def workspace(self) -> str:
        """The workspace in the address."""
        return str(self.request.path_params.get("workspace", ""))

    @property
    def params(self) -> Mapping[str, str]:
        """The parts of the address in braces, like `job`."""
        return self.request.path_params

    @property
    def query(self) -> Mapping[str, str]:
        """What stands after the question mark of the address."""
        return self.request.query_params

    @property
    def times(self) -> Times:
        """Writes times in the person's zone."""
        return Times(self.session.zone)

    def href(self, *parts: str, workspace: str | None = None, **query: str) -> str:
        """Return the address of a page of the workspace: `href("jobs", job.id)`."""
        path = "/".join(("/w", *(quote(part, safe="") for part in (workspace or self.workspace, *parts))))
        kept = {name: value for name, value in query.items() if value}
        return path + (f"?{urlencode(kept)}" if kept else "")

    async def ask(self, call: Callable[[Platform], T]) -> T:
        """Return what an operation answers: `await context.ask(lambda p: p.jobs.show(job))`.

        A refused token ends the session, and the browser goes to the sign-in page.
        """
        loop = asyncio.get_running_loop()
        work = partial(copy_context().run, call, self.session.platform)
        try:
            return await loop.run_in_executor(_threads, work)
        except Unauthenticated:
            self.end_session(self.session)
            raise

    async def act(self, call: Callable[[Platform], T], *, done: str | Callable[[T], str]) -> T | None:
        """Perform an operation for a button: notify of `done`, or show the error in the platform's words."""
        try:
            result = await self.ask(call)
        except FalajError as error:
            with self.client.content, ui.dialog(value=True) as dialog, ui.card().classes("wide-card"):
                error_card(error)
                ui.button("Close", on_click=dialog.close).props("flat autofocus")
            return None
        ui.notify(done if isinstance(done, str) else done(result), type="positive")
        return result

    async def may(self, object: str | None = None) -> frozenset[str]:
        """Return those of the page's `actions` that the person may perform on an object; by default on the workspace.

        Draw no button for the others. The API refuses them in any case.
        """
        target = object or f"workspace:{self.workspace}"
        if not self.page.actions:
            return frozenset()
        try:
            return frozenset(await self.ask(lambda p: p.policies.allowed(self.page.actions, target)))
        except (Denied, NotFound):
            return frozenset()

    async def region(
        self,
        load: Callable[[], Awaitable[T]],
        draw: Callable[[T], None],
        *,
        events: Iterable[str] = (),
        every_s: float | None = None,
        gather_s: float = REDRAW_S,
    ) -> Region[T]:
        """Load a view-model and draw it here; again when an event of these types comes and the view-model differs.

        `events` are operations or groups of them, like ("jobs.*", "nodes.cordon"). `every_s` is for what makes no
        event, like the load of a machine. Events are gathered for `gather_s` before it is loaded again: longer for a
        page that many people look at, and that asks for much.
        """
        region = Region(self, load, draw, gather_s)
        self._regions.append(region)
        await region.refresh()
        if events := tuple(events):
            stop = self.feed.listen(self.workspace, events, region.notice)
            self.client.on_delete(stop)
        if every_s is not None:

            async def refresh_if_seen() -> None:
                if await self.is_seen():
                    await region.refresh()

            ui.timer(every_s, refresh_if_seen, immediate=False)
        return region

    async def is_seen(self) -> bool:
        """Ask the browser whether the page is visible: in a tab behind others it is not."""
        try:
            found = await self.client.run_javascript("document.visibilityState", timeout=ANSWER_S)
        except TimeoutError:
            return False
        return bool(found == "visible")

    def on_events(self, events: Iterable[str], handle: Callable[[Event], None]) -> None:
        """Call `handle` in the page's loop for each event of these types, while the page is open."""

        def safely(event: Event) -> None:
            with self.client:
                handle(event)

        self.client.on_delete(self.feed.listen(self.workspace, tuple(events), safely))


class Region(Generic[T]):
    """A part of a page that is drawn from a view-model, and drawn again when that has changed."""

    def __init__(
        self,
        context: PageContext,
        load: Callable[[], Awaitable[T]],
        draw: Callable[[T], None],
        gather_s: float = REDRAW_S,
    ) -> None:
        self._context = context
        self._load, self._draw = load, draw
        self._gather_s = gather_s
        self._box = ui.element("div").classes("region")
        self._shown: tuple[T] | None = None
        self._loading = asyncio.Lock()
        self._is_waiting = False

    async def refresh(self) -> None:
        """Load the view-model, and draw it unless it is the one that is shown."""
        async with self._loading:
            try:
                found = await self._load()
            except Unauthenticated:
                return
            except FalajError as error:
                self._shown = None
                self._box.clear()
                with self._box:
                    error_card(error)
                return
            if self._context.client.is_deleted or self._shown == (found,):
                return
            self._shown = (found,)
            self._box.clear()
            with self._box:
                self._draw(found)

    def notice(self, _event: Event) -> None:
        """Refresh soon; further events until then cost nothing."""
        if not self._is_waiting:
            self._is_waiting = True
            background_tasks.create(self._refresh_soon(), name="redraw")

    async def _refresh_soon(self) -> None:
        await asyncio.sleep(self._gather_s)
        self._is_waiting = False
        if not self._context.client.is_deleted:
            await self.refresh()
