"""Tails of the chi-square and F distributions, and their critical values. No SciPy: it is not a dependency."""

from __future__ import annotations

from collections.abc import Callable
from math import erfc, exp, lgamma, log, sqrt


def chi_square_tail(value: float, dof: int) -> float:
    """Return the probability that a chi-square variable exceeds `value`."""
    if value <= 0:
        return 1.0
    half = value / 2
    tail, order = (exp(-half), 1.0) if dof % 2 == 0 else (erfc(sqrt(half)), 0.5)
    while order < dof / 2:  # Q(a + 1, x) = Q(a, x) + x^a e^-x / Γ(a + 1)
        tail += exp(order * log(half) - half - lgamma(order + 1))
        order += 1
    return min(1.0, tail)


def chi_square_critical(level: float, dof: int) -> float:
    """Return the value that a chi-square variable exceeds with probability `level`."""
    return critical(lambda value: chi_square_tail(value, dof), level, start=dof + 10.0)


def f_tail(value: float, dof: float, tail: float) -> float:
    """Return the probability that an F variable with `dof` and `tail` degrees of freedom exceeds `value`."""
    if value <= 0:
        return 1.0
    return _incomplete_beta(tail / (tail + dof * value), tail / 2, dof / 2)


def critical(probability: Callable[[float], float], level: float, *, start: float) -> float:
    """Return where a falling `probability` reaches `level`."""
    low, high = 0.0, start
    while probability(high) > level:
        low, high = high, 2 * high
    while high - low > 1e-10 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if probability(middle) > level else (low, middle)
    return high


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """Return the regularized incomplete beta function I_x(a, b)."""
    if x >= 1:
        return 1.0
    front = exp(lgamma(a + b) - lgamma(a) - lgamma(b) + a * log(x) + b * log(1 - x))
    if x < (a + 1) / (a + b + 2):
        return front * _beta_fraction(x, a, b) / a
    return 1 - front * _beta_fraction(1 - x, b, a) / b


def _beta_fraction(x: float, a: float, b: float) -> float:
    """Return the continued fraction of the incomplete beta function, by Lentz's method."""
    tiny = 1e-300
    c, d = 1.0, 1 / _nonzero(1 - (a + b) * x / (a + 1), tiny)
    result = d
    for m in range(1, 1000):
        for numerator in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / _nonzero(1 + numerator * d, tiny)
            c = _nonzero(1 + numerator / c, tiny)
            result *= c * d
        if abs(c * d - 1) < 1e-14:
            break
    return result


def _nonzero(value: float, tiny: float) -> float:
    return value if abs(value) > tiny else tiny
