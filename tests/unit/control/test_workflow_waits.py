"""The pauses of a waiting workflow."""

from __future__ import annotations

import pytest

from falaj.control.controller import poll_pause_s
from falaj.control.workflows.context import LONGEST_PAUSE_S


@pytest.mark.parametrize(("waited_s", "pause"), [(0, 0.5), (10, 1.0), (100, 5.5), (86_400, LONGEST_PAUSE_S)])
def test_pauses_grow_with_the_wait(waited_s: float, pause: float) -> None:
    assert poll_pause_s(0.5, waited_s=waited_s) == pytest.approx(pause)


def test_pauses_are_never_shorter_than_requested() -> None:
    assert poll_pause_s(60, waited_s=0) == 60
    assert poll_pause_s(60, waited_s=1000) == 60
