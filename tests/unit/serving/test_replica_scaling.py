"""How many replicas a load curve leads to: a simulation of replicas that take time to start."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise

import pytest
from pydantic import ValidationError

from falaj.records.control.replicas import ReplicaConfig
from falaj.serving.runtime.replica_scaling import (
    DOWN_WINDOW_S,
    LoadSample,
    ScalingDecision,
    ScalingState,
    decide_replicas,
)

START_S = 2
CAPACITY = 1000.0
"""Requests per second of one simulated replica."""
SERVICE_MS = 4.0

Curve = Callable[[int], float]


def p99_ms(utilization: float) -> float:
    """Return the latency of a queue, which grows without bound towards full utilization."""
    return SERVICE_MS / max(0.02, 1 - utilization)


def simulated(config: ReplicaConfig, curve: Curve, *, seconds: int) -> list[ScalingDecision]:
    """Return the decisions of each second under a curve of requests per second."""
    state = ScalingState(max(config.min, 1), changed_at=0.0, last_request_at=0.0)
    samples = deque[LoadSample](maxlen=int(DOWN_WINDOW_S))
    starting: deque[int] = deque()
    ready, made = state.wanted, []
    for now in range(1, seconds):
        while starting and starting[0] <= now:
            starting.popleft()
            ready += 1
        rate = curve(now)
        waiting = rate > 0 and ready == 0
        if ready:
            served = min(rate, ready * CAPACITY)
            latency = p99_ms(rate / (ready * CAPACITY)) if rate else None
            in_flight = served * (latency or 0) / 1000 / 2
            samples.append(LoadSample(float(now), ready, in_flight, served, rate - served, latency))
        else:
            samples.clear()
        decision, state = decide_replicas(config, state, list(samples), waiting=waiting, now=float(now))
        while ready + len(starting) < decision.replicas:
            starting.append(now + START_S)
        while ready + len(starting) > decision.replicas:
            if starting:
                starting.pop()
            else:
                ready -= 1
        made.append(decision)
    return made


def numbers(decisions: list[ScalingDecision]) -> list[int]:
    """Return the numbers of replicas in order, without repetitions."""
    found = [each.replicas for each in decisions]
    return [number for place, number in enumerate(found) if place == 0 or found[place - 1] != number]


def test_little_load_stays_with_one_replica() -> None:
    made = simulated(ReplicaConfig(max=4, p99=timedelta(milliseconds=20)), lambda now: 100.0, seconds=600)

    assert numbers(made) == [1]
    assert made[-1].reason == "the load fits"


def test_latency_above_the_target_starts_replicas_until_it_is_met() -> None:
    config = ReplicaConfig(max=8, p99=timedelta(milliseconds=20), concurrency=1000)

    made = simulated(config, lambda now: 2500.0, seconds=120)

    assert numbers(made) in ([1, 2, 3, 4], [1, 2, 3])
    assert any("above 20 ms" in each.reason or "are refused" in each.reason for each in made)


def test_concurrency_starts_as_many_as_needed_up_to_twice_as_many() -> None:
    config = ReplicaConfig(max=8, concurrency=10)
    samples = [LoadSample(9.0, 1, in_flight=35.0, requests_per_s=100.0)]

    decision, _ = decide_replicas(
        config, ScalingState(1, changed_at=0.0, last_request_at=0.0), samples, waiting=False, now=10.0
    )

    assert decision == ScalingDecision(2, "35 requests at a time exceed 10 for each of 1")


def test_the_largest_number_is_never_exceeded() -> None:
    made = simulated(ReplicaConfig(max=3, p99=timedelta(milliseconds=20)), lambda now: 50_000.0, seconds=200)

    assert max(numbers(made)) == 3
    assert "; max is 3" in made[-1].reason


def test_fewer_replicas_follow_slowly_and_one_at_a_time() -> None:
    config = ReplicaConfig(max=4, p99=timedelta(milliseconds=20), concurrency=1000)

    made = simulated(config, lambda now: 2500.0 if now < 60 else 50.0, seconds=400)

    found = numbers(made)
    top = max(found)
    assert found[found.index(top) :] == list(range(top, 0, -1))
    downs = [second for second, (a, b) in enumerate(pairwise(made)) if b.replicas < a.replicas]
    assert all(second > 60 + DOWN_WINDOW_S * 0.9 for second in downs)
    assert all(b - a >= DOWN_WINDOW_S for a, b in pairwise(downs))


@pytest.mark.parametrize("rate", [700.0, 900.0, 1000.0, 1400.0, 1700.0, 1999.0, 2600.0])
def test_steady_load_does_not_flap(rate: float) -> None:
    config = ReplicaConfig(max=6, p99=timedelta(milliseconds=20))

    made = simulated(config, lambda now: rate, seconds=2400)

    settled = [each.replicas for each in made[120:]]
    changes = sum(a != b for a, b in pairwise(settled))
    assert changes <= 4, numbers(made)  # what failed is tried again every half hour


def test_short_bursts_do_not_flap() -> None:
    config = ReplicaConfig(max=4, p99=timedelta(milliseconds=20))

    made = simulated(config, lambda now: 1900.0 if now % 20 < 5 else 200.0, seconds=1200)

    settled = [each.replicas for each in made[120:]]
    assert sum(a != b for a, b in pairwise(settled)) <= 2, numbers(made)


def test_slow_models_without_a_queue_start_no_replicas() -> None:
    config = ReplicaConfig(max=4, p99=timedelta(milliseconds=20))
    samples = [LoadSample(now / 1, 1, 0.4, 2.0, p99_ms=200.0) for now in range(1, 61)]

    decision, _ = decide_replicas(
        config, ScalingState(1, changed_at=0.0, last_request_at=0.0), samples, waiting=False, now=60.0
    )

    assert decision.replicas == 1


def test_the_last_replica_stops_when_idle_only_if_asked() -> None:
    idle = timedelta(seconds=30)

    asked = simulated(ReplicaConfig(min=0, max=2, idle=idle), lambda now: 0.0, seconds=100)
    not_asked = simulated(ReplicaConfig(min=1, max=2, idle=idle), lambda now: 0.0, seconds=100)

    assert numbers(asked) == [1, 0]
    assert next(second for second, each in enumerate(asked, 1) if not each.replicas) == 30
    assert any("no request for 30 s" in each.reason for each in asked)
    assert numbers(not_asked) == [1]


def test_a_waiting_client_starts_one_from_zero() -> None:
    config = ReplicaConfig(min=0, max=2, idle=timedelta(seconds=30))

    made = simulated(config, lambda now: 5.0 if now >= 60 else 0.0, seconds=120)

    assert numbers(made) == [1, 0, 1]
    assert made[59].reason == "a client waits"


def test_settings_are_read_as_people_write_them() -> None:
    config = ReplicaConfig.model_validate({"min": 0, "max": "auto", "p99": "20ms", "idle": "10m"})

    assert (config.p99, config.idle) == (timedelta(milliseconds=20), timedelta(minutes=10))
    assert config.most >= 1


@pytest.mark.parametrize(
    "given",
    [
        {"min": 3, "max": 2},
        {"max": 0},
        {"min": -1},
        {"max": "all"},
        {"p99": "fast"},
        {"p99": "0ms"},
        {"idle": "0s"},
    ],
)
def test_settings_that_contradict_each_other_are_refused(given: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        ReplicaConfig.model_validate(given)
