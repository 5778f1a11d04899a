"""Runs like those of parallel_fit.py that log the loss of each step at once, so that repeated steps can be compared."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from parallel_fit import report_of

from falaj.training.runtime.reporting import report
from gangs import run_gang


def report_logged_at_once(options: dict[str, Any], rank: int) -> dict[str, Any]:
    report.SEND_INTERVAL_S = 0.0
    return report_of(options, rank)


def answer(requests: list[tuple[int, dict[str, Any]]], folder: Path) -> list[list[Any]]:
    return [
        run_gang(count, partial(report_logged_at_once, options), folder, together=True)
        for count, options in requests
    ]
