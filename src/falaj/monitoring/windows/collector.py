"""On the server: sketch every column that an endpoint sees and answers, in constant memory.

`note` only puts arrays aside. They are sketched in bulk, by whoever hands windows in, or by the thread that notes if
that is late: so memory is bounded, whatever happens.
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

VALUES_ASIDE = 2**18
"""Values of one version that may wait to be sketched: about ten milliseconds of work."""
COLUMNS_LIMIT = 1000
"""Columns of one version that are sketched; the rest is passed over, and that is said once."""
SHORTEST = timedelta(microseconds=1)

Array = npt.NDArray[Any]
Group = tuple[ColumnRole, str, Any, tuple[int, ...]]
"""Arrays that can be joined: of one role, name, type and width. The columns of a matrix are `name[0]`, `name[1]`, …"""


class ServedWindow(NamedTuple):
    """A window, and the endpoint that it is of, as the server calls it."""

    endpoint: str
    window: WindowRecord


@dataclass
class _Version:
    """What is known of one version of an endpoint since the last cut."""

    since: datetime
    values: int = 0
    aside: list[tuple[ColumnRole, Mapping[str, Array]]] = field(default_factory=list)
    sketchers: dict[tuple[ColumnRole, str], Sketcher] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)


class Collector:
    """Thread-safe. What it cannot sketch it passes over: a request never fails for it."""

    def __init__(self, *, clock: Callable[[], datetime] = utc_now, values_aside: int = VALUES_ASIDE) -> None:
        self._clock = clock
        self._values_aside = values_aside
        self._versions: dict[tuple[str, str], _Version] = {}
        self._noting = threading.Lock()
        self._sketching = threading.Lock()

    def add(
        self,
        endpoint: str,
        version: str,
        columns: Mapping[str, Array],
        *,
        role: ColumnRole = ColumnRole.FEATURE,
    ) -> None:
        """Put the columns of a batch aside: one value per row, or a matrix with a row per row.

        The mapping and its arrays are kept for a while and must not be written to any more.
        """
        if not columns:
            return
        with self._noting:
            known = self._versions.get((endpoint, version))
            if known is None:
                known = self._versions[endpoint, version] = _Version(self._clock())
            known.aside.append((role, columns))
            known.values += len(columns) * next(iter(columns.values())).size
            is_late = known.values >= self._values_aside
        if is_late:
            self.sketch()

    def sketch(self) -> None:
        """Take what was put aside into the sketches."""
        with self._sketching:
            for known in list(self._versions.values()):
                self._take(known)

    def flush(self) -> list[ServedWindow]:
        """The window of every version that saw something since the last time; the next windows begin."""
        with self._sketching:
            with self._noting:
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
        with self._noting:
            aside, known.aside, known.values = known.aside, [], 0
        for (role, name, _, width), arrays in _grouped(aside).items():
            try:
                joined = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
                columns = list(_columns(name, joined, width))
            except (ValueError, TypeError) as problem:
                _pass_over(known, name, problem)
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


def _grouped(aside: list[tuple[ColumnRole, Mapping[str, Array]]]) -> dict[Group, list[Array]]:
    groups: dict[Group, list[Array]] = {}
    for role, columns in aside:
        for name, values in columns.items():
            groups.setdefault((role, name, values.dtype, values.shape[1:]), []).append(values)
    return groups


def _columns(name: str, values: Array, width: tuple[int, ...]) -> Iterator[tuple[str, Array]]:
    """The columns of what was noted; images and the like are passed over."""
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
        _pass_over(known, name, problem)


def _pass_over(known: _Version, name: str, problem: Exception) -> None:
    if name not in known.refused:
        known.refused.add(name)
        log.warning("a column is not monitored", extra={"column": name, "reason": str(problem)})
