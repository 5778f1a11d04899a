"""The progress of a running attempt, from its reports: its step, its loss and its steps per second."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from falaj.records.tracking import MetricPoint
from falaj.records.training.jobs import JobProgress

WINDOW_S = 30.0
"""The rate is averaged over this time, so that a pause for a checkpoint does not make it jump."""
RESTART_S = 10.0
"""Some of several processes may be behind; if all are for so long, the training was restarted."""


class ProgressMeter:
    """Combines reports from several threads. `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._step: int | None = None
        self._total: int | None = None
        self._loss: float | None = None
        self._moved_at = 0.0
        self._seen: deque[tuple[float, int]] = deque(maxlen=1000)

    def advance(self, step: int, total: int | None) -> None:
        """Record that `step` of `total` steps are done."""
        with self._lock:
            self._total = total or self._total
            self._move(step)

    def measure(self, points: Sequence[MetricPoint]) -> None:
        """Record logged metrics. Their newest step counts as progress if none was reported."""
        losses = [each for each in points if _is_loss(each.key) and math.isfinite(each.value)]
        with self._lock:
            if losses:
                exact = [each for each in losses if each.key == "loss"] or losses
                self._loss = max(exact, key=lambda each: each.step).value
            newest = max((each.step for each in points), default=0)
            if self._total is None and newest > 0:
                self._move(newest)

    def progress(self) -> JobProgress | None:
        """Return the progress, or None before the first report."""
        with self._lock:
            if self._step is None:
                return None
            return JobProgress(step=self._step, total=self._total, loss=self._loss, rate=self._rate())

    def _move(self, step: int) -> None:
        now = self._clock()
        if self._step is not None and step < self._step:
            if now - self._moved_at < RESTART_S:
                return
            self._seen.clear()
        self._step, self._moved_at = step, now
        while self._seen and now - self._seen[0][0] > WINDOW_S:
            self._seen.popleft()
        if not self._seen or now > self._seen[-1][0]:
            self._seen.append((now, step))

    def _rate(self) -> float | None:
        if len(self._seen) < 2:
            return None
        (began, first), (now, last) = self._seen[0], self._seen[-1]
        return round((last - first) / (now - began), 4) or None


def _is_loss(key: str) -> bool:
    """Return whether `key` is a training loss: `loss`, `train_loss`, `train/loss`. Validation losses are not."""
    name = key.lower().replace("/", "_").replace(".", "_")
    return name in ("loss", "train_loss", "training_loss", "loss_train")
