"""Convert torch models to LiteRT, where its converter is installed."""

from __future__ import annotations

import tempfile
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from falaj.optimization.runtime.candidates import Candidate
from falaj.optimization.runtime.conversion.converted import Array
from falaj.optimization.runtime.evaluation_data import InputShape
from falaj.optimization.runtime.recipes.recipe_input import RecipeInput, RecipeNotApplicable, VariantFile

CONVERTER, INTERPRETER = "litert_torch", "ai_edge_litert"
EXTRA = "pip install 'falaj[litert-torch]', in the virtualenv of the job"


def convert_to_litert(given: RecipeInput) -> VariantFile:
    """Convert a torch export; its first dimension becomes a batch of one, as LiteRT has fixed shapes."""
    missing = [name for name in (CONVERTER, INTERPRETER) if find_spec(name) is None]
    if missing:
        raise RecipeNotApplicable(f"not installed: {' and '.join(missing)}; {EXTRA}")
    if given.original.path is None or given.original.path.suffix != ".pt2":
        raise RecipeNotApplicable("LiteRT is made of torch exports (.pt2); the model has another format")
    import torch

    litert_torch = import_module(CONVERTER)
    module = given.original.source.module()
    sample = torch.from_numpy(given.sample[:1])
    try:
        converted = litert_torch.convert(module, (sample,))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.tflite"
            converted.export(str(path))
            return VariantFile(path.read_bytes(), ".tflite")
    except Exception as error:  # the converter raises what it likes
        reason = next(iter(str(error).strip().splitlines()), "")
        raise RecipeNotApplicable(
            f"the conversion to LiteRT failed: {type(error).__name__}: {reason}"
        ) from error


def open_litert(name: str, path: Path, features: Array) -> Candidate:
    """Open a LiteRT model on one thread; its batch is resized as needed."""
    interpreter = import_module(f"{INTERPRETER}.interpreter").Interpreter(model_path=str(path), num_threads=1)
    interpreter.allocate_tensors()
    entry, exit_ = interpreter.get_input_details()[0]["index"], interpreter.get_output_details()[0]["index"]
    size = 1

    def predict(rows: Array) -> Array:
        nonlocal size
        if len(rows) != size:
            interpreter.resize_tensor_input(entry, rows.shape)
            interpreter.allocate_tensors()
            size = len(rows)
        interpreter.set_tensor(entry, rows)
        interpreter.invoke()
        made: Array = interpreter.get_tensor(exit_)
        return made

    shape = InputShape(features.shape[1:], str(features.dtype))
    return Candidate(name, predict, path.stat().st_size, shape, path=path)
