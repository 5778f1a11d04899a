"""The verdict on a challenger, as a pure function of what was observed, in the order in which it was stored.

The same observations give the same verdict, so a controller that is started anew computes what the one before did.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime, timedelta

from falaj.control.pipelines.betting import Comparison, Margin, Thresholds, indicators, shuffled
from falaj.records.control.pipelines import (
    Canary,
    CanaryOutcome,
    CanaryPoint,
    CanaryVerdict,
    EvidencePoint,
    Metric,
    MetricEvidence,
)
from falaj.records.durations import rough_duration
from falaj.records.serving.endpoints import ScoringRule
from falaj.records.serving.statistics import Observation, VersionCounts, VersionStats
from falaj.serving.scores import SMALLEST, UNSCORED_LOSS, slow_bound_s, slower_than

UNJUDGED = 1.0
"""A margin that says that a metric is not judged."""

REFERENCE_REQUESTS = 200
"""The champion's first requests that give the bound of slow ones, where none is known from before."""
REFERENCE_LABELS = 100
"""The same for the bound of squared errors."""
ERROR_BOUND = 10
"""Squared errors beyond so many times the champion's mean count as that."""
LOG_LOSS_BOUND = -math.log(SMALLEST)
"""The largest log loss that is ever recorded."""

_MOST = 700.0  # of a logarithm, so that an e-value is a float


def judged_metrics(plan: Canary) -> dict[Metric, Margin]:
    """Return the margin of each metric that is judged."""
    margins: dict[Metric, Margin] = {}
    if plan.error_rate < UNJUDGED:
        margins["error_rate"] = Margin(absolute=plan.error_rate)
    if plan.latency < UNJUDGED:
        margins["latency"] = Margin(absolute=plan.latency)
    if plan.labels:
        margins["score"] = Margin(relative=plan.tolerance)
    return margins


def thresholds(plan: Canary) -> Thresholds:
    """Return the thresholds of each metric."""
    return Thresholds.of(
        false_rollback=plan.false_rollback,
        false_promotion=plan.false_promotion,
        metrics=len(judged_metrics(plan)),
    )


