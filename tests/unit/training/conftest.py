"""The room of jobs and its keeper, on a real platform and a launcher that the test owns."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from job_ground import JobGround
from platforms import OwnPlatform


@pytest.fixture
def traced() -> Iterator[None]:
    """Memory is traced while the test runs, and not after it, however it ends."""
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.fixture
def ground(platform: OwnPlatform, tmp_path: Path) -> JobGround:
    """The test runs once on SQLite and once on PostgreSQL."""
    return JobGround(platform, tmp_path)


@pytest.fixture
def light_ground(light_platform: OwnPlatform, tmp_path: Path) -> JobGround:
    """The same on SQLite only, for what does not depend on the database."""
    return JobGround(light_platform, tmp_path)
