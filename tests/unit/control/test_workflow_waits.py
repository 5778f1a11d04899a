"""How often a workflow that waits looks."""

from __future__ import annotations

import pytest

from falaj.control.controller import poll_pause_s
from falaj.control.workflows.context import LONGEST_PAUSE_S


@pytest.mark.parametrize(("waited_s", "pause"), [(0, 0.5), (10, 1.0), (100, 5.5), (86_400, LONGEST_PAUSE_S)])
def test_it_rests_longer_the_longer_it_lasts(waited_s: float, pause: float) -> None:
    assert poll_pause_s(0.5, waited_s=waited_s) == pytest.approx(pause)


def test_it_never_looks_more_often_than_it_was_asked_to() -> None:
    assert poll_pause_s(60, waited_s=0) == 60
    assert poll_pause_s(60, waited_s=1000) == 60
