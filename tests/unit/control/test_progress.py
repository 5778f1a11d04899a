"""The progress of an attempt, from its own reports or from the steps of its metrics."""

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


def progress_of(pace: ProgressMeter) -> JobProgress:
    progress = pace.progress()
    assert progress is not None
    return progress


def test_progress_is_empty_before_the_first_report(pace: ProgressMeter) -> None:
    assert pace.progress() is None


def test_rate_and_time_left_follow_from_the_steps(pace: ProgressMeter, seconds: Seconds) -> None:
    pace.advance(0, 100)
    seconds.now += 10
    pace.advance(20, 100)

    progress = progress_of(pace)

    assert progress == JobProgress(step=20, total=100, rate=2.0)
    assert progress.left == timedelta(seconds=40)


def test_the_rate_is_that_of_the_last_half_minute(pace: ProgressMeter, seconds: Seconds) -> None:
    for step in range(0, 100, 10):  # ten a second
        pace.advance(step, 1000)
        seconds.now += 1
    for step in range(100, 100 + int(WINDOW_S) + 2):  # then one
        pace.advance(step, 1000)
        seconds.now += 1

    assert progress_of(pace).rate == pytest.approx(1.0)


def test_step_and_loss_are_taken_from_metrics_alone(pace: ProgressMeter, seconds: Seconds) -> None:
    pace.measure([point("loss", 0.5, 1), point("loss", 0.25, 2), point("auc", 0.9, 2)])
    seconds.now += 1
    pace.measure([point("train/loss", 0.125, 6)])

    assert progress_of(pace) == JobProgress(step=6, total=None, loss=0.125, rate=4.0)
    assert progress_of(pace).left is None


def test_reported_progress_takes_precedence_over_metric_steps(pace: ProgressMeter) -> None:
    pace.advance(1, 10)  # epochs
    pace.measure([point("loss", 0.5, 4000)])  # batches

    assert (progress_of(pace).step, progress_of(pace).loss) == (1, 0.5)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_a_number_is_left_out(pace: ProgressMeter, value: float) -> None:
    pace.measure([point("loss", 0.5, 1)])

    pace.measure([point("loss", value, 2)])

    assert (progress_of(pace).step, progress_of(pace).loss) == (2, 0.5)


def test_evaluation_loss_is_not_shown_as_training_loss(pace: ProgressMeter) -> None:
    pace.measure([point("val_loss", 0.5, 1), point("closs", 1.0, 1)])

    assert progress_of(pace).loss is None


def test_processes_that_lag_do_not_turn_progress_back(pace: ProgressMeter, seconds: Seconds) -> None:
    for step in range(10):
        pace.advance(step + 1, 100)
        seconds.now += 0.5
        pace.advance(step, 100)
        seconds.now += 0.5

    assert progress_of(pace) == JobProgress(step=10, total=100, rate=1.0)


def test_a_restarted_run_has_no_negative_rate(pace: ProgressMeter, seconds: Seconds) -> None:
    pace.advance(50, 100)
    seconds.now += RESTART_S
    pace.advance(10, 100)
    assert progress_of(pace) == JobProgress(step=10, total=100)
    seconds.now += 1
    pace.advance(12, 100)

    assert progress_of(pace).rate == 2.0


def test_a_stopped_clock_causes_no_division_by_zero(pace: ProgressMeter) -> None:
    pace.advance(1, 10)
    pace.advance(2, 10)

    assert progress_of(pace) == JobProgress(step=2, total=10)


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
def test_the_time_left_is_bounded(progress: JobProgress, left: timedelta | None) -> None:
    assert progress.left == left
