"""Canaries under continuous peeking: how often equals are rolled back, and how soon a regression is caught.

Each simulated canary is judged after every value, by the bets that Falaj makes. The peers: for false verdicts the rule
that Falaj had before (decision 0011: three looks at scores, a count of errors), or a z-test at 1 % after every request;
for the number of values a z-test with a fixed sample, of the same error rates, which may be looked at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from falaj.control.pipelines.betting import Margin, Thresholds, log_growth, log_mean, payoffs
from falaj.control.pipelines.verdict import LOG_LOSS_BOUND
from harness import Result, Rule, report, say

QUICK = True
CANARIES = 10_000
REGRESSIONS = 1_000
VALUES = 1_000
"""Values of the challenger in an A/A canary."""
AT_ONCE = 250_000
"""Values that are computed at once: about 100 MB."""
TIMES = 9
"""Values of the champion to one of the challenger: its share is 10 %."""
FALSE_ROLLBACK, FALSE_PROMOTION = 0.01, 0.05

Floats = npt.NDArray[np.float64]
Draw = Callable[[np.random.Generator, float, tuple[int, ...]], Floats]


@dataclass(frozen=True)
class Case:
    """A metric at the default margin: the champion's level, a regression, and how values of a level are drawn."""

    name: str
    draw: Draw
    level: float
    worse: tuple[float, ...]
    margin: Margin
    old_rule: Callable[[Floats, Floats], npt.NDArray[np.bool_]]
    goal: float = 1.3
    """How many times the values of the fixed sample a regression may take."""

    def pairs(
        self, rng: np.random.Generator, level: float, *, canaries: int, values: int
    ) -> Iterator[tuple[Floats, Floats]]:
        """Yield means of the champion's values, and values of a challenger at `level`, of some canaries at a time."""
        at_once = max(1, AT_ONCE // values)
        for start in range(0, canaries, at_once):
            size = min(at_once, canaries - start), values
            yield self.draw(rng, self.level, (*size, TIMES)).mean(axis=-1), self.draw(rng, level, size)

    @property
    def allowed(self) -> float:
        return self.margin.absolute + self.margin.relative * self.level


def rates(rng: np.random.Generator, level: float, size: tuple[int, ...]) -> Floats:
    return (rng.random(size, dtype=np.float32) < level).astype(np.float64)


def losses(rng: np.random.Generator, level: float, size: tuple[int, ...]) -> Floats:
    """Return log losses, as shares of their bound, of a calibrated classifier; `level` times those of the champion."""
    chance = rng.beta(1.2, 2.4, size)
    right = np.where(rng.random(size) < chance, chance, 1 - chance)
    return np.minimum(-level / UNIT * np.log(np.maximum(right, 1e-7)) / LOG_LOSS_BOUND, 1.0)


# ---------------------------------------------------------------------------------------------- rules


def first_reached(payoff: Floats, wealth: float) -> Floats:
    """Return after how many values the wealth of each canary first reaches a threshold; inf if it never does."""
    path = log_mean(np.cumsum(log_growth(payoff), axis=1)) >= wealth
    return np.where(path.any(axis=1), path.argmax(axis=1) + 1.0, np.inf)


def old_errors(champion: Floats, challenger: Floats) -> npt.NDArray[np.bool_]:
    """Return which canaries the old rule rolled back: 1 % more errors than the champion has, of 500 requests."""
    seen = np.arange(1, 501)
    allowed = np.cumsum(champion[:, :500], axis=1) / seen + 0.01
    rolled: npt.NDArray[np.bool_] = (np.cumsum(challenger[:, :500], axis=1) > allowed * 500).any(axis=1)
    return rolled


def peeking(champion: Floats, challenger: Floats) -> npt.NDArray[np.bool_]:
    """Return which canaries a z-test at 1 % after every request, from the 30th, rolls back."""
    apart, seen = challenger - champion, np.arange(1, challenger.shape[1] + 1)
    mean = np.cumsum(apart, axis=1) / seen
    error = np.sqrt(np.maximum(np.cumsum(apart * apart, axis=1) / seen - mean * mean, 1e-12) / seen)
    rolled: npt.NDArray[np.bool_] = (mean > NormalDist().inv_cdf(0.99) * error)[:, 30:].any(axis=1)
    return rolled


def old_scores(champion: Floats, challenger: Floats) -> npt.NDArray[np.bool_]:
    """Return which canaries the old rule rolled back: three looks, at 200, 400 and 800 labels, 2 % of tolerance."""
    undecided, rolled = np.full(len(champion), True), np.full(len(champion), False)
    for look in (200, 400, 800):
        old, new = champion[:, :look], challenger[:, :look]
        worse = new.mean(axis=1) - old.mean(axis=1)
        bound = 2.128 * np.sqrt((new.var(axis=1, ddof=1) + old.var(axis=1, ddof=1)) / look)
        promoted = worse + bound <= 0.02 * old.mean(axis=1)
        rolled |= undecided & ~promoted & (worse - bound > 0)
        undecided &= ~promoted & ~rolled
    return rolled | undecided  # what it could not decide, it rolled back


UNIT = 1.0
UNIT = float(losses(np.random.default_rng(0), 1.0, (200_000,)).mean())
"""The mean of the losses, by which their level is scaled."""
CASES = (
    Case("error rate", rates, 0.05, (0.075, 0.20), Margin(absolute=0.01), old_errors),
    Case("latency", rates, 0.05, (0.10, 0.30), Margin(absolute=0.05), peeking),
    Case("score", losses, UNIT, (1.1 * UNIT, 1.5 * UNIT), Margin(relative=0.05), old_scores, goal=4.0),
)


# ------------------------------------------------------------------------------------------- measuring


def main() -> None:
    results: list[Result] = []
    alone = Thresholds.of(false_rollback=FALSE_ROLLBACK, false_promotion=FALSE_PROMOTION, metrics=1)
    any_rolled, any_old = np.full(CANARIES, False), np.full(CANARIES, False)
    for number, case in enumerate(CASES):
        rng = np.random.default_rng(2013 + number)
        first, old = equals(case, rng)
        any_rolled |= first["shared"]
        any_old |= old
        say(f"{case.name}: of {CANARIES:,} equals {first['alone'].sum()} rolled back; before {old.sum()}")
        what = f"{case.name}: equals rolled back, looking after every value, %"
        results.append(Result(what, percent(first["alone"]), percent(old), 1.0, Rule.FALAJ_AT_MOST))
        results += regressions(case, rng, alone)
    what = "all three at once: equals rolled back, %"
    results.append(Result(what, percent(any_rolled), percent(any_old), 1.0, Rule.FALAJ_AT_MOST))
    report("canary", results)


def equals(
    case: Case, rng: np.random.Generator
) -> tuple[dict[str, npt.NDArray[np.bool_]], npt.NDArray[np.bool_]]:
    """Return which equal challengers are rolled back, by the whole and by the shared risk, and by the old rule."""
    risks = {"alone": np.log(1 / FALSE_ROLLBACK), "shared": np.log(len(CASES) / FALSE_ROLLBACK)}
    found: dict[str, list[npt.NDArray[np.bool_]]] = {name: [] for name in (*risks, "old")}
    for champion, challenger in case.pairs(rng, case.level, canaries=CANARIES, values=VALUES):
        top = log_mean(np.cumsum(log_growth(challenger - champion), axis=1)).max(axis=1)
        for name, wealth in risks.items():
            found[name].append(top >= wealth)
        found["old"].append(case.old_rule(champion, challenger))
    joined = {name: np.concatenate(each) for name, each in found.items()}
    return {name: joined[name] for name in risks}, joined["old"]


def regressions(case: Case, rng: np.random.Generator, risks: Thresholds) -> list[Result]:
    """Return how soon regressions are rolled back and equals promoted, and how often one at the margin is promoted."""
    z, results = NormalDist().inv_cdf, []
    for level in case.worse:
        size = fixed_sample(case, rng, level, z(1 - FALSE_ROLLBACK) + z(0.95))
        caught = firsts(case, rng, level, 0, risks.worse, canaries=REGRESSIONS, values=6 * size)
        worse = f"{level / case.level:g} times the {case.name}"
        share = percent(np.isfinite(caught))
        results += [
            Result(
                f"{worse}: caught within six times that sample, %", share, 95.0, 95.0, Rule.FALAJ_AT_LEAST
            ),
            Result(f"{worse}: median values until then", float(np.median(caught)), size, case.goal),
        ]
    size = fixed_sample(case, rng, case.level, z(1 - FALSE_PROMOTION) + z(0.95))
    passed = firsts(case, rng, case.level, 2, risks.within, canaries=REGRESSIONS // 5, values=3 * size)
    margin = case.level + case.allowed
    wrong = firsts(case, rng, margin, 2, risks.within, canaries=REGRESSIONS, values=VALUES)
    return [
        *results,
        Result(f"{case.name}: median values until an equal is promoted", float(np.median(passed)), size, 1.3),
        Result(
            f"{case.name}: promoted at the margin, %",
            percent(np.isfinite(wrong)),
            5.0,
            5.0,
            Rule.FALAJ_AT_MOST,
        ),
    ]


def percent(found: npt.NDArray[np.bool_]) -> float:
    return 100 * float(found.mean())


def firsts(
    case: Case, rng: np.random.Generator, level: float, bet: int, wealth: float, *, canaries: int, values: int
) -> Floats:
    found = [
        first_reached(payoffs(*pair, case.margin)[bet], wealth)
        for pair in case.pairs(rng, level, canaries=canaries, values=values)
    ]
    return np.concatenate(found)


def fixed_sample(case: Case, rng: np.random.Generator, level: float, sigmas: float) -> int:
    """Return the sample that a z-test of the same error rates takes: of a regression, or of the margin for an equal."""
    champion, challenger = next(case.pairs(rng, level, canaries=50, values=2000))
    limit = champion * (1 + case.margin.relative) + case.margin.absolute
    apart = challenger - (champion if level > case.level else limit)
    by = level - case.level if level > case.level else case.allowed
    return int(np.ceil(sigmas**2 * apart.var() / by**2))


if __name__ == "__main__":
    main()
