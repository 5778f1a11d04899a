"""Prune networks: channels (structured), or single weights (unstructured)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from falaj.optimization.runtime.gpu import copy_module
from falaj.optimization.runtime.recipes.channel_groups import channel_groups, remove_channels
from falaj.optimization.runtime.recipes.fine_tuning import fine_tune, torch_predict
from falaj.optimization.runtime.recipes.recipe_input import RecipeInput, RecipeNotApplicable, VariantFile
from falaj.optimization.runtime.recipes.training_rows import TrainingRows, training_rows

REMOVED_SHARES = (0.625, 0.5, 0.25)
"""Shares of the channels to remove, tried from the largest."""
ZERO_SHARE = 0.5
SMALLEST_WEIGHTS = 256
"""Tensors with fewer weights stay dense."""
EPOCHS = 20
RATE = 1e-3


def prune_unstructured(given: RecipeInput) -> VariantFile:
    """Set the smallest half of the weights to zero, and fine-tune the others."""
    module = _torch_module(given)
    rows = training_rows(given)
    masks = []
    for weight in module.parameters():
        if weight.ndim >= 2 and weight.numel() >= SMALLEST_WEIGHTS:
            limit = weight.detach().abs().flatten().kthvalue(int(weight.numel() * ZERO_SHARE)).values
            masks.append((weight, (weight.detach().abs() > limit).float()))
    if not masks:
        raise RecipeNotApplicable("the network has no layer with enough weights to prune")

    def apply_masks() -> None:
        with torch.no_grad():
            for weight, mask in masks:
                weight.mul_(mask)

    apply_masks()
    fine_tune(
        module,
        rows,
        seconds=given.training_s,
        epochs=EPOCHS,
        rate=RATE,
        seed=given.seed,
        after_step=apply_masks,
    )
    _require_budget(given, rows, torch_predict(module), f"with {ZERO_SHARE:.0%} of the weights at zero")
    return VariantFile(given.export(module))


def prune_channels(given: RecipeInput) -> VariantFile:
    """Remove as many channels as leave the network within the budget on rows that training does not see."""
    rows = training_rows(given)
    for number, share in enumerate(REMOVED_SHARES):
        module = _torch_module(given)
        removed = remove_channels(module, channel_groups(module), share=share)
        if removed == 0:
            raise RecipeNotApplicable(
                "no channels can be removed: each passes through an operator that needs all of them"
            )
        seconds = given.training_s / len(REMOVED_SHARES)
        fine_tune(module, rows, seconds=seconds, epochs=EPOCHS, rate=RATE, seed=given.seed)
        said = f"with {removed} channels ({share:.0%} of those that can be) removed"
        last = number + 1 == len(REMOVED_SHARES)
        if last:
            _require_budget(given, rows, torch_predict(module), said)
        if last or rows.leaves_margin(torch_predict(module), given):
            given.log(f"prune-structured: {said}")
            return VariantFile(given.export(module))
    raise AssertionError("the last share was checked")


def _torch_module(given: RecipeInput) -> Any:
    """Return a fresh copy of the original as a graph that can be trained."""
    found = copy_module(given.original.source)
    for weight in found.parameters():
        weight.requires_grad_(weight.is_floating_point())
    return found


def _require_budget(given: RecipeInput, rows: TrainingRows, predict: Callable[[Any], Any], said: str) -> None:
    worse = rows.shortfall(predict, given)
    if worse > given.budget.worse:
        raise RecipeNotApplicable(
            f"fine-tuning: {said}, {rows.evaluator.metric} is {worse:.4g} worse than the original's on rows to "
            f"check by; the budget is {given.budget.worse:.4g}"
        )
