"""Server side: sketch every input and output column of endpoints in constant memory.

`add` only queues arrays. They are sketched in bulk by the delivery thread, or by the calling thread if that is late,
so memory is bounded.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from falaj.errors import InvalidInput
from falaj.monitoring.sketches.columns import kind_of
from falaj.monitoring.sketches.sketchers import Sketcher, new_sketcher
from falaj.records.monitoring.monitors import WindowRecord
from falaj.records.monitoring.sketches import ColumnRole
from falaj.records.record import utc_now

log = logging.getLogger("falaj.monitoring")

PENDING_VALUES = 2**18
"""Values of one version that may wait to be sketched: about ten milliseconds of work."""
COLUMNS_LIMIT = 1000
"""Columns of one version that are sketched; the others are skipped with one warning."""
SHORTEST = timedelta(microseconds=1)

Array = npt.NDArray[Any]
Group = tuple[ColumnRole, str, Any, tuple[int, ...]]
"""Arrays that can be concatenated: of one role, name, dtype and width. Matrix columns are `name[0]`, `name[1]`, …"""


class ServedWindow(NamedTuple):
    """A window and the id of its endpoint."""

    endpoint: str
    window: WindowRecord


@dataclass
class _Version:
    """Pending arrays and sketches of one version of an endpoint since the last flush."""

    since: datetime
    values: int = 0
    pending: list[tuple[ColumnRole, Mapping[str, Array]]] = field(default_factory=list)
    sketchers: dict[tuple[ColumnRole, str], Sketcher] = field(default_factory=dict)
    skipped: set[str] = field(default_factory=set)


class Collector:
    """Collects columns; thread-safe. Columns that cannot be sketched are skipped, so no request fails."""

    def __init__(
        self, *, clock: Callable[[], datetime] = utc_now, pending_values: int = PENDING_VALUES
    ) -> None:
        self._clock = clock
        self._pending_values = pending_values
        self._versions: dict[tuple[str, str], _Version] = {}
        self._pending_lock = threading.Lock()
        self._sketch_lock = threading.Lock()

    def add(
        self,
        endpoint: str,
        version: str,
        columns: Mapping[str, Array],
        *,
        role: ColumnRole = ColumnRole.FEATURE,
    ) -> None:
        """Queue the columns of a batch: one value per row, or a matrix with one row per row.

        The mapping and its arrays are kept for a while and must not be modified.
        """
        if not columns:
            return
        with self._pending_lock:
            known = self._versions.get((endpoint, version))
            if known is None:
                known = self._versions[endpoint, version] = _Version(self._clock())
            known.pending.append((role, columns))
            known.values += len(columns) * next(iter(columns.values())).size
            is_late = known.values >= self._pending_values
        if is_late:
            self.sketch()

    def sketch(self) -> None:
        """Sketch the pending arrays."""
        with self._sketch_lock:
            for known in list(self._versions.values()):
                self._take(known)

    def flush(self) -> list[ServedWindow]:
        """Return the window of every version with data since the last flush, and start new windows."""
        with self._sketch_lock:
            with self._pending_lock:
                ended, self._versions = self._versions, {}
            until = self._clock()
            for known in ended.values():
                self._take(known)
            return [
                ServedWindow(endpoint, _cut(version, known, until))
                for (endpoint, version), known in ended.items()
                if known.sketchers
            ]

    def _take(self, known: _Version) -> None:
        with self._pending_lock:
            pending, known.pending, known.values = known.pending, [], 0
        for (role, name, _, width), arrays in _grouped(pending).items():
            try:
                joined = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
                columns = list(_columns(name, joined, width))
            except (ValueError, TypeError) as problem:
                _skip(known, name, problem)
                continue
            for column, values in columns:
                _update(known, role, column, values)


def _cut(version: str, known: _Version, until: datetime) -> WindowRecord:
    sketches = tuple(sketcher.sketch() for sketcher in known.sketchers.values())
    return WindowRecord(
        model=version,
        since=known.since,
        until=max(until, known.since + SHORTEST),
        rows=max(sketch.rows for sketch in sketches),
        features=sketches,
    )


def _grouped(pending: list[tuple[ColumnRole, Mapping[str, Array]]]) -> dict[Group, list[Array]]:
    groups: dict[Group, list[Array]] = {}
    for role, columns in pending:
        for name, values in columns.items():
            groups.setdefault((role, name, values.dtype, values.shape[1:]), []).append(values)
    return groups


def _columns(name: str, values: Array, width: tuple[int, ...]) -> Iterator[tuple[str, Array]]:
    """Yield the columns of an array; arrays with more dimensions, such as images, are skipped."""
    if width in ((), (1,)):
        yield name, values.reshape(-1)
    elif len(width) == 1:
        for number, column in enumerate(np.ascontiguousarray(values.T)):
            yield f"{name}[{number}]", column


def _update(known: _Version, role: ColumnRole, name: str, values: Array) -> None:
    key = (role, name)
    try:
        sketcher = known.sketchers.get(key)
        if sketcher is None:
            if len(known.sketchers) >= COLUMNS_LIMIT:
                raise InvalidInput.at(name, given="one more column", allowed=f"at most {COLUMNS_LIMIT}")
            sketcher = new_sketcher(name, kind_of(values), role=role)
        sketcher.update(values)
        known.sketchers[key] = sketcher
    except (InvalidInput, ValueError, TypeError) as problem:
        _skip(known, name, problem)


def _skip(known: _Version, name: str, problem: Exception) -> None:
    if name not in known.skipped:
        known.skipped.add(name)
        log.warning("column is not monitored", extra={"column": name, "reason": str(problem)})
