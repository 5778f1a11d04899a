"""Prune models: channels of networks and trees of ensembles (structured), or single weights (unstructured)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx
import torch

from falaj.optimization.runtime.candidates import onnx_candidate
from falaj.optimization.runtime.gpu import copy_module
from falaj.optimization.runtime.recipes.channel_groups import channel_groups, remove_channels
from falaj.optimization.runtime.recipes.fine_tuning import (
    TrainingRows,
    fine_tune,
    torch_predict,
    training_rows,
)
from falaj.optimization.runtime.recipes.recipe_input import RecipeInput, RecipeNotApplicable, VariantFile

REMOVED_SHARES = (0.625, 0.5, 0.25)
"""Shares of the channels to remove, tried from the largest."""
KEPT_TREES = (0.125, 0.25, 0.5, 0.75)
ZERO_SHARE = 0.5
SMALLEST_WEIGHTS = 256
"""Tensors with fewer weights stay dense."""
EPOCHS = 20
RATE = 1e-3
TREE_NODES = ("TreeEnsembleClassifier", "TreeEnsembleRegressor")


def prune_structured(given: RecipeInput) -> VariantFile:
    """Remove as many channels, or trees, as leave the model within the budget on rows that training does not see."""
    if given.original.path is not None and given.original.path.suffix == ".pt2":
        return _prune_channels(given)
    graph = onnx.load_from_string(given.onnx)
    trees = [node for node in graph.graph.node if node.op_type in TREE_NODES]
    if len(trees) != 1:
        raise RecipeNotApplicable(
            "pruning needs the torch export (.pt2) of a network, or one ensemble of trees; register the .pt2"
        )
    return _prune_trees(given)


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


def _prune_channels(given: RecipeInput) -> VariantFile:
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


def _prune_trees(given: RecipeInput) -> VariantFile:
    """Keep the first trees of a boosted ensemble: later ones correct less."""
    rows = training_rows(given)
    for share in KEPT_TREES:
        content = keep_trees(given.onnx, share)
        predict = onnx_candidate("pruned", content).predict
        if rows.leaves_margin(predict, given):
            given.log(f"prune-structured: {share:.0%} of the trees kept")
            return VariantFile(content)
    raise RecipeNotApplicable(
        f"pruning: with {KEPT_TREES[-1]:.0%} of the trees, the model uses up the budget on rows to check by"
    )


def keep_trees(content: bytes, share: float) -> bytes:
    """Return an ensemble with the first `share` of its trees; those of one round stay together."""
    model = onnx.load_from_string(content)
    (node,) = [each for each in model.graph.node if each.op_type in TREE_NODES]
    attributes = {each.name: each for each in node.attribute}
    scored = "class" if node.op_type == TREE_NODES[0] else "target"
    trees = sorted(set(attributes["nodes_treeids"].ints))
    per_round = max(1, len(set(attributes[f"{scored}_ids"].ints)))
    rounds = max(1, round(len(trees) / per_round * share))
    kept = set(trees[: rounds * per_round])
    for prefix, owner in (("nodes_", "nodes_treeids"), (f"{scored}_", f"{scored}_treeids")):
        places = [place for place, tree in enumerate(attributes[owner].ints) if tree in kept]
        total = len(attributes[owner].ints)
        for each in attributes.values():
            if each.name.startswith(prefix):
                _keep_places(each, places, total)
    return bytes(model.SerializeToString())


def _keep_places(attribute: Any, places: list[int], total: int) -> None:
    for values in (attribute.ints, attribute.floats, attribute.strings):
        if len(values) == total:
            kept = [values[place] for place in places]
            del values[:]
            values.extend(kept)


def _torch_module(given: RecipeInput) -> Any:
    """Return a fresh copy of the original as a graph that can be trained."""
    if given.original.path is None or given.original.path.suffix != ".pt2":
        raise RecipeNotApplicable("fine-tuning needs the torch export (.pt2) of the model; register that")
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
