"""Batch predictions in a folder of the test."""

from __future__ import annotations

from pathlib import Path

import pytest

from batch_runs import BatchRunner
from falaj.serving.runtime.batch_prediction import run as batch_run


@pytest.fixture
def batch(tmp_path: Path) -> BatchRunner:
    return BatchRunner(tmp_path)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> int:
    """Let a part have 1000 rows and count at once, so that small inputs have many."""
    monkeypatch.setattr(batch_run, "PART_ROWS", 1000)
    monkeypatch.setattr(batch_run, "COMMIT_S", 0.0)
    return 1000
