"""Trials that hang until their timeout, without waiting for it: the hung process moves the clock itself."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from falaj.training.runtime.planning import trial_process

MARKER = "FALAJ_TEST_HUNG_TRIAL"
JUMP_S = 10_000.0


def expire_hung_trials(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let the clock of trial processes jump past every limit as soon as one of them hangs."""
    marker = folder / "hung"
    monkeypatch.setenv(MARKER, str(marker))

    def monotonic() -> float:
        return time.monotonic() + (JUMP_S if marker.exists() else 0.0)

    monkeypatch.setattr(trial_process, "time", SimpleNamespace(monotonic=monotonic))


def hang_and_expire() -> None:
    """Hang forever, in a trial process."""
    Path(os.environ[MARKER]).touch()
    while True:
        time.sleep(1)
