"""Progress of a run without a platform: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from typing import TextIO

LINE_INTERVAL_S = 10.0
"""Seconds between two lines where there is no terminal; shorter runs write none."""
BAR_WIDTH = 24
CLEAR = "\r\x1b[K"


class ProgressDisplay:
    """Shows step, loss, speed and the time that is left; `show` is called about once a second."""

    def __init__(self, total: int, done: int = 0, *, stream: TextIO | None = None) -> None:
        self._total, self._shown = total, done
        self._stream = stream or sys.stderr
        self._is_terminal = bool(getattr(self._stream, "isatty", lambda: False)())
        self._last = time.monotonic()
        self._is_drawn = False

    def resume(self, done: int) -> None:
        """Start to measure at step `done`."""
        self._shown, self._last = done, time.monotonic()

    def show(self, step: int, loss: float | None, *, batch_size: int) -> None:
        """Draw the bar at `step`, or write a line if the last one is old enough."""
        now = time.monotonic()
        if not self._is_terminal and now - self._last < LINE_INTERVAL_S:
            return
        steps_per_s = (step - self._shown) / max(now - self._last, 1e-9)  # since it was last shown
        self._shown, self._last = step, now
        text = self._text(step, loss, steps_per_s, batch_size=batch_size)
        if not self._is_terminal:
            self._write(f"{text}\n")
            return
        columns = shutil.get_terminal_size().columns
        self._write(f"{CLEAR}{self._bar(step)} {text}"[: len(CLEAR) + columns - 1])
        self._is_drawn = True

    def around(self, notify: Callable[[str], None]) -> Callable[[str], None]:
        """Return `notify` with the bar cleared before each message."""

        def cleared(words: str) -> None:
            self.clear()
            notify(words)

        return cleared

    def clear(self) -> None:
        """Remove the bar from the terminal; the next `show` draws it again."""
        if self._is_drawn:
            self._write(CLEAR)
            self._is_drawn = False

    def _text(self, step: int, loss: float | None, steps_per_s: float, *, batch_size: int) -> str:
        parts = [f"step {step:,}/{self._total:,}"]
        parts += [] if loss is None else [f"loss {loss:.4g}"]
        if steps_per_s:
            parts += [f"{steps_per_s * batch_size:,.0f} samples/s"]
            parts += [f"{duration((self._total - step) / steps_per_s)} left"]
        return "  ".join(parts)

    def _bar(self, step: int) -> str:
        filled = BAR_WIDTH * step // max(self._total, 1)
        return f"{100 * step // max(self._total, 1):3d}% [{'#' * filled}{'.' * (BAR_WIDTH - filled)}]"

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # a closed stream must not end the training
            self._is_terminal, self._last = False, float("inf")


def duration(seconds: float) -> str:
    """Return a duration as h:mm:ss, or m:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
