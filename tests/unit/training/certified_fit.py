"""Runs over several processes, as parallel_fit.py has them, which log the loss of each step at once.

So there is something to compare when a step is computed again; other runs log once a second.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from parallel_fit import said_by

from falaj.training.runtime.reporting import report
from gangs import run_gang


def said_at_once(options: dict[str, Any], rank: int) -> dict[str, Any]:
    report.SEND_INTERVAL_S = 0.0
    return said_by(options, rank)


def answer(asked: list[tuple[int, dict[str, Any]]], folder: Path) -> list[list[Any]]:
    return [
        run_gang(count, partial(said_at_once, options), folder, together=True) for count, options in asked
    ]
