"""The job service and its reconciler, on a real platform and with a launcher that the test owns."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from job_harness import JobHarness
from platforms import OwnPlatform


@pytest.fixture
def traced() -> Iterator[None]:
    """Memory is traced while the test runs, and not after it, however it ends."""
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.fixture
def harness(platform: OwnPlatform, tmp_path: Path) -> JobHarness:
    """The test runs once on SQLite and once on PostgreSQL."""
    return JobHarness(platform, tmp_path)


@pytest.fixture
def light_harness(light_platform: OwnPlatform, tmp_path: Path) -> JobHarness:
    """The same on SQLite only, for what does not depend on the database."""
    return JobHarness(light_platform, tmp_path)
