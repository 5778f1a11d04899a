"""SIGTERM while a model is trained: the step is finished, the run is saved, and only then the process ends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def sigterm_stops(stop: Callable[[], None]) -> Iterator[None]:
    """Inside, SIGTERM calls `stop`, and takes effect at the end. A handler of the user's own is left alone, and so are
    threads other than the main one, which cannot have any."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    was_told = False

    def note(*_: object) -> None:
        nonlocal was_told
        was_told = True
        stop()

    signal.signal(signal.SIGTERM, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if was_told:
            signal.raise_signal(signal.SIGTERM)
