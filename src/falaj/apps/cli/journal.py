"""Where the log of a platform goes that runs inside the command line: a file, and the terminal when debugging."""

from __future__ import annotations

import logging
import os
from pathlib import Path


def log_to(path: Path) -> None:
    """Write warnings and worse to `path`; with FALAJ_DEBUG=1 everything to stderr instead."""
    log = logging.getLogger("falaj")
    for handler in log.handlers[:]:
        log.removeHandler(handler)
        handler.close()
    log.propagate = False
    log.addHandler(logging.StreamHandler() if debugging() else _file(path))
    log.setLevel(logging.DEBUG if debugging() else logging.WARNING)


def debugging() -> bool:
    return os.environ.get("FALAJ_DEBUG", "") not in ("", "0")


def _file(path: Path) -> logging.Handler:
    handler = logging.FileHandler(path, encoding="utf-8", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    return handler
