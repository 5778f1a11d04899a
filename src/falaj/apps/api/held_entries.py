"""Audit entries of answers that wait for them: one transaction for all that wait, in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any

from falaj.apps.api.worker_threads import Results
from falaj.governance.audit.log import Draft

MAX_GROUP = 256
"""Entries that are appended in one transaction."""

_Waiting = tuple[Sequence[Draft], asyncio.Future[None]]


class HeldEntries:
    """Appends entries that were held back (see `held_back`); no thread of an operation waits for the disk."""

    def __init__(self, append_all: Callable[[Sequence[Draft]], None]) -> None:
        self._append_all = append_all
        self._waiting: SimpleQueue[_Waiting] = SimpleQueue()
        self._results = Results()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    async def append(self, drafts: Sequence[Draft]) -> None:
        """Return when `drafts` are committed; raise what kept them from it."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.begin(drafts, future)
        await future

    def begin(self, drafts: Sequence[Draft], future: asyncio.Future[None]) -> None:
        """Begin to append `drafts`, from any thread; `future` is done when they are committed."""
        if self._thread is None:
            with self._starting:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._serve, name="audit-entries", daemon=True)
                    self._thread.start()
        self._waiting.put((drafts, future))

    def _serve(self) -> None:
        while True:
            group = self._take()
            error: BaseException | None = None
            try:
                self._append_all([draft for drafts, _ in group for draft in drafts])
            except BaseException as failure:
                error = failure
            for _, future in group:
                self._results.deliver(future, None, error)

    def _take(self) -> list[Any]:
        """Return the entries that wait; all of them, up to a limit."""
        group = [self._waiting.get()]
        try:
            while len(group) < MAX_GROUP:
                group.append(self._waiting.get_nowait())
        except Empty:
            pass
        return group
