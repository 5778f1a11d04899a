"""The log of a platform that runs inside the command line: in a file, or on the terminal when debugging."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from falaj.apps.logs import JsonLines


def log_to(path: Path) -> None:
    """Write warnings and worse to `path` as JSON lines; with FALAJ_DEBUG=1 everything to stderr instead."""
    log = logging.getLogger("falaj")
    for handler in log.handlers[:]:
        log.removeHandler(handler)
        handler.close()
    log.propagate = False
    handler = logging.StreamHandler() if debugging() else logging.FileHandler(path, delay=True)
    handler.setFormatter(JsonLines())
    log.addHandler(handler)
    log.setLevel(logging.DEBUG if debugging() else logging.WARNING)


def debugging() -> bool:
    """Return whether FALAJ_DEBUG is set."""
    return os.environ.get("FALAJ_DEBUG", "") not in ("", "0")
