"""Convert torch models to ONNX."""

from __future__ import annotations

import contextlib
import logging
import re
import warnings
from collections.abc import Iterator
from typing import Any

import onnx
import torch
from torch import nn
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from falaj.errors import InvalidInput, shorten
from falaj.optimization.runtime.conversion.converted import (
    FEATURES,
    Array,
    ConvertedModel,
    invalid_sample,
    not_convertible,
)
from falaj.optimization.runtime.conversion.onnx_graphs import converted_model

TRACEABLE = "what torch.export can trace"
CONVERTIBLE = "operators that ONNX has"


def convert(model: Any, rows: Array, columns: tuple[str, ...]) -> ConvertedModel:
    """Convert a module, in evaluation mode, or an exported program."""
    if not isinstance(model, nn.Module | ExportedProgram):
        given = type(model).__name__
        raise InvalidInput.at("model", given=given, allowed="a torch module or exported program")
    with _quietly():
        if isinstance(model, ExportedProgram):
            program, references = model, _outputs(model.module(), torch.from_numpy(rows))
        else:
            program, references = _traced(_plain(model), rows)
        content = _to_onnx(program)
    return converted_model(
        onnx.load_from_string(content),
        references,
        columns,
        batch_fix="export with a dynamic first dimension: dynamic_shapes=({0: torch.export.Dim('rows')},)",
    )


def _traced(model: nn.Module, rows: Array) -> tuple[ExportedProgram, list[Array]]:
    """Return the exported program of `model` and its outputs; its training mode is restored."""
    training = {module: module.training for module in model.modules()}
    first = next((p for p in model.parameters()), None)
    inputs = torch.from_numpy(rows).to(first.device if first is not None else "cpu")
    model.eval()
    try:
        references = _outputs(model, inputs)
        # torch.export would treat a first dimension of 1 as a constant.
        traced_on = inputs if len(inputs) > 1 else torch.cat([inputs, inputs])
        try:
            return torch.export.export(model, (traced_on,), dynamic_shapes=({0: Dim("rows")},)), references
        except Exception as error:  # torch.export raises many types, some of them private
            raise _not_traced(model, error) from error
    finally:
        for module, mode in training.items():
            module.training = mode


def _outputs(model: Any, inputs: torch.Tensor) -> list[Array]:
    try:
        with torch.no_grad():
            leaves = pytree.tree_leaves(model(inputs))
    except Exception as error:
        raise invalid_sample(error, given=f"{inputs.dtype} {list(inputs.shape)}: ") from error
    return [leaf.detach().cpu().numpy() for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _to_onnx(program: ExportedProgram) -> bytes:
    outputs = len(program.graph_signature.user_outputs)
    names = ["output"] if outputs == 1 else [f"output{number}" for number in range(outputs)]
    try:
        made = torch.onnx.export(
            program,
            (),
            dynamo=True,
            external_data=False,
            input_names=[FEATURES],
            output_names=names,
            verbose=False,
        )
    except Exception as error:  # OnnxExporterError and whatever its passes raise
        raise _not_converted(program, error) from error
    if made is None:
        raise InvalidInput("torch.onnx.export returned nothing")
    return bytes(made.model_proto.SerializeToString())


def _not_traced(model: nn.Module, error: Exception) -> InvalidInput:
    """Return an error with the place in the user's code where tracing failed, and the reason."""
    text = "\n".join(str(each) for each in _chain(error))
    places = re.findall(r'File "([^"]+)", line (\d+), in (\w+)\n\s*(.+)', text)
    where = f"{places[-1][0]}:{places[-1][1]} {places[-1][3].strip()}" if places else type(model).__name__
    branches = "data-dependent" in text
    return not_convertible(
        where,
        given="a branch on the values of a tensor" if branches else shorten(_first_line(error), limit=300),
        allowed=TRACEABLE,
        fix="use torch.where instead of if"
        if branches
        else "write forward as plain tensor code for any number of rows",
    )


def _not_converted(program: ExportedProgram, error: Exception) -> InvalidInput:
    """Return an error with the unsupported operator and its layer."""
    text = "\n".join(str(each) for each in _chain(error))
    found = re.search(r"No ONNX function found for <OpOverload\(op='([^']+)'", text)
    if found is None:
        given = shorten(_first_line(error), limit=300)
        return not_convertible(
            "model", given=given, allowed=CONVERTIBLE, fix="change the layer, or use another format"
        )
    operator = found[1]
    return not_convertible(
        _layer(program, operator) or "model",
        given=f"the operator {operator}",
        allowed=CONVERTIBLE,
        fix="use operators that ONNX has, or move the layer out of the model",
    )


def _layer(program: ExportedProgram, operator: str) -> str | None:
    """Return the module that uses `operator`, and its line of code."""
    for node in program.run_decompositions().graph.nodes:
        if str(node.target).startswith(operator.replace("::", ".")):
            stack = [*(node.meta.get("nn_module_stack") or {}).values()]
            path, kind = stack[-1] if stack else ("", "")
            name = kind if isinstance(kind, str) else kind.__qualname__
            lines = (node.meta.get("stack_trace") or "").strip().splitlines()
            code = f": {lines[-1].strip()}" if lines else ""
            return f"layer {path or 'model'} ({name.rpartition('.')[2]}){code}"
    return None


def _plain(model: nn.Module) -> nn.Module:
    """Return the module inside a compiled or distributed one."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _first_line(error: BaseException) -> str:
    *_, root = _chain(error)
    return f"{type(root).__name__}: {str(root).strip().splitlines()[0] if str(root).strip() else ''}"


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Silence the warnings that torch emits on every export."""
    logger = logging.getLogger("torch")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
