"""Drift over time, and the values of a column before and now, from the windows that are kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from falaj.errors import NotFound
from falaj.governance.operations.caller import acting_as
from falaj.records.monitoring.monitors import MonitorWindow
from falaj.records.monitoring.sketches import ColumnKind, DriftVerdict

if TYPE_CHECKING:
    from conftest import MonitoringEnv


def rows(env: MonitoringEnv, count: int, *, shift: float = 0.0) -> dict[str, np.ndarray]:
    return {
        "distance": env.rng.normal(shift, 1, count),
        "carrier": env.rng.choice(["AA", "<b>UA"], count, p=[0.5, 0.5]),
    }


@pytest.fixture
def watched(light_env: MonitoringEnv) -> str:
    """A monitor with four windows of 500 rows, of which the last two have drifted in `distance`."""
    ident = light_env.watched(rows(light_env, 5000), window=MonitorWindow(rows=500)).id
    for shift in (0.0, 0.0, 1.5, 1.5):
        light_env.deliver(rows(light_env, 500, shift=shift))
        light_env.service.evaluate()
    return ident


def test_the_history_has_the_drift_of_each_column_in_each_window(
    light_env: MonitoringEnv, watched: str
) -> None:
    found = light_env.service.history(watched)

    assert [each.rows for each in found.windows] == [500] * 4
    assert [each.verdict for each in found.windows] == [DriftVerdict.NONE] * 2 + [DriftVerdict.DRIFT] * 2
    last = {each.name: each for each in found.windows[-1].columns}
    assert last["distance"].effect > 1
    assert last["carrier"].verdict is DriftVerdict.NONE
    assert [each.since for each in found.windows] == sorted(each.since for each in found.windows)


def test_more_windows_than_asked_for_are_merged(light_env: MonitoringEnv, watched: str) -> None:
    found = light_env.service.history(watched, windows=2)

    assert [(each.rows, each.verdict) for each in found.windows] == [
        (1000, DriftVerdict.NONE),
        (1000, DriftVerdict.DRIFT),
    ]


def test_a_distribution_shows_numbers_before_and_now_in_the_same_bins(
    light_env: MonitoringEnv, watched: str
) -> None:
    windows = light_env.service.history(watched).windows

    found = light_env.service.distribution(watched, "distance", since=windows[2].since, bins=10)

    assert (found.kind, found.version, len(found.edges)) == (ColumnKind.NUMERIC, "3", 11)
    assert (sum(found.before), sum(found.now)) == (5000, 1000)
    middles = (np.array(found.edges[1:]) + np.array(found.edges[:-1])) / 2
    shift = np.average(middles, weights=found.now) - np.average(middles, weights=found.before)
    assert shift == pytest.approx(1.5, abs=0.2)


def test_a_distribution_of_texts_has_categories(light_env: MonitoringEnv, watched: str) -> None:
    found = light_env.service.distribution(watched, "carrier")

    assert {*found.categories} == {"AA", "<b>UA"}
    assert (sum(found.before), sum(found.now)) == (5000, 2000)


def test_a_column_that_is_not_watched_is_not_found(light_env: MonitoringEnv, watched: str) -> None:
    with pytest.raises(NotFound, match="nothing"):
        light_env.service.distribution(watched, "nothing")
    with pytest.raises(NotFound, match="no rows"):
        light_env.service.distribution(watched, "distance", version="9")


def test_a_stranger_sees_neither(light_env: MonitoringEnv, watched: str) -> None:
    with acting_as(light_env.platform.join("stranger")):
        for ask in (
            light_env.service.history,
            lambda ident: light_env.service.distribution(ident, "distance"),
        ):
            with pytest.raises(NotFound):
                ask(watched)
