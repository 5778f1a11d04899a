"""A process that ends again and again: pauses that grow, one sentence, and its recovery."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from falaj.control.repeated_failures import PAUSES_S, RepeatedFailures, describe_cause

NOON = datetime(2026, 11, 18, 12, tzinfo=UTC)


@pytest.fixture
def failures() -> RepeatedFailures:
    return RepeatedFailures("controller", Path("/home/logs/controller.jsonl"))


def fail(failures: RepeatedFailures, *causes: str, ran_s: float = 1.0) -> list[float]:
    """Add an end for each cause, one a minute; return the pauses."""
    return [
        failures.add(cause, ran_s=ran_s, now=NOON + timedelta(minutes=number))
        for number, cause in enumerate(causes)
    ]


def test_three_ends_with_the_same_cause_are_one_sentence(failures: RepeatedFailures) -> None:
    fail(failures, "no disk", "no disk")
    before = failures.sentence

    fail(failures, "no disk")

    assert before is None
    assert failures.sentence == (
        "the controller keeps failing since 2026-11-18 12:00:00 UTC: no disk; "
        "its log is /home/logs/controller.jsonl"
    )


def test_ends_with_several_causes_are_no_sentence(failures: RepeatedFailures) -> None:
    fail(failures, "no disk", "no disk", "no memory", "no disk", "no disk")

    assert failures.sentence is None


def test_another_cause_is_told_once_it_repeats(failures: RepeatedFailures) -> None:
    fail(failures, *["no disk"] * 3, *["no memory"] * 2)
    before = failures.sentence or ""

    fail(failures, "no memory")

    assert "no disk" in before
    assert "no memory" in (failures.sentence or "")


def test_pauses_grow_up_to_the_longest(failures: RepeatedFailures) -> None:
    assert fail(failures, *["no disk"] * 7) == [*PAUSES_S, PAUSES_S[-1], PAUSES_S[-1]]


def test_a_process_that_ran_for_long_begins_anew(failures: RepeatedFailures) -> None:
    fail(failures, *["no disk"] * 4)

    assert fail(failures, "no disk", ran_s=3600) == [PAUSES_S[0]]
    assert failures.sentence is None


def test_a_process_recovers_when_it_runs_longer_than_between_its_ends(failures: RepeatedFailures) -> None:
    fail(failures, "no disk", ran_s=50)  # it ran well before
    fail(failures, "no disk", "no disk", ran_s=8)

    assert not failures.is_recovered(ran_s=15)
    assert failures.is_recovered(ran_s=17)


def test_a_process_that_recovered_must_fail_three_times_again(failures: RepeatedFailures) -> None:
    fail(failures, *["no disk"] * 3)
    failures.clear()

    fail(failures, "no disk", "no disk")

    assert failures.sentence is None
    assert not failures.is_recovered(ran_s=1000)


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (ValueError("wrong\n[parameters: 2026-11-18]"), "ValueError: wrong"),
        (KeyError(), "KeyError"),
        (ValueError("x" * 1000), "ValueError: " + "x" * 288),
    ],
)
def test_a_cause_is_the_type_and_the_first_line(error: Exception, cause: str) -> None:
    assert describe_cause(error) == cause
