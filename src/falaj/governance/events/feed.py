"""Wakes those who watch events: one reader of the newest events for all of them, which rests while nobody watches."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from falaj.errors import FalajError
from falaj.governance.events import store
from falaj.governance.events.store import StoredEvent
from falaj.governance.operations.caller import start_thread
from falaj.ports.metadata import Database
from falaj.records.governance.events import EventPosition

POLL_S = 0.2
"""How often new events are looked for while somebody watches: one query on an index, whoever stored them."""
KEPT = 2000
"""Events in memory; a watcher that is further behind reads them from the database."""


class EventFeed:
    """The newest events of all workspaces, read once for all watchers of this process."""

    def __init__(self, database: Database, *, poll_s: float = POLL_S) -> None:
        self._database = database
        self._poll_s = poll_s
        self._changed = threading.Condition()
        self._kept: deque[StoredEvent] = deque(maxlen=KEPT)
        self._begin: EventPosition | None = None
        """The events behind this place are in memory; none while nobody watches."""
        self._newest: EventPosition | None = None
        self._watchers = 0
        self._is_reading = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Keep the reader running inside the block."""
        with self._changed:
            self._watchers += 1
            if not self._is_reading:
                self._is_reading = True
                start_thread(self._follow, name="event-feed")
        try:
            yield
        finally:
            with self._changed:
                self._watchers -= 1

    def wait(self, after: EventPosition, *, timeout_s: float) -> list[StoredEvent] | None:
        """Return the events behind `after`, of all workspaces, as soon as there are any; [] after `timeout_s`.

        None if they are no longer in memory: read them from the database.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self._newest is None or _key(self._newest) <= _key(after):
                left = deadline - time.monotonic()
                if left <= 0:
                    return []
                self._changed.wait(left)
            begin = self._begin
            if begin is None or _key(begin) > _key(after):
                return None
            return [each for each in self._kept if _key(each.position) > _key(after)]

    def _follow(self) -> None:
        """Read new events until nobody watches."""
        while self._read():
            time.sleep(self._poll_s)

    def _read(self) -> bool:
        """Take in the events since the last look; return false, and forget all, if nobody watches any more."""
        newest, found = self._newest, list[StoredEvent]()
        try:
            with self._database.read() as tx:
                newest = newest or store.newest_position(tx)
                found = store.list_all(tx, after=newest, limit=KEPT)
        except FalajError:  # the database is busy or away: the next look may succeed
            pass
        with self._changed:
            if self._watchers == 0:
                self._kept.clear()
                self._begin = self._newest = None
                self._is_reading = False
                return False
            if self._begin is None:
                self._begin = newest
            dropped = len(self._kept) + len(found) - KEPT
            if dropped > 0:
                self._begin = [*self._kept, *found][dropped - 1].position
            self._kept.extend(found)
            self._newest = found[-1].position if found else newest
            if found:
                self._changed.notify_all()
        return True


def _key(position: EventPosition) -> tuple[int, int]:
    return position.seq, position.part
