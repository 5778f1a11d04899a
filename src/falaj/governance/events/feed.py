"""Wakes those who watch events: one reader of what is new for all of them, which rests while nobody watches."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from falaj.errors import FalajError
from falaj.governance.events import store
from falaj.governance.events.store import StoredEvent
from falaj.governance.operations.caller import start_thread
from falaj.ports.metadata import Database, Transaction
from falaj.records.governance.events import EventPosition
from falaj.records.governance.objects import StoredObject
from falaj.records.names import ObjectId

POLL_S = 0.2
"""How often new events are looked for while somebody watches: one query on an index, whoever stored them."""
CHANGES_S = 1.0
"""How often the marks of followed objects are read: one query for each kind, however many follow them."""
KEPT = 2000
"""Events in memory; a watcher that is further behind reads them from the database."""

Mark = tuple[Any, ...]
"""What differs once an object has changed."""
MarkReader = Callable[[Transaction, Sequence[str]], Iterable[tuple[Any, ...]]]
"""Returns rows of small values that differ once one of these objects has changed; each begins with its id."""
MarkReaders = Mapping[str, MarkReader]
"""The readers by kind of object: those that change without an event, like a run that gets metric points."""


def read_marks(
    tx: Transaction, readers: MarkReaders, followed: Mapping[ObjectId, str]
) -> dict[ObjectId, Mark]:
    """Return the marks of objects, whose kinds are given, by id."""
    found: defaultdict[ObjectId, list[tuple[Any, ...]]] = defaultdict(list)
    by_kind: defaultdict[str, list[str]] = defaultdict(list)
    for ident, kind in followed.items():
        by_kind[kind].append(ident)
    for kind, idents in by_kind.items():
        for ident, *mark in readers[kind](tx, idents):
            found[ident].append(tuple(mark))
    return {ident: (*sorted(found[ident], key=repr),) for ident in followed}


@dataclass(eq=False)
class Watcher:
    """One who watches: the objects that they follow, with their kinds, and which of these have changed since."""

    followed: dict[ObjectId, str] = field(default_factory=dict)
    changed: set[ObjectId] = field(default_factory=set)


class EventFeed:
    """The newest events of all workspaces and the changes of followed objects, read once for all watchers here."""

    def __init__(
        self,
        database: Database,
        *,
        marks: MarkReaders | None = None,
        poll_s: float = POLL_S,
        changes_s: float = CHANGES_S,
    ) -> None:
        self._database = database
        self._readers = marks or {}
        self._poll_s, self._changes_s = poll_s, changes_s
        self._changed = threading.Condition()
        self._kept: deque[StoredEvent] = deque(maxlen=KEPT)
        self._begin: EventPosition | None = None
        """The events behind this place are in memory; none while nobody watches."""
        self._newest: EventPosition | None = None
        self._watchers: list[Watcher] = []
        self._marks: dict[ObjectId, Mark] = {}
        """The marks of all followed objects, as they were read last."""
        self._marks_due = 0.0
        self._is_reading = False

    @property
    def kinds(self) -> list[str]:
        """The kinds of objects that can be followed."""
        return sorted(self._readers)

    @contextmanager
    def watching(self, followed: Sequence[StoredObject] = ()) -> Iterator[Watcher]:
        """Keep the reader running inside the block; at first, all that is followed counts as changed."""
        watcher = Watcher({each.id: each.kind for each in followed}, {each.id for each in followed})
        marks: dict[ObjectId, Mark] = {}
        if followed:
            with self._database.read() as tx:
                marks = read_marks(tx, self._readers, watcher.followed)
        with self._changed:
            self._watchers.append(watcher)
            for ident, mark in marks.items():
                self._marks.setdefault(ident, mark)
            if not self._is_reading:
                self._is_reading = True
                start_thread(self._follow, name="event-feed")
        try:
            yield watcher
        finally:
            with self._changed:
                self._watchers.remove(watcher)

    def take_changes(self, watcher: Watcher) -> set[ObjectId]:
        """Return what has changed of the objects that are followed, since this was called last."""
        with self._changed:
            taken, watcher.changed = watcher.changed, set()
        return taken

    def wait(self, watcher: Watcher, after: EventPosition, *, timeout_s: float) -> list[StoredEvent] | None:
        """Return the events behind `after`, of all workspaces, as soon as there are any; [] after `timeout_s`.

        [] also as soon as an object changes that the watcher follows. None if events are no longer in memory: read
        them from the database.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self._newest is None or _key(self._newest) <= _key(after):
                left = deadline - time.monotonic()
                if left <= 0 or watcher.changed:
                    return []
                self._changed.wait(left)
            begin = self._begin
            if begin is None or _key(begin) > _key(after):
                return None
            return [each for each in self._kept if _key(each.position) > _key(after)]

    def _follow(self) -> None:
        """Read what is new until nobody watches."""
        while self._read():
            time.sleep(self._poll_s)

    def _read(self) -> bool:
        """Take in what is new since the last look; return false, and forget all, if nobody watches any more."""
        newest, found = self._newest, list[StoredEvent]()
        followed, marks = self._due_marks(), dict[ObjectId, Mark]()
        try:
            with self._database.read() as tx:
                newest = newest or store.newest_position(tx)
                found = store.list_all(tx, after=newest, limit=KEPT)
                marks = read_marks(tx, self._readers, followed)
        except FalajError:  # the database is busy or away: the next look may succeed
            pass
        with self._changed:
            if not self._watchers:
                self._kept.clear()
                self._marks.clear()
                self._begin = self._newest = None
                self._is_reading = False
                return False
            if self._begin is None:
                self._begin = newest
            dropped = len(self._kept) + len(found) - KEPT
            if dropped > 0:
                self._begin = [*self._kept, *found][dropped - 1].position
            self._kept.extend(found)
            before, self._newest = self._newest, found[-1].position if found else newest
            if self._note(marks) or self._newest != before:
                self._changed.notify_all()
        return True

    def _due_marks(self) -> dict[ObjectId, str]:
        """Return the objects whose marks are to be read now, with their kinds: all that are followed, or none."""
        now = time.monotonic()
        if now < self._marks_due:
            return {}
        self._marks_due = now + self._changes_s
        with self._changed:
            followed = {ident: kind for each in self._watchers for ident, kind in each.followed.items()}
            self._marks = {ident: mark for ident, mark in self._marks.items() if ident in followed}
        return followed

    def _note(self, marks: Mapping[ObjectId, Mark]) -> bool:
        """Tell watchers which of the objects that they follow have other marks than before; true if there are any."""
        new = {ident: mark for ident, mark in marks.items() if self._marks.get(ident) != mark}
        self._marks |= new
        told = False
        for watcher in self._watchers:
            changed = new.keys() & watcher.followed.keys()
            watcher.changed |= changed
            told |= bool(changed)
        return told


def _key(position: EventPosition) -> tuple[int, int]:
    return position.seq, position.part
