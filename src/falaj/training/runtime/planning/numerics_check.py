"""Checks that a candidate computes what fp32 computes: its loss, its gradients, and the first steps of training.

Some gradients cannot be compared: at the start of a deep network with batch normalization, those of the first
layers change completely if the weights change in their last digits, in fp32 too. Therefore the weights are
perturbed by the rounding error of each precision; of the parameters whose gradients are not stable, only the
norm is compared.

For the others the gradient error is ‖g - g32‖ / ‖g32‖ over all parameters, on the same batch. A rounding error
that is small compared with the difference between batches does not harm training, so a quarter of that
difference is allowed too, up to 30 %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from falaj.training.runtime.planning.plan import Precision

LOSS_TOLERANCE: dict[Precision, float] = {"fp32": 1e-3, "tf32": 5e-3, "bf16": 2e-2, "fp16": 1e-2}
GRADIENT_TOLERANCE: dict[Precision, float] = {"fp32": 1e-2, "tf32": 3e-2, "bf16": 1e-1, "fp16": 5e-2}
PERTURBATION: dict[Precision, float] = {"fp32": 2**-21, "tf32": 2**-11, "bf16": 2**-9, "fp16": 2**-11}
"""The relative perturbation of weights: the rounding error of each precision, and of sums in fp32."""
STABLE_WITHIN = 0.1
MAX_NORM_RATIO = 3.0
MAX_TOLERANCE = 0.3
"""The largest relative gradient error that is ever allowed."""


@dataclass(frozen=True)
class NumericsReference:
    """The results of plain fp32: loss and gradients of a batch, and the losses of the first steps."""

    loss: float
    gradients: list[Tensor | None]
    noise: float
    """The relative difference between the gradients of two batches with different random numbers."""
    spread: float
    """The difference between the losses of these two batches."""
    loss_curve: list[float]


@dataclass(frozen=True)
class NumericErrors:
    """The errors of a candidate relative to the reference."""

    loss: float
    gradient: float
    size: float = 1.0
    """‖g‖ / ‖g32‖ of the gradients that are not stable, each plus a tenth of the norm of all gradients.

    The gradients of a bias before a normalization, for example, are pure rounding error, and a thousand times
    larger in bf16.
    """


def compare(
    loss: float, gradients: Sequence[Tensor | None], reference: NumericsReference, stable: Sequence[bool]
) -> NumericErrors:
    """Return the errors of a candidate; `stable` states for each parameter whether its gradient can be compared."""
    scale = max(abs(reference.loss), reference.spread, 1e-12)
    pairs = list(zip(gradients, reference.gradients, strict=True))
    comparable = [pair for pair, is_stable in zip(pairs, stable, strict=True) if is_stable]
    rest = [pair for pair, is_stable in zip(pairs, stable, strict=True) if not is_stable]
    off = relative_distance([one for one, _ in comparable], [other for _, other in comparable])
    floor = STABLE_WITHIN * gradient_norm(reference.gradients)
    sizes = [gradient_norm([pair[side] for pair in rest]) + floor for side in (0, 1)]
    ratio = sizes[0] / sizes[1] if sizes[1] else 1.0
    return NumericErrors(abs(loss - reference.loss) / scale, off, ratio)


def stable_gradients(shaken: Sequence[Tensor | None], gradients: Sequence[Tensor | None]) -> list[bool]:
    """Return for each gradient whether it is nearly the same after the weights were perturbed."""
    return [
        relative_distance([one], [other]) <= STABLE_WITHIN
        for one, other in zip(shaken, gradients, strict=True)
    ]


def gradient_norm(gradients: Sequence[Tensor | None]) -> float:
    squares = (float(g.float().square().sum(dtype=torch.float64)) for g in gradients if g is not None)
    return math.sqrt(sum(squares))


def numerics_fault(errors: NumericErrors, reference: NumericsReference, precision: Precision) -> str | None:
    """Return why a candidate with these errors must be rejected, or None."""
    loss_limit = max(LOSS_TOLERANCE[precision], reference.spread / max(abs(reference.loss), 1e-12) / 4)
    loss_limit = min(loss_limit, MAX_TOLERANCE)
    if not errors.loss <= loss_limit:
        return f"its loss differs from fp32 by {errors.loss:.1%}, allowed {loss_limit:.1%}"
    gradient_limit = min(max(GRADIENT_TOLERANCE[precision], reference.noise / 4), MAX_TOLERANCE)
    if not errors.gradient <= gradient_limit:
        return f"its gradients differ from fp32 by {errors.gradient:.1%}, allowed {gradient_limit:.1%}"
    if not 1 / MAX_NORM_RATIO <= errors.size <= MAX_NORM_RATIO:
        return f"its gradients are {errors.size:.2g} times those of fp32"
    return None


def loss_curve_fault(
    loss_curve: Sequence[float], reference: NumericsReference, precision: Precision
) -> str | None:
    """Return why the losses of the first steps must be rejected, or None."""
    if not all(math.isfinite(loss) for loss in loss_curve):
        return "its loss is not finite after a few steps"
    pairs = list(zip(loss_curve, reference.loss_curve, strict=False))
    if not pairs:
        return None
    mean = sum(abs(loss) for _, loss in pairs) / len(pairs)
    off = sum(abs(one - other) for one, other in pairs) / len(pairs)
    limit = max(5 * LOSS_TOLERANCE[precision] * mean, reference.spread)
    return None if off <= limit else f"its first losses are off by {off:.3g} in the mean, allowed {limit:.3g}"


def relative_distance(one: Sequence[Tensor | None], other: Sequence[Tensor | None]) -> float:
    """Return ‖one - other‖ / ‖other‖; infinity if only one has a gradient, or a value is not finite."""
    apart = size = 0.0
    for a, b in zip(one, other, strict=True):
        if (a is None) != (b is None):
            return math.inf
        if a is not None and b is not None:
            apart += float(torch.sum((a.float() - b.float()).square(), dtype=torch.float64))
            size += float(torch.sum(b.float().square(), dtype=torch.float64))
    if not math.isfinite(apart):
        return math.inf
    return math.sqrt(apart / size) if size else math.sqrt(apart)
