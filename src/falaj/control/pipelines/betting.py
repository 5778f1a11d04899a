"""Anytime-valid comparison of two versions by betting; pure functions of values in the order in which they came.

A value is a loss from 0 to 1 (less is better) of one request. Each value of the challenger is compared with the mean of
the champion's values that came at the same time. On each such difference three bets are made:
that the challenger is worse, that it is worse than the margin, and that it is within the margin. Where the contrary
is true, the wealth of a bet is a non-negative supermartingale that begins at 1: it ever reaches 1/α with a probability
of α at most (Ville), however often one looks. Decision 0025 has the argument, and what it assumes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]

BETS = tuple(0.01 * math.pow(95, number / 15) for number in range(16))
"""Shares of the wealth that are staked, 1 % to 95 %; the wealth is divided equally among them (grid Kelly)."""

TIGHTEST = 500
"""Values at which a confidence sequence is tightest, in comparison with one for that number alone."""
MOST_VALUES = 1e9
"""A decision that would take more values is not forecast."""


@dataclass(frozen=True)
class Margin:
    """How much worse the challenger may be: by `absolute`, and by `relative` of the champion's mean."""

    absolute: float = 0.0
    relative: float = 0.0

    @property
    def widest(self) -> float:
        """The largest amount by which a difference and the margin can lie below zero."""
        return 1 + self.absolute + self.relative


@dataclass(frozen=True)
class Thresholds:
    """Logarithms of the wealth at which a bet is won: ln(1/α), where α is the risk of winning it falsely."""

    worse: float
    within: float

    @classmethod
    def of(cls, *, false_rollback: float, false_promotion: float, metrics: int) -> Thresholds:
        """Return the thresholds of each of several metrics.

        Any of them may roll back, so they share that risk. All of them must pass for a promotion, so each has it whole.
        """
        return cls(math.log(metrics / false_rollback), math.log(1 / false_promotion))


# ------------------------------------------------------------------------------------------- payoffs


def payoffs(champion: Floats, challenger: Floats, margin: Margin) -> tuple[Floats, Floats, Floats]:
    """Return what the three bets pay, -1 at least: on worse, on worse than the margin, on within the margin.

    `champion` holds the means of the champion's values that each value of `challenger` is compared with.
    """
    limit = champion * (1 + margin.relative) + margin.absolute
    return challenger - champion, (challenger - limit) / margin.widest, limit - challenger


def log_growth(payoff: Floats) -> Floats:
    """Return the growth of each bet's logarithm of wealth, by each payoff; the last axis is that of the bets."""
    import numpy as np

    growth: Floats = np.log1p(np.multiply.outer(payoff, np.array(BETS)))
    return growth


def log_mean(logs: Floats) -> Floats:
    """Return the logarithm of the mean wealth over the last axis, that of the bets."""
    import numpy as np

    top = logs.max(axis=-1)
    mean: Floats = top + np.log(np.exp(logs - top[..., None]).mean(axis=-1))
    return mean


def best_growth(mean: float, variance: float) -> float:
    """Return how much the best bet grows by each payoff, to the second order of its logarithm; 0 if it does not."""
    if mean <= 0:
        return 0.0
    return max(bet * mean - bet * bet * (variance + mean * mean) / 2 for bet in BETS)


# ------------------------------------------------------------------------------------------- pairing


class Pairing:
    """Matches values of both versions that came in the same short time, so that what both suffer at once cancels out.

    Values wait until there is one of the challenger, and of the champion as many as its share of traffic gives; then
    all of them are divided evenly into groups. That depends on their order and number alone, never on what they are.
    """

    def __init__(self, share: int) -> None:
        self._needed = (100 - share) // share
        self._champion: list[float] = []
        self._challenger: list[float] = []

    def add(self, champion: Sequence[float], challenger: Sequence[float]) -> tuple[Floats, Floats]:
        """Return the means of both versions in each group that is complete, the champion's first."""
        self._champion += champion
        self._challenger += challenger
        groups = min(len(self._champion), len(self._challenger))
        if len(self._champion) < self._needed:
            groups = 0
        matched = _group_means(self._champion, groups), _group_means(self._challenger, groups)
        if groups:
            self._champion, self._challenger = [], []
        return matched


def _group_means(values: Sequence[float], groups: int) -> Floats:
    """Return the means of `groups` runs of values, which are as even as can be."""
    import numpy as np

    starts = np.arange(groups) * len(values) // max(groups, 1)
    if not groups:
        return np.array([])
    means: Floats = np.add.reduceat(np.array(values), starts) / np.diff(starts, append=len(values))
    return means


