"""Fifty short jobs under controllers that are killed at random moments: every job ends exactly once."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from controller_kills import run_kills
from platforms import make_platform

pytestmark = pytest.mark.slow

JOBS, KILLS = 50, 20


def test_every_job_ends_exactly_once_however_often_controllers_are_killed(tmp_path: Path) -> None:
    seed = secrets.randbelow(2**31)
    print(f"seed {seed}")

    with make_platform(tmp_path) as platform:
        played = run_kills(platform, tmp_path, jobs=JOBS, kills=KILLS, seed=seed)

    assert played.faults == [], f"seed {seed}"
    assert (played.kills, played.begun, sum(played.ran.values())) == (KILLS, JOBS, JOBS)
