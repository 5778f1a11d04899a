"""Take models that are ONNX already, and check that they can be served."""

from __future__ import annotations

from typing import Any

import onnx

from falaj.errors import InvalidInput
from falaj.optimization.runtime.conversion.converted import Array, ConvertedModel, invalid_sample
from falaj.optimization.runtime.conversion.onnx_graphs import converted_model
from falaj.optimization.runtime.sessions import open_session


def convert(model: Any, rows: Array, columns: tuple[str, ...]) -> ConvertedModel:
    """Return a copy of the model with the names of its columns. Its references are its own outputs for all rows."""
    if not isinstance(model, onnx.ModelProto):
        raise InvalidInput.at("model", given=type(model).__name__, allowed="an onnx.ModelProto")
    made = onnx.ModelProto()
    made.CopyFrom(model)
    session = open_session(made.SerializeToString())
    names = [each.name for each in session.get_inputs()]
    if len(names) != 1:
        raise InvalidInput.at("model", given=f"{len(names)} inputs: {', '.join(names)}", allowed="one input")
    try:
        references = session.run(None, {names[0]: rows})
    except Exception as error:  # onnxruntime raises a dozen types that share no parent but this
        raise invalid_sample(error) from error
    fix = "declare the first dimension of the input by a name, like N"
    return converted_model(made, references, columns, batch_fix=fix)
