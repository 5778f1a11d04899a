"""Failed authentications: counted in memory by reason and source, and appended to the audit log once a window."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import NamedTuple

from falaj.errors import Unauthenticated
from falaj.governance.audit.log import AuditLog, Draft
from falaj.records.governance.identity import FailureReason
from falaj.records.names import ROOT

WINDOW = timedelta(minutes=1)
MAX_SOURCES = 64
"""Reasons and sources of a window that have an entry of their own; the others are summed by reason."""
OTHER = "remote:other"
ACTION = "tokens.authenticate"
CALLER = "unauthenticated"


class _Failure(NamedTuple):
    interface: str
    reason: FailureReason
    source: str


class FailedAuthentications:
    """Counts failures in memory that does not grow with them, and never sees a credential."""

    def __init__(self, audit: AuditLog, clock: Callable[[], datetime], *, window: timedelta = WINDOW) -> None:
        self._audit = audit
        self._clock = clock
        self._length = window
        self._lock = threading.Lock()
        self._since: datetime | None = None
        self._counts: Counter[_Failure] = Counter()

    def add(self, reason: FailureReason, source: str, *, interface: str) -> None:
        """Count one failure of a caller at `source`, like remote:10.0.0.7."""
        failure = _Failure(interface, reason, source)
        with self._lock:
            if failure not in self._counts and len(self._counts) >= MAX_SOURCES:
                failure = failure._replace(source=OTHER)
            self._since = self._since or self._clock()
            self._counts[failure] += 1

    def flush(self, *, whole_window: bool = True) -> None:
        """Append an entry per reason and source, unless the window has not ended yet and must be whole.

        What cannot be appended now is counted again, so that no failure is lost.
        """
        now = self._clock()
        with self._lock:
            since = self._since
            if since is None or (whole_window and now - since < self._length):
                return
            counts, self._counts, self._since = self._counts, Counter(), None
        while counts:
            failure, count = counts.popitem()
            try:
                self._audit.append_grouped(self._draft(failure, count, since, now))
            except BaseException:
                counts[failure] = count
                with self._lock:
                    self._counts.update(counts)
                    self._since = since
                raise

    def _draft(self, failure: _Failure, count: int, since: datetime, until: datetime) -> Draft:
        return {
            "at": since,
            "caller": CALLER,
            "action": ACTION,
            "outcome": "denied",
            "objects": [],
            "workspace": ROOT,
            "origin": failure.source,
            "rule": f"{failure.interface}: {failure.reason}",
            "input": self._audit.digest(b""),
            "error": Unauthenticated.code,
            "count": count,
            "until": until,
        }
