"""Events and changes for open pages: one stream of the API for each session, workspace and set of followed objects."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from falaj.errors import Denied, FalajError, InvalidInput, NotFound, Unauthenticated
from falaj.governance.operations.caller import start_thread
from falaj.records.governance.events import Event
from falaj.sdk.platform import Platform

log = logging.getLogger("falaj.console")
PREFIX = "falaj."
LINGER_S = 10.0
"""A stream goes on for so long without a listener: the next page is often of the same workspace."""
RETRY_S = (0.5, 1.0, 2.0, 5.0)

Handler = Callable[[Event | None], None]
"""Gets an event; none: the stream has begun, or an object that is followed has changed without an event."""


def matches(event: Event, patterns: tuple[str, ...]) -> bool:
    """Tell whether an event is of one of these types: jobs.submit, jobs.* or *."""
    name = event.type.removeprefix(PREFIX)
    return any(each in ("*", name, f"{name.partition('.')[0]}.*") for each in patterns)


@dataclass(eq=False)
class _Stream:
    """The listeners of one workspace who follow the same objects."""

    workspace: str
    objects: tuple[str, ...]
    listeners: dict[object, tuple[tuple[str, ...], Handler]] = field(default_factory=dict)
    stop: threading.Event = field(default_factory=threading.Event)
    ending: asyncio.TimerHandle | None = None


class LiveFeed:
    """The events that one person sees, handed to the pages that listen. All methods are called in the loop."""

    def __init__(self, platform: Platform, *, on_refused: Callable[[], None]) -> None:
        """`on_refused` is called in the loop when the token is no longer accepted."""
        self._platform = platform
        self._on_refused = on_refused
        self._streams: dict[tuple[str, tuple[str, ...]], _Stream] = {}

    def listen(
        self, workspace: str, patterns: tuple[str, ...], handle: Handler, *, objects: tuple[str, ...] = ()
    ) -> Callable[[], None]:
        """Call `handle` for events of a workspace and changes of objects until the returned function is called."""
        stream = self._streams.get((workspace, objects))
        if stream is None:
            stream = self._streams[workspace, objects] = _Stream(workspace, objects)
            start_thread(self._follow, stream, asyncio.get_running_loop(), name=f"events-{workspace}")
        if stream.ending is not None:
            stream.ending.cancel()
            stream.ending = None
        key = object()
        stream.listeners[key] = (patterns, handle)

        def forget() -> None:
            stream.listeners.pop(key, None)
            if not stream.listeners and stream.ending is None:
                stream.ending = asyncio.get_running_loop().call_later(LINGER_S, self._end, stream)

        return forget

    def close(self) -> None:
        """Stop all streams."""
        for stream in [*self._streams.values()]:
            self._end(stream)

    def _end(self, stream: _Stream) -> None:
        stream.stop.set()
        key = stream.workspace, stream.objects
        if self._streams.get(key) is stream:
            del self._streams[key]

    def _dispatch(self, stream: _Stream, event: Event | None) -> None:
        for patterns, handle in [*stream.listeners.values()]:
            if event is None or matches(event, patterns):
                try:
                    handle(event)
                except Exception:
                    log.exception("a page failed to handle an event")

    def _follow(self, stream: _Stream, loop: asyncio.AbstractEventLoop) -> None:
        """Read the stream, in a thread, and continue it where it broke."""
        cursor, objects, failures = "", stream.objects, 0
        while not stream.stop.is_set():
            try:
                for notice in self._platform.events.watch(
                    workspace=stream.workspace, objects=objects, after=cursor
                ):
                    if stream.stop.is_set():
                        return
                    is_first = not cursor  # what happened before the stream began is to be loaded
                    cursor, failures = notice.cursor, 0
                    if notice.event is not None or notice.changed or is_first:
                        loop.call_soon_threadsafe(self._dispatch, stream, notice.event)
            except Unauthenticated:
                if not stream.stop.is_set():
                    loop.call_soon_threadsafe(self._on_refused)
                return
            except (Denied, NotFound):  # this workspace is not for this person, or an object is gone
                if not objects:
                    return
                objects = ()
                loop.call_soon_threadsafe(self._dispatch, stream, None)
            except InvalidInput:  # a cursor that another process of the API gave
                cursor = ""
            except (FalajError, RuntimeError) as error:  # RuntimeError: the client was closed
                log.info("events are read again", extra={"reason": str(error)})
            stream.stop.wait(RETRY_S[min(failures, len(RETRY_S) - 1)])
            failures += 1
