"""Convert torch models to LiteRT, where its converter is installed."""

from __future__ import annotations

import os
import tempfile
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from falaj.errors import InvalidInput
from falaj.optimization.runtime import quality
from falaj.optimization.runtime.candidates import litert_candidate
from falaj.optimization.runtime.conversion.converted import Array
from falaj.optimization.runtime.export import TOLERANCE, largest_difference
from falaj.optimization.runtime.recipes.recipe_input import RecipeInput, RecipeNotApplicable, VariantFile

CONVERTER, INTERPRETER = "litert_torch", "ai_edge_litert"
FIX = "name an environment that has it with --environment (the page on optimization says how to make one)"
WIDE = ("int64", "float64")
"""Inputs that the converter would make narrower unless it is told not to."""
CHECKED_ROWS = (1, 2, 7)
FILE_IDENTIFIER = b"TFL3"
ANY = -1


def convert_to_litert(given: RecipeInput) -> VariantFile:
    """Convert a torch export, and check that it predicts the same.

    The converter makes a model of one row. If it answers any number of rows alike, its file is made to say so: the
    model server then runs batches, and else one row after the other.
    """
    missing = [name for name in (CONVERTER, INTERPRETER) if find_spec(name) is None]
    if missing:
        raise RecipeNotApplicable(f"not installed: {' and '.join(missing)}; {FIX}")
    if not given.is_torch_export:
        raise RecipeNotApplicable("LiteRT is made of torch exports (.pt2); the model has another format")
    single = _convert(given)
    batched = with_any_rows(single)
    if batched is not None:
        try:
            _require_agreement(batched, given)
            return VariantFile(batched, ".tflite")
        except (
            Exception
        ) as error:  # it has an operator for one row only; the interpreter raises what it likes
            given.log(f"litert: it runs row by row: {_first_line(error)}")
    try:
        _require_agreement(single, given)
    except Exception as error:
        raise RecipeNotApplicable(f"the LiteRT model cannot be used: {_first_line(error)}") from error
    return VariantFile(single, ".tflite")


def with_any_rows(content: bytes) -> bytes | None:
    """Return a model of one row that says that it takes any number; None if its file cannot be rewritten."""
    flatbuffers = import_module("flatbuffers")
    schema = import_module(f"{INTERPRETER}.schema_py_generated")
    model = schema.ModelT.InitFromObj(schema.Model.GetRootAs(content, 0))
    if any(
        buffer.offset or buffer.size for buffer in model.buffers
    ):  # data beyond the flatbuffer would be lost
        return None
    for graph in model.subgraphs:
        for index in (*graph.inputs, *graph.outputs):
            tensor = graph.tensors[index]
            if tensor.shape is None or len(tensor.shape) == 0 or tensor.shape[0] != 1:
                return None
            tensor.shapeSignature = [ANY, *(int(size) for size in tensor.shape[1:])]
    builder = flatbuffers.Builder(len(content))
    builder.Finish(model.Pack(builder), FILE_IDENTIFIER)
    return bytes(builder.Output())


def _convert(given: RecipeInput) -> bytes:
    import torch

    module, sample = given.original.source.module(), torch.from_numpy(given.sample[:1])
    wide = {"enable_x64": True} if str(given.sample.dtype) in WIDE else {}
    try:
        converted = import_module(CONVERTER).convert(module, (sample,), **wide)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.tflite"
            converted.export(os.fspath(path))
            return path.read_bytes()
    except Exception as error:  # the converter raises what it likes
        raise RecipeNotApplicable(
            f"the conversion to LiteRT failed: {type(error).__name__}: {_first_line(error)}"
        ) from error


def _require_agreement(content: bytes, given: RecipeInput) -> None:
    """Raise InvalidInput if the model predicts differently on the sample, for any number of rows."""
    predict = litert_candidate("litert", content).predict
    wanted = quality.predict_all(given.original.predict, given.sample)
    for count in (*CHECKED_ROWS, len(given.sample)):
        made: Array = predict(given.sample[:count])
        largest_difference("of LiteRT", made, wanted[:count], TOLERANCE)


def _first_line(error: Any) -> str:
    if isinstance(error, InvalidInput):
        return "; ".join(str(error).splitlines())
    return next(iter(str(error).strip().splitlines()), "")
