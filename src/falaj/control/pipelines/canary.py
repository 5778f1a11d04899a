"""The verdict on a challenger, as a pure function of what both versions have answered.

Scores are looked at three times at most: when there are `labels` of each version, twice and four times as many. The
bound of each look is that of a third of the risk (Bonferroni), so that looking three times costs no more than the
stated risk in all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from falaj.records.control.pipelines import Canary, CanaryVerdict
from falaj.records.serving import VersionStats

ANALYSES = 3
BOUND = 2.128
"""Standard errors: one-sided, 5 % in all, a third of it for each look."""


@dataclass(frozen=True)
class ScoreDifference:
    """How much worse the challenger's mean score is, and how far that may be off."""

    worse_by: float
    uncertainty: float
    allowed: float


def evaluate_canary(
    champion: VersionStats, challenger: VersionStats, plan: Canary, *, looked: int = 0, is_over: bool = False
) -> CanaryVerdict | None:
    """The verdict, or none while more has to be seen. `looked` looks at the scores were undecided."""
    allowed = _error_rate(champion) + plan.error_rate
    if challenger.errors > allowed * max(plan.requests, challenger.requests):
        words = f"{challenger.errors} of {challenger.requests} requests failed; {allowed:.1%} may"
        return CanaryVerdict(promote=False, words=words, champion=champion, challenger=challenger)
    if not _is_due(champion, challenger, plan, looked=looked):
        return _undecided(champion, challenger, plan) if is_over else None
    if plan.labels == 0:
        words = (
            f"its error rate is {_error_rate(challenger):.1%}, {allowed:.1%} may fail; no score was asked for"
        )
        return CanaryVerdict(promote=True, words=words, champion=champion, challenger=challenger)
    scores = compare(champion, challenger, plan)
    if scores.worse_by + scores.uncertainty <= scores.allowed:
        return _scored(champion, challenger, scores, promote=True, words="it is not worse")
    if scores.worse_by - scores.uncertainty > 0:
        return _scored(champion, challenger, scores, promote=False, words="it is worse")
    if analyses_reached(champion, challenger, plan) >= ANALYSES or is_over:
        return _scored(
            champion, challenger, scores, promote=False, words="it could not be shown to be as good"
        )
    return None


def compare(champion: VersionStats, challenger: VersionStats, plan: Canary) -> ScoreDifference:
    """The difference of the mean scores, less is better."""
    old, new = champion.score_mean or 0.0, challenger.score_mean or 0.0
    error = math.sqrt(_error_of_mean(champion) + _error_of_mean(challenger))
    return ScoreDifference(worse_by=new - old, uncertainty=BOUND * error, allowed=plan.tolerance * abs(old))


def analyses_reached(champion: VersionStats, challenger: VersionStats, plan: Canary) -> int:
    """How many looks the labels that are there would have allowed."""
    labels = min(champion.labelled, challenger.labelled)
    return 0 if plan.labels == 0 else sum(labels >= plan.labels * 2**look for look in range(ANALYSES))


def _is_due(champion: VersionStats, challenger: VersionStats, plan: Canary, *, looked: int) -> bool:
    seen = all(version.requests >= plan.requests for version in (champion, challenger))
    return seen and (plan.labels == 0 or analyses_reached(champion, challenger, plan) > looked)


def _error_rate(version: VersionStats) -> float:
    return version.errors / version.requests if version.requests else 0.0


def _error_of_mean(version: VersionStats) -> float:
    """The variance of the mean score."""
    return (version.score_variance or 0.0) / max(version.labelled, 1)


def _scored(
    champion: VersionStats, challenger: VersionStats, scores: ScoreDifference, *, promote: bool, words: str
) -> CanaryVerdict:
    seen = f"{scores.worse_by:+.4f} ± {scores.uncertainty:.4f}, {scores.allowed:+.4f} allowed"
    return CanaryVerdict(
        promote=promote,
        words=f"{words}: its score differs by {seen}, on {challenger.labelled} labels",
        champion=champion,
        challenger=challenger,
        worse_by=scores.worse_by,
        uncertainty=scores.uncertainty,
    )


def _undecided(champion: VersionStats, challenger: VersionStats, plan: Canary) -> CanaryVerdict:
    words = (
        f"too little was seen in time: {challenger.requests} of {plan.requests} requests, "
        f"{challenger.labelled} of {plan.labels} labels"
    )
    return CanaryVerdict(promote=False, words=words, champion=champion, challenger=challenger)
