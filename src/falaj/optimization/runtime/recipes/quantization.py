"""Quantize ONNX models to int8: activations at each call, or with ranges that were calibrated beforehand."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx

from falaj.optimization.hardware import has_int8_dot
from falaj.optimization.runtime.conversion.converted import Array
from falaj.optimization.runtime.conversion.onnx_graphs import operators
from falaj.optimization.runtime.recipes.recipe_input import (
    RecipeInput,
    RecipeNotApplicable,
    VariantFile,
    optimize_graph,
)

MULTIPLIES = ("MatMul", "Gemm", "Attention", "LSTM")
"""Operators that dynamic int8 accelerates on a CPU. It makes convolutions slower, so they are excluded."""
CONVOLVES = ("Conv", "ConvTranspose")
TREES = "TreeEnsemble"
CALIBRATION_ROWS = 512
CALIBRATION_BATCH = 32
QUANTIZED = frozenset(
    {
        *(*MULTIPLIES, *CONVOLVES, "Add", "Mul", "Clip", "Relu", "Concat"),
        *("GlobalAveragePool", "AveragePool", "MaxPool"),
    }
)
"""Operators that static int8 quantizes: those with int8 kernels, and those between them that have some, too.

Others, such as Sigmoid and Softmax, lose accuracy and time in 8 bits."""


def quantize_dynamically(given: RecipeInput) -> VariantFile:
    """Quantize the weights of matrix multiplications to int8, with dynamic quantization of activations."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = onnx.load_from_string(given.onnx)
    _require_weights(model, MULTIPLIES)
    del model.graph.value_info[:]  # shapes from before the quantizer turns Gemm into MatMul
    with _quantizer() as path:
        quantize_dynamic(
            model,
            path,
            op_types_to_quantize=[*MULTIPLIES],
            per_channel=True,
            reduce_range=not has_int8_dot(given.extensions),
            weight_type=QuantType.QInt8,
        )
        return VariantFile(path.read_bytes())


def quantize_statically(given: RecipeInput) -> VariantFile:
    """Quantize weights and activations, with the ranges that activations have on rows of the data."""
    from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_static

    rows = given.rows.features[:CALIBRATION_ROWS]
    # Batch normalization is folded into convolutions; fusions into operators that have no int8 form come later.
    model = onnx.load_from_string(optimize_graph(given.onnx, level="ORT_ENABLE_BASIC"))
    _require_weights(model, (*MULTIPLIES, *CONVOLVES))
    with _quantizer() as path:
        quantize_static(
            model,
            path,
            CalibrationRows(model.graph.input[0].name, rows),
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=sorted(operators(model) & QUANTIZED),
            per_channel=True,
            reduce_range=not has_int8_dot(given.extensions),
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            calibrate_method=CalibrationMethod.MinMax,
        )
        return VariantFile(path.read_bytes())


class CalibrationRows:
    """Yields batches of rows as the quantizer wants them."""

    def __init__(self, name: str, rows: Array) -> None:
        count = max(1, len(rows) // CALIBRATION_BATCH)
        self._parts = iter([{name: part} for part in np.array_split(rows, count)])

    def get_next(self) -> dict[str, Array] | None:
        return next(self._parts, None)

    def set_range(self, start_index: int, end_index: int) -> None:
        """Refuse strides: the quantizer uses them for models that do not fit into memory only."""
        raise NotImplementedError


@contextlib.contextmanager
def _quantizer() -> Iterator[Path]:
    """Yield a path for the result; errors of the quantizer are reasons, and its advice is not printed."""
    with tempfile.TemporaryDirectory() as folder:
        logging.disable(logging.WARNING)  # it recommends a step that is already done
        try:
            yield Path(folder) / "int8.onnx"
        except Exception as error:  # the quantizer raises what it likes
            raise RecipeNotApplicable(f"the quantizer failed: {type(error).__name__}: {error}") from error
        finally:
            logging.disable(logging.NOTSET)


def _require_weights(model: onnx.ModelProto, wanted: tuple[str, ...]) -> None:
    found = operators(model)
    constants = {each.name for each in model.graph.initializer}
    constants |= {name for node in model.graph.node if node.op_type == "Constant" for name in node.output}
    if any(n.op_type in wanted and constants & set(n.input) for n in model.graph.node):
        return
    if any(name.startswith(TREES) for name in found):
        raise RecipeNotApplicable(
            "trees only compare and add, without matrix multiplications: there is nothing to quantize"
        )
    raise RecipeNotApplicable(
        f"the graph has no {'convolution or ' if 'Conv' in wanted else ''}matrix multiplication with constant weights; "
        f"it has {', '.join(sorted(found))}"
    )
