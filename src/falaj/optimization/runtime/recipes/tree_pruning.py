"""Prune ensembles of boosted trees, without torch."""

from __future__ import annotations

from typing import Any

import onnx

from falaj.optimization.runtime.candidates import onnx_candidate
from falaj.optimization.runtime.recipes.recipe_input import RecipeInput, RecipeNotApplicable, VariantFile
from falaj.optimization.runtime.recipes.training_rows import training_rows

KEPT_TREES = (0.125, 0.25, 0.5, 0.75)
TREE_NODES = ("TreeEnsembleClassifier", "TreeEnsembleRegressor")


def prune_trees(given: RecipeInput) -> VariantFile:
    """Keep as few of the first trees as leave the model within the budget: later ones correct less."""
    graph = onnx.load_from_string(given.onnx).graph
    if sum(node.op_type in TREE_NODES for node in graph.node) != 1:
        raise RecipeNotApplicable(
            "pruning needs the torch export (.pt2) of a network, or one ensemble of trees; register the .pt2"
        )
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
