"""What a page is: its address, the function that draws it, and what it may use while it is open."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar
from urllib.parse import quote, urlencode

from nicegui import background_tasks, ui
from nicegui.client import Client
from starlette.requests import Request

from falaj.apps.console.components.states import error_card
from falaj.apps.console.live import Handler, LiveFeed
from falaj.apps.console.sessions import ConsoleSession
from falaj.apps.console.times import Times
from falaj.errors import Denied, FalajError, NotFound, Unauthenticated
from falaj.records.governance.events import Event
from falaj.sdk.platform import Platform

log = logging.getLogger("falaj.console")
T = TypeVar("T")
THREADS = 16
"""Calls to the API at a time, of all sessions; each takes milliseconds."""
SOON_S = 0.2
"""The first notices after a while are gathered for so long."""
REDRAW_S = 0.5
"""A region is loaded again at most this often, unless it says otherwise."""
MOST_FOLLOWED = 200
"""Objects that one part of a page follows; a table of more rows follows the first ones."""

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
    is_visible: bool = True
    """Whether the browser shows the page: it tells when that changes."""
    _listeners: list[_Listener] = field(default_factory=list)

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
        objects: Callable[[T], Iterable[str]] | None = None,
        gather_s: float = REDRAW_S,
    ) -> Region[T]:
        """Load a view-model and draw it here; again when what it shows has changed and the view-model differs.

        `events` are operations or groups of them, like ("jobs.*", "nodes.cordon"). `objects` returns the ids of what
        the page shows and that changes without an event, like a run that gets points.
        """
        region = Region(Drawing(self, draw), load)
        await region.refresh()

        def followed() -> Iterable[str]:
            shown = region.drawing.shown
            return () if shown is None or objects is None else objects(shown[0])

        self.live(region.refresh, events=events, objects=followed, gather_s=gather_s)
        return region

    def live(
        self,
        refresh: Callable[[], Awaitable[None]],
        *,
        events: Iterable[str] = (),
        objects: Callable[[], Iterable[str]] = tuple,
        workspace: str | None = None,
        gather_s: float = REDRAW_S,
    ) -> None:
        """Call `refresh` when an event of these types comes or one of these objects changes, while the page is open.

        Not more often than every `gather_s`: seldom for what many people look at, and asks for much. A page that nobody
        sees, in a tab behind others, is refreshed once it is seen again.
        """
        listener = _Listener(self, refresh, tuple(events), objects, workspace or self.workspace, gather_s)
        self._listeners.append(listener)
        listener.listen()
        self.client.on_delete(listener.stop)

    def on_notices(self, handle: Handler, *, events: Iterable[str], workspace: str | None = None) -> None:
        """Call `handle` with each event of these types, while the page is open; with none where some may be missing."""
        self.client.on_delete(self.feed.listen(workspace or self.workspace, tuple(events), handle))

    def set_visible(self, is_visible: bool) -> None:
        """Note whether somebody sees the page; what changed meanwhile is loaded once it is seen again."""
        self.is_visible = is_visible
        if is_visible:
            for listener in self._listeners:
                listener.catch_up()


class Drawing(Generic[T]):
    """A view-model that is drawn, and drawn again when another is to be shown."""

    def __init__(self, context: PageContext, draw: Callable[[T], None]) -> None:
        self._context = context
        self._draw = draw
        self._box = ui.element("div").classes("region")
        self.shown: tuple[T] | None = None
        """The view-model that is drawn; none before the first, and while an error is drawn."""

    def show(self, found: T) -> None:
        """Draw a view-model, unless it is the one that is shown."""
        if self._context.client.is_deleted or self.shown == (found,):
            return
        self.shown = (found,)
        self._box.clear()
        with self._box:
            self._draw(found)

    def show_error(self, error: FalajError) -> None:
        """Draw an error instead."""
        self.shown = None
        self._box.clear()
        with self._box:
            error_card(error)


class Region(Generic[T]):
    """A part of a page that is loaded as a view-model, and loaded again when that may have changed."""

    def __init__(self, drawing: Drawing[T], load: Callable[[], Awaitable[T]]) -> None:
        self.drawing = drawing
        self._load = load
        self._loading = asyncio.Lock()

    async def refresh(self) -> None:
        """Load the view-model, and draw it unless it is the one that is shown."""
        async with self._loading:
            try:
                self.drawing.show(await self._load())
            except Unauthenticated:
                return
            except FalajError as error:
                self.drawing.show_error(error)


class _Listener:
    """Refreshes a part of a page on notices: at most once in a while, and only while somebody sees the page."""

    def __init__(
        self,
        context: PageContext,
        refresh: Callable[[], Awaitable[None]],
        events: tuple[str, ...],
        objects: Callable[[], Iterable[str]],
        workspace: str,
        gather_s: float,
    ) -> None:
        self._context = context
        self._refresh = refresh
        self._events, self._objects, self._workspace = events, objects, workspace
        self._gather_s = gather_s
        self._followed: tuple[str, ...] | None = None
        self._forget: Callable[[], None] = lambda: None
        self._is_waiting = self._is_stale = False
        self._refreshed_at = 0.0

    def listen(self) -> None:
        """Listen, or follow other objects than before."""
        wanted = tuple(sorted(set(self._objects())))[:MOST_FOLLOWED]
        if wanted == self._followed or not (self._events or wanted):
            return
        before, self._followed = self._forget, wanted
        feed = self._context.feed
        self._forget = feed.listen(self._workspace, self._events, self._notice, objects=wanted)
        before()

    def stop(self) -> None:
        self._forget()

    def catch_up(self) -> None:
        """Refresh, if there were notices while nobody saw the page."""
        if self._is_stale:
            self._notice(None)

    def _notice(self, _event: Event | None) -> None:
        """Refresh soon; further notices until then cost nothing."""
        if not self._context.is_visible:
            self._is_stale = True
        elif not self._is_waiting:
            self._is_waiting = True
            background_tasks.create(self._refresh_soon(), name="redraw")

    async def _refresh_soon(self) -> None:
        await asyncio.sleep(max(SOON_S, self._refreshed_at + self._gather_s - time.monotonic()))
        self._refreshed_at = time.monotonic()
        self._is_waiting = self._is_stale = False
        if self._context.client.is_deleted:
            return
        try:
            await self._refresh()
        except Unauthenticated:
            return
        except (
            FalajError
        ) as error:  # a region shows its own errors; a chart stays as it is until the next time
            log.info("a page was not refreshed", extra={"reason": error.message})
        if not self._context.client.is_deleted:
            self.listen()
