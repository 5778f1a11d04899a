"""OpenVINO: ONNX models on Intel's CPUs and GPUs, where the endpoint asks for this engine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov

from falaj.errors import InvalidInput, Unavailable
from falaj.records.serving.endpoints import ServedFile
from falaj.records.serving.tensors import DYNAMIC, Datatype, Tensor
from falaj.serving.runtime.engines.opened import ModelContents, OpenedModel, not_opened, typed

Array = npt.NDArray[Any]

PLATFORM = "openvino"
DATATYPES = {
    "boolean": Datatype.BOOL,
    **{f"u{bits}": Datatype(f"UINT{bits}") for bits in (8, 16, 32, 64)},
    **{f"i{bits}": Datatype(f"INT{bits}") for bits in (8, 16, 32, 64)},
    **{f"f{bits}": Datatype(f"FP{bits}") for bits in (16, 32, 64)},
}


def open_model(file: ServedFile, contents: ModelContents) -> OpenedModel:
    """Compile an ONNX model. A run takes a request of its own, so that several can run at a time."""
    core = ov.Core()
    device = "GPU" if file.settings.device == "gpu" else "CPU"
    if device not in {name.partition(".")[0] for name in core.available_devices}:
        raise Unavailable(
            f"{file.model}@{file.version} is to run on a GPU, and OpenVINO finds none; "
            "falaj endpoints configure NAME --engine openvino --device cpu"
        )
    settings = {"PERFORMANCE_HINT": "LATENCY"}
    if device == "CPU":
        settings["INFERENCE_NUM_THREADS"] = str(min(file.settings.threads or 1, os.cpu_count() or 1))
        settings["INFERENCE_PRECISION_HINT"] = "f32"  # some CPUs would take bfloat16, and answer otherwise
    try:
        model = core.read_model(contents.model, b"")
        inputs = tuple(_tensor(file, port) for port in model.inputs)
        outputs = tuple(_tensor(file, port) for port in model.outputs)
        compiled = core.compile_model(model, device, settings)
    except (RuntimeError, ValueError, TypeError) as error:
        raise not_opened(file, "an ONNX model", error) from None

    def run(given: Sequence[Array]) -> list[Array]:
        request = compiled.create_infer_request()
        found = request.infer([np.ascontiguousarray(array) for array in given], share_inputs=True)
        return typed([found[port] for port in compiled.outputs], outputs)

    return OpenedModel(PLATFORM, inputs, outputs, run)


def _tensor(file: ServedFile, port: Any) -> Tensor:
    kind, name = port.get_element_type().get_type_name(), _name(port)
    if kind not in DATATYPES:
        raise InvalidInput(
            f"{file.model}@{file.version} has the tensor {name} of the type {kind}, which OpenVINO is "
            "not given here; serve it with ONNX Runtime"
        )
    shape = port.get_partial_shape()
    sizes = tuple(DYNAMIC if each.is_dynamic else each.get_length() for each in shape)
    return Tensor(name=name, datatype=DATATYPES[kind], shape=sizes)


def _name(port: Any) -> str:
    """Return the name of the tensor in the file: a value that two nodes pass on has the names of both."""
    written = port.get_node().get_friendly_name().partition("/sink_port")[0]
    return str(written if written in port.get_names() else port.get_any_name())
