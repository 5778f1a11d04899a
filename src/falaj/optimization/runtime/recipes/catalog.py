"""The recipes by name."""

from __future__ import annotations

from collections.abc import Callable

from falaj.optimization.runtime.recipes import half_precision, litert, quantization
from falaj.optimization.runtime.recipes.recipe_input import (
    RecipeInput,
    RecipeNotApplicable,
    VariantFile,
    optimize_graph,
)
from falaj.optimization.runtime.recipes.tree_pruning import prune_trees
from falaj.records.optimization import Recipe

LEARNING: frozenset[Recipe] = frozenset({"int8-static", "prune-structured", "prune-unstructured", "distill"})
"""Recipes that learn from rows: a part of the data is set aside for them."""


def make_variant(recipe: Recipe, given: RecipeInput) -> VariantFile:
    """Return the file of the variant. Raise RecipeNotApplicable if it cannot be made."""
    return RECIPES[recipe](given)


def _fuse(given: RecipeInput) -> VariantFile:
    """Export to ONNX, or fuse the graph of a model that is ONNX already."""
    if given.original.content is None:
        return VariantFile(given.onnx)
    return VariantFile(optimize_graph(given.onnx, level="ORT_ENABLE_EXTENDED"))


def _prune_structured(given: RecipeInput) -> VariantFile:
    if not given.is_torch_export:
        return prune_trees(given)
    from falaj.optimization.runtime.recipes import pruning

    return pruning.prune_channels(given)


def _prune_unstructured(given: RecipeInput) -> VariantFile:
    if not given.is_torch_export:
        raise RecipeNotApplicable("fine-tuning needs the torch export (.pt2) of the model; register that")
    from falaj.optimization.runtime.recipes import pruning

    return pruning.prune_unstructured(given)


def _take_student(given: RecipeInput) -> VariantFile:
    """Take the student that a training job has made of the original."""
    if given.student is None:
        raise RecipeNotApplicable(given.no_student or "distillation: no student was trained")
    return VariantFile(given.student)


RECIPES: dict[Recipe, Callable[[RecipeInput], VariantFile]] = {
    "onnx": _fuse,
    "int8": quantization.quantize_dynamically,
    "int8-static": quantization.quantize_statically,
    "fp16": half_precision.convert_to_fp16,
    "bf16": half_precision.convert_to_bf16,
    "prune-structured": _prune_structured,
    "prune-unstructured": _prune_unstructured,
    "distill": _take_student,
    "litert": litert.convert_to_litert,
}
