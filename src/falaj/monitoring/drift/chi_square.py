"""Tail probabilities of the chi-square distribution, exact for whole degrees of freedom."""

from __future__ import annotations

from math import erfc, exp, lgamma, log, sqrt


def chi_square_tail(value: float, dof: int) -> float:
    """The chance that a chi-square variable exceeds `value`."""
    if value <= 0:
        return 1.0
    half = value / 2
    tail, order = (exp(-half), 1.0) if dof % 2 == 0 else (erfc(sqrt(half)), 0.5)
    while order < dof / 2:  # Q(a + 1, x) = Q(a, x) + x^a e^-x / Γ(a + 1)
        tail += exp(order * log(half) - half - lgamma(order + 1))
        order += 1
    return min(1.0, tail)


def chi_square_critical(level: float, dof: int) -> float:
    """The value that a chi-square variable exceeds with probability `level`."""
    low, high = 0.0, dof + 10.0
    while chi_square_tail(high, dof) > level:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if chi_square_tail(middle, dof) > level else (low, middle)
    return high