class CanaryJudge:
    """Judges a challenger by observations. `slow_above_s` and `score_bound` stem from before the canary.

    Where they are not known, the champion's first values give them, and those are not compared.
    """

    def __init__(
        self,
        plan: Canary,
        *,
        champion: str,
        challenger: str,
        slow_above_s: float | None = None,
        score_bound: float | None = None,
    ) -> None:
        self._plan = plan
        self._names = champion, challenger
        self._slow_above_s = slow_above_s
        self._score_bound = plan.score_bound or score_bound
        self._latency: list[int] = []
        self._scores: list[float] = []
        self._requests = [0, 0]
        self._labels = [0, 0]
        self.last = 0
        """The number of the last observation."""
        self.last_at: datetime | None = None
        self.comparisons = {
            name: Comparison(margin, thresholds(plan), plan.share)
            for name, margin in judged_metrics(plan).items()
        }

    def add(self, seen: Observation, scoring: ScoringRule | None) -> None:
        """Add an observation; they come in the order of their numbers, and none comes twice."""
        self.last, self.last_at = seen.number, seen.at
        counts = [_of(seen.requests, name) for name in self._names]
        scores = [seen.scores.get(name, ()) for name in self._names]
        self._requests = [n + each.requests for n, each in zip(self._requests, counts, strict=True)]
        self._labels = [n + len(each) for n, each in zip(self._labels, scores, strict=True)]
        if seen.requests:
            self._add_errors(seen, counts)
            self._add_latency(seen, counts)
        if seen.scores:
            self._add_scores(seen, scores, scoring)

    def outcome(self) -> CanaryOutcome:
        """Return what the observations so far show."""
        compared = self.comparisons.values()
        if any(each.failed for each in compared):
            return CanaryOutcome.ROLL_BACK
        enough = min(self._requests) >= self._plan.requests and min(self._labels) >= self._plan.labels
        passed = all(each.passed for each in compared)
        return CanaryOutcome.PROMOTE if passed and enough else CanaryOutcome.UNDECIDED

    def progress(self) -> str:
        """Return what was seen so far, in words."""
        found = f"{self._requests[1]:,} requests" + (
            f", {self._labels[1]:,} labels" if self._plan.labels else ""
        )
        states = [f"{_NAMES[name]} {_state(each)}" for name, each in self.comparisons.items()]
        return f"{found}; {', '.join(states)}"

    def verdict(
        self, champion: VersionStats, challenger: VersionStats, *, elapsed: timedelta = timedelta()
    ) -> CanaryVerdict:
        """Return the verdict; `elapsed` is how long the canary took."""
        outcome = self.outcome()
        evidence = tuple(_evidence(name, each, self._scale(name)) for name, each in self.comparisons.items())
        words = self._words(outcome, elapsed)
        return CanaryVerdict(
            outcome=outcome,
            promote=outcome is CanaryOutcome.PROMOTE,
            words=words,
            champion=champion,
            challenger=challenger,
            evidence=evidence,
        )

    def point(self, at: datetime) -> CanaryPoint:
        """Return the evidence so far, for a plot."""
        risk = self._plan.false_promotion
        metrics = []
        for name, found in self.comparisons.items():
            scale, bounds = self._scale(name), found.interval(risk)
            low, high = (None, None) if bounds is None else (bounds[0] * scale, bounds[1] * scale)
            evidence = _evidence(name, found, scale)
            metrics.append(EvidencePoint(**evidence.model_dump(), low=low, high=high))
        return CanaryPoint(
            number=self.last,
            at=at,
            requests=self._requests[1],
            labels=self._labels[1],
            metrics=tuple(metrics),
        )

    # -------------------------------------------------------------------------------------- observations

    def _add_errors(self, seen: Observation, counts: Sequence[VersionCounts]) -> None:
        if (comparison := self.comparisons.get("error_rate")) is not None:
            comparison.add(*(_bits(seen, "errors", each, each.errors) for each in counts))

    def _add_latency(self, seen: Observation, counts: Sequence[VersionCounts]) -> None:
        comparison = self.comparisons.get("latency")
        if comparison is None:
            return
        bound = self._slow_above_s
        if bound is None:
            self._latency = _summed(self._latency, counts[0].latency)
            if sum(self._latency) >= REFERENCE_REQUESTS:
                self._slow_above_s = slow_bound_s(self._latency)
            return
        comparison.add(*(_bits(seen, "slow", each, slower_than(each.latency, bound)) for each in counts))

    def _add_scores(
        self, seen: Observation, scores: Sequence[Sequence[float]], scoring: ScoringRule | None
    ) -> None:
        comparison = self.comparisons.get("score")
        if comparison is None:
            return
        if self._score_bound is None and scoring is ScoringRule.LOG_LOSS:
            self._score_bound = LOG_LOSS_BOUND
        bound = self._score_bound
        if bound is None:
            self._scores += [value for value in scores[0] if value < UNSCORED_LOSS]
            if len(self._scores) >= REFERENCE_LABELS:
                self._score_bound = squared_error_bound(sum(self._scores) / len(self._scores))
            return
        values = [[min(value / bound, 1.0) for value in each] for each in scores]
        named = zip(values, self._names, strict=True)
        comparison.add(*(shuffled(each, f"{seen.number} {seen.at} {name}") for each, name in named))

    def _scale(self, metric: Metric) -> float:
        return (self._score_bound or 1.0) if metric == "score" else 1.0

    # --------------------------------------------------------------------------------------------- words

    def _words(self, outcome: CanaryOutcome, elapsed: timedelta) -> str:
        if outcome is CanaryOutcome.PROMOTE:
            return f"it is within the margins: {'; '.join(map(self._seen, self.comparisons))}"
        if outcome is CanaryOutcome.ROLL_BACK:
            failed = [self._seen(name) for name, each in self.comparisons.items() if each.failed]
            return f"it is worse: {'; '.join(failed)}"
        return self._words_undecided(elapsed)

    def _words_undecided(self, elapsed: timedelta) -> str:
        left = {name: each for name, each in self.comparisons.items() if not each.passed}
        if not left:
            return (
                f"undecided: it is within the margins, but {self._requests[1]:,} of {self._plan.requests:,} requests "
                f"and {self._labels[1]:,} of {self._plan.labels:,} labels were seen"
            )
        parts = [f"{self._seen(name)}{self._more_words(name, elapsed)}" for name in left]
        return f"undecided, which says nothing against it: {'; '.join(parts)}"

    def _seen(self, name: Metric) -> str:
        comparison, unit = self.comparisons[name], _UNITS[name]
        champion, challenger = comparison.champion_mean, comparison.challenger_mean
        if champion is None or challenger is None:
            return f"no {unit} could be compared by {_NAMES[name]}"
        shown = (_shown(name, each * self._scale(name)) for each in (challenger, champion))
        return f"{_NAMES[name]} {' against '.join(shown)} of the champion, on {comparison.count:,} {unit}"

    def _more_words(self, name: Metric, elapsed: timedelta) -> str:
        """Say how many more values would decide: about, or at least where none could be compared yet."""
        comparison, unit = self.comparisons[name], _UNITS[name]
        more = comparison.more()
        if more is None:
            least = self._plan.labels if name == "score" else self._plan.requests
            return f"; it takes {least:,} {unit} of each version at least" if not comparison.count else ""
        words = f"; about {more:,} more {unit} of the challenger would decide"
        takes = elapsed.total_seconds() * more / max(comparison.count, 1)
        return words + (f" (about {rough_duration(takes)} at this rate)" if takes else "")