def shuffled(values: Sequence[float], seed: str) -> list[float]:
    """Return `values` in an order that `seed` decides: values that came together came in no order of their own."""
    order = random.Random(seed)  # noqa: S311 - it must give the same order after a restart
    return order.sample(values, len(values))


def indicators(count: int, ones: int, seed: str) -> list[float]:
    """Return `count` values, of which `ones` are 1 and the others 0, in an order that `seed` decides."""
    values = [0.0] * count
    for place in random.Random(seed).sample(range(count), ones):  # noqa: S311 - as above
        values[place] = 1.0
    return values


# ---------------------------------------------------------------------------------------- comparison


@dataclass
class Comparison:
    """The evidence on one metric so far. `passed` and `failed` stay: a bet that was won stays won."""

    margin: Margin
    thresholds: Thresholds
    share: int
    count: int = 0
    passed: bool = False
    failed: bool = False
    _sums: list[float] = field(default_factory=lambda: [0.0] * 3)
    _logs: list[Floats | float] = field(default_factory=lambda: [0.0] * 3)
    _pairing: Pairing | None = None

    def add(self, champion: Sequence[float], challenger: Sequence[float]) -> None:
        """Add values from 0 to 1 that came together; they are in no order that depends on them."""
        self._pairing = self._pairing or Pairing(self.share)
        others, own = self._pairing.add(champion, challenger)
        if not len(own):
            return
        apart = own - others
        new = (float(others.sum()), float(own.sum()), float((apart * apart).sum()))
        self._sums = [old + more for old, more in zip(self._sums, new, strict=True)]
        self.count += len(own)
        paid = payoffs(others, own, self.margin)
        self._logs = [
            logs + log_growth(each).sum(axis=0) for logs, each in zip(self._logs, paid, strict=True)
        ]
        self.passed = self.passed or self.log_within >= self.thresholds.within
        worse = self.log_beyond if self.passed else self.log_worse
        self.failed = self.failed or worse >= self.thresholds.worse

    @property
    def champion_mean(self) -> float | None:
        return self._sums[0] / self.count if self.count else None

    @property
    def challenger_mean(self) -> float | None:
        return self._sums[1] / self.count if self.count else None

    @property
    def variance(self) -> float | None:
        """The variance of the differences."""
        if not self.count:
            return None
        mean = (self._sums[1] - self._sums[0]) / self.count
        return max(self._sums[2] / self.count - mean * mean, 0.0)

    @property
    def allowed(self) -> float | None:
        """The margin as an absolute difference, by the champion's mean so far."""
        mean = self.champion_mean
        return None if mean is None else self.margin.absolute + self.margin.relative * mean

    def interval(self, risk: float) -> tuple[float, float] | None:
        """Return an asymptotic confidence sequence of the mean difference: right at all times at once but for `risk`.

        It is that of a normal mixture (Waudby-Smith and others, 2021), tightest at `TIGHTEST` values, with a quarter
        added to the squares so that it is not too narrow at first. It is for eyes; the bets decide.
        """
        if not self.count or self.variance is None:
            return None
        count, mean = self.count, (self._sums[1] - self._sums[0]) / self.count
        deviation = math.sqrt((count * self.variance + 0.25) / (count + 1))
        spread = -2 * math.log(risk) + math.log(-2 * math.log(risk) + 1)
        rho = spread / TIGHTEST
        grown = count * rho + 1
        width = deviation * math.sqrt(2 * grown / (count * count * rho) * math.log(math.sqrt(grown) / risk))
        return max(mean - width, -1.0), min(mean + width, 1.0)

    def more(self) -> int | None:
        """Return about how many more values of the challenger decide, if the difference stays as it is so far."""
        variance, allowed = self.variance, self.allowed
        if self.passed or self.failed or variance is None or allowed is None:
            return None
        apart = (self._sums[1] - self._sums[0]) / self.count
        ways = (
            (allowed - apart, self.thresholds.within - self.log_within),
            (apart, self.thresholds.worse - self.log_worse),
        )
        found = [missing / rate for by, missing in ways if (rate := best_growth(by, variance)) > 0]
        nearest = min(found, default=math.inf)
        return math.ceil(nearest) if nearest < MOST_VALUES else None

    @property
    def log_worse(self) -> float:
        """The logarithm of the wealth of the bet that the challenger is worse."""
        return self._log(0)

    @property
    def log_beyond(self) -> float:
        """The same of the bet that it is worse than the margin; never more than `log_worse`."""
        return self._log(1)

    @property
    def log_within(self) -> float:
        """The same of the bet that it is not worse than the margin."""
        return self._log(2)

    def _log(self, number: int) -> float:
        logs = self._logs[number]
        return 0.0 if isinstance(logs, float) else float(log_mean(logs))
