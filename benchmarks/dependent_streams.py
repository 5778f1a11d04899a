"""Streams whose rows depend on each other over time, and references and windows of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import numpy.typing as npt

from falaj.monitoring.drift.dependence import BlockCounter
from falaj.monitoring.sketches.sketchers import WindowSketcher, sketch_reference
from falaj.records.monitoring.sketches import ColumnKind, ReferenceSketch, WindowSketch

Floats = npt.NDArray[np.float64]
BEGIN = datetime(2013, 1, 1, tzinfo=UTC)
DAY_S = 86_400
BURST = 20
"""Rows that one entity sends within an hour."""


@dataclass
class Stream:
    """Rows of one column over days: times in seconds, sorted, and values."""

    times: Floats
    values: Floats

    def between(self, first_day: float, last_day: float) -> Stream:
        here = (self.times >= first_day * DAY_S) & (self.times < last_day * DAY_S)
        return Stream(self.times[here], self.values[here])


@dataclass
class StreamMaker:
    """Makes streams of `rows` rows a day; `strength` is the deviation of what rows of a time have in common."""

    kind: str
    strength: float = 0.0
    rows: int = 1_000
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(26))

    def make(self, days: int) -> Stream:
        rng, number = self.rng, days * self.rows
        times = np.sort(rng.random(number) * days * DAY_S)
        noise = rng.normal(size=number)
        if self.kind == "days":
            common = rng.normal(size=days)[(times // DAY_S).astype(int)]
        elif self.kind == "autoregressive":
            hours = autoregressive(rng, days * 24, 0.9)
            common = hours[(times // 3600).astype(int)]
        elif self.kind == "bursts":
            return self._bursts(days)
        else:
            common = np.zeros(number)
        return Stream(times, noise + self.strength * common)

    def _bursts(self, days: int) -> Stream:
        """Return rows of entities that repeat theirs within an hour."""
        entities = days * self.rows // BURST
        begins, values = self.rng.random(entities) * (days * DAY_S - 3600), self.rng.normal(size=entities)
        times = np.repeat(begins, BURST) + self.rng.random(entities * BURST) * 3600
        order = np.argsort(times)
        return Stream(times[order], np.repeat(values, BURST)[order])


def autoregressive(rng: np.random.Generator, length: int, share: float) -> Floats:
    """Return a stationary AR(1) series of variance 1."""
    found = rng.normal(size=length)
    for number in range(1, length):
        found[number] = share * found[number - 1] + np.sqrt(1 - share**2) * found[number]
    return found


def pinned(stream: Stream) -> ReferenceSketch:
    """Return the reference with the spreads of its blocks, as `monitoring.watch` pins it."""
    return pinned_columns(stream.times, {"x": stream.values})


def pinned_columns(times: Floats, columns: dict[str, Any]) -> ReferenceSketch:
    reference = sketch_reference("flights@1", [columns])
    moments = (times * 1e6).astype(np.int64) + int(BEGIN.timestamp() * 1e6)
    counter = BlockCounter(reference, first=int(moments.min()), last=int(moments.max()))
    counter.add(moments, columns)
    return reference.model_copy(update={"spreads": counter.spreads()})


def cut(stream: Stream, first_day: float, last_day: float, *, shift: float = 0.0) -> WindowSketch:
    """Return the window of some days; its values may be shifted."""
    rows = stream.between(first_day, last_day)
    sketcher = WindowSketcher("delay@3", features={"x": ColumnKind.NUMERIC})
    sketcher.update({"x": rows.values + shift})
    return sketcher.cut(since=BEGIN + timedelta(days=first_day), until=BEGIN + timedelta(days=last_day))