_NAMES: dict[Metric, str] = {"error_rate": "error rate", "latency": "slow requests", "score": "score"}
_UNITS: dict[Metric, str] = {"error_rate": "requests", "latency": "requests", "score": "labels"}


def reference_bounds(before: VersionStats, scoring: ScoringRule | None) -> tuple[float | None, float | None]:
    """Return the bound of slow requests in seconds and that of scores, by what the champion did before the canary.

    None where too little is known.
    """
    timed = before.requests >= REFERENCE_REQUESTS and before.slow_ms is not None
    scored = scoring is ScoringRule.SQUARED_ERROR and before.labelled >= REFERENCE_LABELS
    return (
        before.slow_ms / 1000 if timed and before.slow_ms is not None else None,
        squared_error_bound(before.score_mean or 0.0) if scored else None,
    )


def squared_error_bound(mean: float) -> float:
    """Return the bound of squared errors, by the champion's mean."""
    return max(ERROR_BOUND * mean, 1e-300)


def _of(requests: Sequence[VersionCounts], version: str) -> VersionCounts:
    return next((each for each in requests if each.version == version), VersionCounts(version=version))


def _bits(seen: Observation, what: str, counts: VersionCounts, ones: int) -> list[float]:
    return indicators(
        counts.requests, min(ones, counts.requests), f"{seen.number} {seen.at} {counts.version} {what}"
    )


def _summed(first: Sequence[int], second: Sequence[int]) -> list[int]:
    longer, shorter = sorted([list(first), list(second)], key=len, reverse=True)
    return [number + (shorter[place] if place < len(shorter) else 0) for place, number in enumerate(longer)]


def _evidence(name: Metric, found: Comparison, scale: float) -> MetricEvidence:
    champion, challenger, allowed = found.champion_mean, found.challenger_mean, found.allowed
    return MetricEvidence(
        metric=name,
        compared=found.count,
        champion=None if champion is None else champion * scale,
        challenger=None if challenger is None else challenger * scale,
        margin=None if allowed is None else allowed * scale,
        worse=_e_value(found.log_worse),
        worse_needed=math.exp(found.thresholds.worse),
        within=_e_value(found.log_within),
        within_needed=math.exp(found.thresholds.within),
        more=found.more(),
    )


def _e_value(log: float) -> float:
    return math.exp(min(log, _MOST))


def _state(found: Comparison) -> str:
    if found.failed:
        return "worse"
    if found.passed:
        return "within its margin"
    return f"{100 * max(0.0, found.log_within / found.thresholds.within):.0f}% shown"


def _shown(name: Metric, value: float) -> str:
    return f"{value:.4f}" if name == "score" else f"{value:.2%}"
