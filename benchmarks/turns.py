"""Alternating measurements on one GPU: each side trains in a thread that waits while another one is measured."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch


class BenchmarkOver(BaseException):
    """Raised in a side when the benchmark is over."""


class Side:
    """One side of the comparison; `body` trains without end, and calls `pause(samples)` regularly."""

    def __init__(self, name: str, body: Callable[[Callable[[int], None]], None]) -> None:
        self.name, self.rates, self.first_s, self.error = name, list[float](), 0.0, ""
        self._body = body
        self._go, self._rests = threading.Event(), threading.Event()
        self._since = self._samples = 0.0
        self._over = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def turn(self) -> None:
        """Train until the next pause; the first round, with its compilation, is not counted."""
        if self.error:
            return
        began = time.perf_counter()
        self._rests.clear()
        self._go.set()
        if not self._thread.is_alive() and not self.first_s:
            self._thread.start()
        self._rests.wait()
        took = time.perf_counter() - began
        if not self.first_s:
            self.first_s = took
        elif not self.error:
            self.rates.append(self._samples / took)

    def end(self) -> None:
        self._over = True
        self._go.set()
        self._thread.join(60)

    def pause(self, samples: int) -> None:
        """Let the other sides run, and restore torch's process-wide settings afterwards."""
        _synchronize()
        self._samples = samples
        before = torch.get_float32_matmul_precision()
        parts: list[Any] = [torch.backends.cuda.matmul, torch.backends.cudnn.conv]  # type: ignore[attr-defined]
        kept = [each.fp32_precision for each in parts]
        self._go.clear()
        self._rests.set()
        self._go.wait()
        if self._over:
            raise BenchmarkOver
        torch.set_float32_matmul_precision(before)
        for each, precision in zip(parts, kept, strict=True):
            each.fp32_precision = precision

    def _run(self) -> None:
        self._go.wait()
        try:
            self._body(self.pause)
        except BenchmarkOver:
            pass
        except BaseException:
            self.error = traceback.format_exc()
        finally:
            self._rests.set()


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
