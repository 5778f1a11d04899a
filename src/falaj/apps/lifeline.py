"""A child of the platform ends with its parent, however the parent ends."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable


def stop_with_parent(stop: Callable[[], object]) -> None:
    """Call `stop` when the parent is gone: its end of our standard input is closed then."""

    def wait() -> None:
        while os.read(0, 1024):
            pass
        stop()

    threading.Thread(target=wait, name="lifeline", daemon=True).start()
