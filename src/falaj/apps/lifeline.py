"""A child of the platform ends with its parent, however the parent ends."""

from __future__ import annotations

import os
from collections.abc import Callable

from falaj.governance.operations.caller import start_thread


def stop_with_parent(stop: Callable[[], object]) -> None:
    """Call `stop` when the parent is gone: its end of our standard input is closed then."""

    def wait() -> None:
        while os.read(0, 1024):
            pass
        stop()

    start_thread(wait, name="lifeline")
