"""Decides how many replicas of the model server there should be, from samples of their load.

More replicas follow load within seconds, fewer within minutes: starting one too many costs little, stopping one too
early costs latency. What `n` replicas could not do is remembered with its load, so that `n` is not tried again before
there is less of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import NamedTuple

from falaj.records.control.replicas import ReplicaConfig

UP_WINDOW_S = 3.0
"""Load of this long decides about more replicas."""
DOWN_WINDOW_S = 60.0
"""Load of all of this long must allow fewer."""
SETTLE_S = 5.0
"""After a change, the load says nothing yet about the new number: what had waited is still being answered."""
DOWN_SHARE = 0.7
"""Share of `concurrency` that the remaining replicas may have at most."""
LESS_LOAD = 0.8
"""Share of the load that a number of replicas could not carry, below which it is tried again."""
FORGET_S = 1800.0
"""After so long a number of replicas that could not carry a load is tried again: models change."""


class LoadSample(NamedTuple):
    """The load of all ready replicas at a time."""

    at: float
    ready: int
    in_flight: float
    requests_per_s: float
    refused_per_s: float = 0.0
    p99_ms: float | None = None


class ScalingDecision(NamedTuple):
    replicas: int
    reason: str


class Insufficient(NamedTuple):
    """A load that a number of replicas could not carry."""

    requests_per_s: float
    at: float


@dataclass(frozen=True)
class ScalingState:
    """What a decision needs of earlier ones."""

    wanted: int
    changed_at: float
    """When `wanted` last changed."""
    last_request_at: float
    insufficient: dict[int, Insufficient] = field(default_factory=dict)
    """By number of replicas."""


def decide_replicas(
    config: ReplicaConfig, state: ScalingState, samples: Sequence[LoadSample], *, waiting: bool, now: float
) -> tuple[ScalingDecision, ScalingState]:
    """Return how many replicas there should be and why, and the state for the next decision.

    `samples` are those of the last `DOWN_WINDOW_S`, oldest first. `waiting`: a client waits, and no replica is ready.
    """
    if waiting or any(each.requests_per_s or each.in_flight for each in samples[-1:]):
        state = replace(state, last_request_at=now)
    decision = _decision(config, state, samples, waiting=waiting, now=now)
    within = min(max(decision.replicas, config.min), config.most)
    if within != decision.replicas:
        bound = "max" if within < decision.replicas else "min"
        decision = ScalingDecision(within, f"{decision.reason}; {bound} is {within}")
    if decision.replicas == state.wanted:
        return decision, state
    return decision, _changed(state, decision.replicas, samples, now)


def _changed(state: ScalingState, wanted: int, samples: Sequence[LoadSample], now: float) -> ScalingState:
    insufficient = {number: each for number, each in state.insufficient.items() if now - each.at < FORGET_S}
    if state.wanted and wanted > state.wanted and samples:
        rate = _mean([each.requests_per_s for each in _within(samples, UP_WINDOW_S, now)])
        insufficient[state.wanted] = Insufficient(rate, now)
    return replace(state, wanted=wanted, changed_at=now, insufficient=insufficient)


def _decision(
    config: ReplicaConfig, state: ScalingState, samples: Sequence[LoadSample], *, waiting: bool, now: float
) -> ScalingDecision:
    if state.wanted == 0:
        reason = "a client waits" if waiting else "there are no requests"
        return ScalingDecision(int(waiting), reason)
    idle_s = now - state.last_request_at
    if config.min == 0 and idle_s >= config.idle.total_seconds():
        return ScalingDecision(0, f"there was no request for {idle_s:.0f} s")
    recent = _within(samples, UP_WINDOW_S, now)
    return (
        _more(config, state, recent, now)
        or _fewer(config, state, samples, now)
        or ScalingDecision(state.wanted, "the load fits")
    )


def _more(
    config: ReplicaConfig, state: ScalingState, recent: Sequence[LoadSample], now: float
) -> ScalingDecision | None:
    """Return the decision for more replicas if the load of the last seconds asks for them."""
    if not recent or now - state.changed_at < SETTLE_S or any(each.ready < state.wanted for each in recent):
        return None
    in_flight = _mean([each.in_flight for each in recent])
    needed = ceil(
        in_flight / config.concurrency
    )  # at most twice as many: a queue that backs up asks for too many
    if needed > state.wanted:
        words = f"{in_flight:.0f} requests at a time exceed {config.concurrency} for each of {state.wanted}"
        return ScalingDecision(min(needed, 2 * state.wanted), words)
    if in_flight < state.wanted:
        return None  # where requests do not wait for each other, another replica makes none of them faster
    refused = _mean([each.refused_per_s for each in recent])
    if refused:
        return ScalingDecision(state.wanted + 1, f"{refused:.0f} requests/s are refused")
    if config.p99 is not None:
        target_ms = config.p99.total_seconds() * 1000
        late = [each.p99_ms for each in recent if each.p99_ms is not None]
        if late and min(late) > target_ms:
            words = f"p99 is {_mean(late):.0f} ms, above {target_ms:.0f} ms"
            return ScalingDecision(state.wanted + 1, words)
    return None


def _fewer(
    config: ReplicaConfig, state: ScalingState, samples: Sequence[LoadSample], now: float
) -> ScalingDecision | None:
    """Return the decision for one replica less, if the load of the whole window allows it."""
    fewer = state.wanted - 1
    watched = samples and samples[0].at <= now - DOWN_WINDOW_S * 0.9
    if fewer < max(1, config.min) or now - state.changed_at < DOWN_WINDOW_S or not watched:
        return None
    in_flight = max(each.in_flight for each in samples)
    if in_flight > fewer * config.concurrency * DOWN_SHARE or any(each.refused_per_s for each in samples):
        return None
    rate = max(each.requests_per_s for each in samples)
    known = state.insufficient.get(fewer)
    if known is not None and now - known.at < FORGET_S and rate > LESS_LOAD * known.requests_per_s:
        return None
    if config.p99 is not None and _misses(samples, config.p99.total_seconds() * 1000):
        return None
    return ScalingDecision(fewer, f"{in_flight:.0f} requests at a time fit {fewer}")


def _misses(samples: Sequence[LoadSample], target_ms: float) -> bool:
    """Tell whether p99 exceeded its target in more than one of ten samples."""
    known = [each.p99_ms for each in samples if each.p99_ms is not None]
    return sum(p99 > target_ms for p99 in known) > len(known) / 10


def _within(samples: Sequence[LoadSample], seconds: float, now: float) -> list[LoadSample]:
    return [each for each in samples if each.at > now - seconds]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
