"""Ends runs of models that take too long: a model is a program, and may never come to an end."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

import numpy.typing as npt
import onnxruntime as ort

from falaj.errors import Unavailable

Array = npt.NDArray[Any]

LOOK_S = 0.25


class Watchdog:
    """Watches the runs of all models of a process, from a thread of its own that begins with the first of them."""

    def __init__(self) -> None:
        self._running: dict[int, tuple[float, ort.RunOptions]] = {}
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def run(self, session: ort.InferenceSession, feed: Mapping[str, Array], *, limit_s: float) -> list[Array]:
        """The outputs for `feed`; Unavailable if there are none in time."""
        if self._thread is None:
            self._start()
        options = ort.RunOptions()
        self._running[id(options)] = until, _ = time.monotonic() + limit_s, options
        try:
            outputs: list[Array] = session.run(None, feed, options)
            return outputs
        except Exception:
            if time.monotonic() < until:
                raise
            raise Unavailable(f"the model gave no answer within {limit_s:g} s and was stopped") from None
        finally:
            del self._running[id(options)]

    def _start(self) -> None:
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
                self._thread.start()

    def _watch(self) -> None:
        while True:
            time.sleep(LOOK_S)
            now = time.monotonic()
            for until, options in list(self._running.values()):
                if now > until:
                    options.terminate = True
