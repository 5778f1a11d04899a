"""Deliver the windows of a server to the platform from a thread. Data is lost only if the server is killed.

While the platform is unavailable, windows wait; beyond a limit the oldest ones of a version are merged, not dropped. A
window that was sent and may have arrived keeps its idempotency key, so that it counts once.
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
"""Bytes of JSON in one request; the API accepts 1 MiB."""
WAITING_LIMIT = 60
"""Windows that may wait before the oldest are merged."""

RecordWindows = Callable[[str, tuple[WindowRecord, ...]], object]
"""Calls monitoring.record for an endpoint."""


@dataclass
class _Waiting:
    """A window to deliver: its undelivered parts with their idempotency keys; `sent` once one was tried."""

    served: ServedWindow
    sent: bool = False
    parts: list[tuple[str, WindowRecord]] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, str]:
        return self.served.endpoint, self.served.window.model


class Delivery:
    """Sketches pending arrays several times a second, and delivers windows every `every_s`."""

    def __init__(
        self,
        collector: Collector,
        record_windows: RecordWindows,
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
        """Return the number of undelivered windows."""
        return len(self._waiting)

    def start(self) -> None:
        """Start the thread, which acts as the current caller."""
        self._thread = start_thread(self._run, name="monitoring")

    def stop(self) -> None:
        """Deliver the remaining windows and stop the thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def deliver(self) -> None:
        """Flush the collector and deliver all waiting windows, oldest first; failed ones wait for the next call."""
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
            log.exception("window delivery failed; retrying")

    def _send(self, waiting: _Waiting) -> bool:
        """Send a window; return whether it is finished: delivered or permanently rejected."""
        if not waiting.sent:
            waiting.sent = True
            waiting.parts = [(new_id("key"), part) for part in split_window(waiting.served.window)]
        while waiting.parts:
            key, part = waiting.parts[0]
            try:
                with once(key):
                    self._record_windows(waiting.served.endpoint, (part,))
            except (NotFound, InvalidInput) as error:
                details = {"endpoint": waiting.served.endpoint, "reason": error.message}
                log.warning("window rejected and dropped", extra=details)
                return True
            except FalajError as error:
                details = {"endpoint": waiting.served.endpoint, "reason": error.message}
                log.warning("window delivery failed; it will be retried", extra=details)
                return False
            del waiting.parts[0]
        return True

    def _merge_oldest(self) -> None:
        """Merge the oldest windows of a version until the limit holds; sent windows stay unchanged."""
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
    """Split `window` by columns into parts that fit into a request; only the first part counts the rows."""
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
