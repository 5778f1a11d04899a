"""How far an attempt is: from what it says of its steps, or from the steps of its metrics."""

from __future__ import annotations

from datetime import timedelta

import pytest

from falaj.control.jobs.progress import RESTART_S, WINDOW_S, ProgressMeter
from falaj.records.tracking import MetricPoint
from falaj.records.training.jobs import JobProgress


class Seconds:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def seconds() -> Seconds:
    return Seconds()


@pytest.fixture
def pace(seconds: Seconds) -> ProgressMeter:
    return ProgressMeter(seconds)


def point(key: str, value: float, step: int) -> MetricPoint:
    return MetricPoint(key=key, value=value, step=step)


def told(pace: ProgressMeter) -> JobProgress:
    progress = pace.progress()
    assert progress is not None
    return progress


def test_nothing_is_known_before_anything_is_said(pace: ProgressMeter) -> None:
    assert pace.progress() is None


def test_rate_and_time_left_follow_from_the_steps(pace: ProgressMeter, seconds: Seconds) -> None:
    pace.advance(0, 100)
    seconds.now += 10
    pace.advance(20, 100)

    progress = told(pace)

    assert progress == JobProgress(step=20, total=100, rate=2.0)
    assert progress.left == timedelta(seconds=40)


def test_the_rate_is_that_of_the_last_half_minute(pace: ProgressMeter, seconds: Seconds) -> None:
    for step in range(0, 100, 10):  # ten a second
        pace.advance(step, 1000)
        seconds.now += 1
    for step in range(100, 100 + int(WINDOW_S) + 2):  # then one
        pace.advance(step, 1000)
        seconds.now += 1

    assert told(pace).rate == pytest.approx(1.0)


def test_metrics_alone_tell_the_step_and_the_loss(pace: ProgressMeter, seconds: Seconds) -> None:
    pace.measure([point("loss", 0.5, 1), point("loss", 0.25, 2), point("auc", 0.9, 2)])
    seconds.now += 1
    pace.measure([point("train/loss", 0.125, 6)])

    assert told(pace) == JobProgress(step=6, total=None, loss=0.125, rate=4.0)
    assert told(pace).left is None


def test_what_it_says_itself_counts_more_than_the_steps_of_its_metrics(pace: ProgressMeter) -> None:
    pace.advance(1, 10)  # epochs
    pace.measure([point("loss", 0.5, 4000)])  # batches

    assert (told(pace).step, told(pace).loss) == (1, 0.5)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_is_not_told(pace: ProgressMeter, value: float) -> None:
    pace.measure([point("loss", 0.5, 1)])

    pace.measure([point("loss", value, 2)])

    assert (told(pace).step, told(pace).loss) == (2, 0.5)


def test_the_loss_on_other_data_is_not_the_runs_own(pace: ProgressMeter) -> None:
    pace.measure([point("val_loss", 0.5, 1), point("closs", 1.0, 1)])

    assert told(pace).loss is None


def test_processes_that_are_behind_do_not_turn_it_back(pace: ProgressMeter, seconds: Seconds) -> None:
    for step in range(10):
        pace.advance(step + 1, 100)
        seconds.now += 0.5
        pace.advance(step, 100)
        seconds.now += 0.5

    assert told(pace) == JobProgress(step=10, total=100, rate=1.0)


def test_a_run_that_began_anew_has_no_rate_below_zero(pace: ProgressMeter, seconds: Seconds) -> None:
    pace.advance(50, 100)
    seconds.now += RESTART_S
    pace.advance(10, 100)
    assert told(pace) == JobProgress(step=10, total=100)
    seconds.now += 1
    pace.advance(12, 100)

    assert told(pace).rate == 2.0


def test_a_clock_that_stands_still_divides_by_nothing(pace: ProgressMeter) -> None:
    pace.advance(1, 10)
    pace.advance(2, 10)

    assert told(pace) == JobProgress(step=2, total=10)


@pytest.mark.parametrize(
    ("progress", "left"),
    [
        (JobProgress(step=5, total=5, rate=1.0), timedelta(0)),
        (JobProgress(step=6, total=5, rate=1.0), None),
        (JobProgress(step=5, total=10), None),
        (JobProgress(step=0, total=2**62, rate=0.0001), timedelta(days=3650)),
    ],
    ids=str,
)
def test_the_time_left_is_never_absurd(progress: JobProgress, left: timedelta | None) -> None:
    assert progress.left == left
