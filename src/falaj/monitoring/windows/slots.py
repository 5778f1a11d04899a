"""Window slots: which of them form a complete window, when it is due, and which to merge. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise

from falaj.records.monitoring.monitors import MonitorWindow

SLOTS_KEPT = 128
"""Slots per version of an endpoint. Beyond this, old neighbours are merged, so history gets coarser with age."""


@dataclass(frozen=True, slots=True)
class WindowSlot:
    """A window as received from a server, or several merged; `sealed` holds its encrypted sketches."""

    seq: int
    since: datetime
    until: datetime
    rows: int
    sealed: bytes = b""


def complete_windows(
    slots: Sequence[WindowSlot], window: MonitorWindow, *, now: datetime
) -> list[list[WindowSlot]]:
    """Return the complete windows in `slots`, which are in order of arrival; the rest waits."""
    found: list[list[WindowSlot]] = []
    current: list[WindowSlot] = []
    for slot in slots:
        if not current and found and _is_another_part(slot, found[-1][-1]):
            found[-1].append(slot)
            continue
        if _is_complete(current, window, at=slot.since):
            found.append(current)
            current = []
        current.append(slot)
        if _is_complete(current, window, at=max(each.until for each in current)):
            found.append(current)
            current = []
    return [*found, current] if _is_complete(current, window, at=now) else found


def due_at(rows: int, since: datetime | None, window: MonitorWindow) -> datetime | None:
    """Return when the waiting slots form a complete window; None if they have too few rows."""
    if since is None or rows < window.least_rows:
        return None
    return since + window.least_time


def pair_to_merge(
    slots: Sequence[WindowSlot], *, boundaries: Iterable[int]
) -> tuple[WindowSlot, WindowSlot] | None:
    """Return the smallest pair of neighbours in the older half that does not cross a boundary; None if not needed.

    A boundary is the number of the last slot that a monitor has evaluated.
    """
    if len(slots) <= SLOTS_KEPT:
        return None
    held = set(boundaries)
    older = pairwise(slots[: len(slots) // 2 + 1])
    pairs = [(a, b) for a, b in older if not any(a.seq <= seq < b.seq for seq in held)]
    return min(pairs, key=lambda pair: pair[0].rows + pair[1].rows, default=None)


def _is_complete(slots: Sequence[WindowSlot], window: MonitorWindow, *, at: datetime) -> bool:
    if not slots or sum(slot.rows for slot in slots) < window.least_rows:
        return False
    return at - min(slot.since for slot in slots) >= window.least_time


def _is_another_part(slot: WindowSlot, before: WindowSlot) -> bool:
    """Return whether `slot` holds more columns of the same window, which was too large for one request."""
    return slot.rows == 0 and (slot.since, slot.until) == (before.since, before.until)
