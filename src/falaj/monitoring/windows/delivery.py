"""Hand the windows of a server in, on a thread of its own. Nothing is lost but by a kill -9 of the server.

While the platform does not answer, windows wait; beyond a limit the oldest of a version are merged, not dropped. A
window that was sent, and may have arrived, keeps its idempotency key, so that it counts once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from falaj.errors import FalajError, InvalidInput, NotFound
from falaj.governance.operations.caller import once, start_thread
from falaj.monitoring.drift.baselines import merge_compatible
from falaj.monitoring.windows.collector import Collector, ServedWindow
from falaj.records.monitoring.monitors import WindowRecord
from falaj.records.monitoring.sketches import FeatureSketch
from falaj.records.names import new_id

log = logging.getLogger("falaj.monitoring")

BODY_BYTES = 700_000
"""Of JSON in one request: the door takes 1 MiB."""
WAITING_LIMIT = 60
"""Windows that may wait before the oldest are merged."""

HandIn = Callable[[str, tuple[WindowRecord, ...]], object]
"""Performs monitoring.record for an endpoint."""


@dataclass
class _Waiting:
    """A window on its way: the parts that have not arrived yet, each with its key; `sent` once one was tried."""

    served: ServedWindow
    sent: bool = False
    parts: list[tuple[str, WindowRecord]] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, str]:
        return self.served.endpoint, self.served.window.model


class Delivery:
    """Sketches what the collector put aside several times a second, and hands windows in every `every_s`."""

    def __init__(
        self,
        collector: Collector,
        record_windows: HandIn,
        *,
        every_s: float = 10.0,
        sketch_every_s: float = 0.25,
        waiting_limit: int = WAITING_LIMIT,
    ) -> None:
        self._collector = collector
        self._record_windows = record_windows
        self._every_s = every_s
        self._sketch_every_s = min(sketch_every_s, every_s)
        self._waiting_limit = waiting_limit
        self._waiting: list[_Waiting] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def waiting(self) -> int:
        """Windows that could not be handed in yet."""
        return len(self._waiting)

    def start(self) -> None:
        """Begin; the thread acts for whoever starts it."""
        self._thread = start_thread(self._run, name="monitoring")

    def stop(self) -> None:
        """Hand in what is left, and end."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def deliver(self) -> None:
        """Cut windows and hand in all that wait, oldest first; what does not get through waits for the next time."""
        self._waiting += [_Waiting(served) for served in self._collector.flush()]
        while self._waiting:
            if not self._send(self._waiting[0]):
                break
            del self._waiting[0]
        self._merge_oldest()

    def _run(self) -> None:
        due = time.monotonic() + self._every_s
        while not self._stop.wait(self._sketch_every_s):
            self._try(self._collector.sketch)
            if time.monotonic() >= due:
                due = time.monotonic() + self._every_s
                self._try(self.deliver)
        self._try(self.deliver)

    def _try(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception:
            log.exception("windows could not be made or handed in; it is tried again")

    def _send(self, waiting: _Waiting) -> bool:
        """Whether the window is done with: it arrived, or never will."""
        if not waiting.sent:
            waiting.sent = True
            waiting.parts = [(new_id("key"), part) for part in split_window(waiting.served.window)]
        while waiting.parts:
            key, part = waiting.parts[0]
            try:
                with once(key):
                    self._record_windows(waiting.served.endpoint, (part,))
            except (NotFound, InvalidInput) as error:
                told = {"endpoint": waiting.served.endpoint, "reason": error.message}
                log.warning("a window was refused, and is dropped", extra=told)
                return True
            except FalajError as error:
                told = {"endpoint": waiting.served.endpoint, "reason": error.message}
                log.warning("a window waits: it could not be handed in", extra=told)
                return False
            del waiting.parts[0]
        return True

    def _merge_oldest(self) -> None:
        """Merge the oldest windows of a version until few enough wait; what was sent stays as it is."""
        while len(self._waiting) > self._waiting_limit:
            pair = self._oldest_pair()
            if pair is None:
                return
            first, second = pair
            window = _both(first.served.window, second.served.window)
            first.served = ServedWindow(first.served.endpoint, window)
            self._waiting.remove(second)

    def _oldest_pair(self) -> tuple[_Waiting, _Waiting] | None:
        seen: dict[tuple[str, str], _Waiting] = {}
        for waiting in self._waiting:
            if waiting.sent:
                continue
            if waiting.key in seen:
                return seen[waiting.key], waiting
            seen[waiting.key] = waiting
        return None


def split_window(window: WindowRecord, *, limit: int = BODY_BYTES) -> Iterator[WindowRecord]:
    """`window` in parts that fit into a request, each with some of its columns; only the first counts the rows."""
    group: list[FeatureSketch] = []
    size, rows = 0, window.rows
    for sketch in window.features:
        more = len(sketch.model_dump_json())
        if group and size + more > limit:
            yield window.model_copy(update={"features": tuple(group), "rows": rows})
            group, size, rows = [], 0, 0
        group.append(sketch)
        size += more
    yield window.model_copy(update={"features": tuple(group), "rows": rows})


def _both(first: WindowRecord, second: WindowRecord) -> WindowRecord:
    both = merge_compatible([first, second])
    return WindowRecord(
        model=both.model,
        since=both.since,
        until=both.until,
        features=both.features,
        rows=first.rows + second.rows,
    )
