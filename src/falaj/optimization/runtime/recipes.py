"""Make variants of a model by recipe."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

import onnx

from falaj.errors import FalajError
from falaj.optimization.runtime.candidates import Candidate
from falaj.optimization.runtime.conversion.converted import Array
from falaj.optimization.runtime.conversion.onnx_graphs import operators
from falaj.optimization.runtime.export import export_onnx
from falaj.optimization.runtime.sessions import open_session
from falaj.records.optimization import Recipe

MULTIPLIES = ("MatMul", "Gemm", "Attention", "LSTM")
"""Operators that int8 accelerates on a CPU. Dynamic int8 makes convolutions slower, so they are excluded."""
TREES = "TreeEnsemble"


class RecipeNotApplicable(Exception):
    """The recipe cannot be applied to this model; the message is the reason."""


def make_variant(recipe: Recipe, original: Candidate, *, sample: Array, names: tuple[str, ...]) -> bytes:
    """Return the ONNX file of the variant. Raise RecipeNotApplicable if it cannot be made."""
    if recipe == "fp16":
        raise RecipeNotApplicable("CPUs have no half-precision arithmetic, so it would be slower; use a GPU")
    try:
        plain = original.content or _exported(original, sample, names)
    except FalajError as error:
        raise RecipeNotApplicable(
            f"the export to ONNX failed: {'; '.join(str(error).splitlines())}"
        ) from error
    if recipe == "int8":
        return _int8(plain)
    return _fused(plain) if original.content is not None else plain


def _exported(original: Candidate, sample: Array, names: tuple[str, ...]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        return export_onnx(
            original.source, Path(folder) / "model.onnx", sample=sample, names=names
        ).path.read_bytes()


def _fused(content: bytes) -> bytes:
    """Return the graph after the hardware-independent optimizations of ONNX Runtime."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "fused.onnx"
        open_session(content, optimized_path=str(path))
        return path.read_bytes()


def _int8(content: bytes) -> bytes:
    """Quantize the weights of matrix multiplications to int8, with dynamic quantization of activations."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = onnx.load_from_string(content)
    _require_weights(model)
    del model.graph.value_info[:]  # shapes from before the quantizer turns Gemm into MatMul
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "int8.onnx"
        logging.disable(logging.WARNING)  # it recommends a step that is already done
        try:
            quantize_dynamic(
                model,
                path,
                op_types_to_quantize=[*MULTIPLIES],
                per_channel=True,
                reduce_range=not _has_vnni(),
                weight_type=QuantType.QInt8,
            )
        except Exception as error:  # the quantizer raises what it likes
            raise RecipeNotApplicable(f"the quantizer failed: {type(error).__name__}: {error}") from error
        finally:
            logging.disable(logging.NOTSET)
        return path.read_bytes()


def _require_weights(model: onnx.ModelProto) -> None:
    found = operators(model)
    constants = {each.name for each in model.graph.initializer}
    constants |= {name for node in model.graph.node if node.op_type == "Constant" for name in node.output}
    if any(n.op_type in MULTIPLIES and constants & set(n.input) for n in model.graph.node):
        return
    if any(name.startswith(TREES) for name in found):
        raise RecipeNotApplicable(
            "trees only compare and add, without matrix multiplications: there is nothing to quantize"
        )
    raise RecipeNotApplicable(
        f"the graph has no matrix multiplication with constant weights; it has {', '.join(sorted(found))}"
    )


def _has_vnni() -> bool:
    """Return whether the CPU has VNNI, which avoids overflow; otherwise weights use 7 bits."""
    try:
        return "vnni" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
