"""The service of runs on a real platform."""

from __future__ import annotations

import pytest

from falaj.tracking.service import Runs
from platforms import OwnPlatform


@pytest.fixture
def runs(platform: OwnPlatform) -> Runs:
    return platform.runs
