"""torch: programs of `torch.export` (.pt2) on the CPU or a GPU, compiled where the endpoint asks for it.

The registry has refused files with pickles and programs that run code (registry/file_formats/torch_exports.py); what
is left is read by torch in the worker's sandbox.
"""

from __future__ import annotations

import io
import logging
import os
import threading
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.export import ExportedProgram
from torch.export.passes import move_to_device_pass
from torch.utils import _pytree as pytree

from falaj.errors import InvalidInput, Unavailable
from falaj.records.serving.endpoints import ServedFile
from falaj.records.serving.tensors import DYNAMIC, Datatype, Tensor
from falaj.serving.runtime.engines.fixed_batch import any_rows
from falaj.serving.runtime.engines.opened import ModelContents, OpenedModel, Run, not_opened

Array = npt.NDArray[Any]

PLATFORM = "pytorch_export"

DATATYPES = {
    torch.bool: Datatype.BOOL,
    torch.uint8: Datatype.UINT8,
    torch.uint16: Datatype.UINT16,
    torch.uint32: Datatype.UINT32,
    torch.uint64: Datatype.UINT64,
    torch.int8: Datatype.INT8,
    torch.int16: Datatype.INT16,
    torch.int32: Datatype.INT32,
    torch.int64: Datatype.INT64,
    torch.float16: Datatype.FP16,
    torch.bfloat16: Datatype.BF16,
    torch.float32: Datatype.FP32,
    torch.float64: Datatype.FP64,
}


def open_model(file: ServedFile, contents: ModelContents) -> OpenedModel:
    """Open an exported program; its dynamic dimensions are those of the export."""
    device = _device(file)
    torch.set_num_threads(min(file.settings.threads or 1, os.cpu_count() or 1))
    logging.getLogger("torch").setLevel(logging.CRITICAL)  # failures are raised
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.export.load(io.BytesIO(contents.model))
            inputs, outputs = _inputs(file, program), _outputs(file, program)
            if device.type != "cpu":  # a program makes tensors on the device that it was exported on
                program = move_to_device_pass(program, device)
            module = program.module()
    except Exception as error:  # torch reads an archive of strangers: it may raise anything
        raise not_opened(file, "a torch export", error) from None
    called: Any = torch.compile(module, dynamic=True) if file.settings.compiled else module
    types = [_dtype(tensor) for tensor in inputs]
    runner = _CudaRunner(called, program, types, device) if device.type == "cuda" else None
    opened = OpenedModel(PLATFORM, inputs, outputs, runner or _on_cpu(called, program, types))
    return any_rows(opened)


def _device(file: ServedFile) -> torch.device:
    wanted = file.settings.device or "auto"
    if wanted == "gpu" and not torch.cuda.is_available():
        raise Unavailable(
            f"{file.model}@{file.version} is to run on a GPU, and torch {torch.__version__} finds none; "
            "use a machine with one and torch with CUDA, or choose the device auto"
        )
    return torch.device("cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu")


def _inputs(file: ServedFile, program: ExportedProgram) -> tuple[Tensor, ...]:
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    names = program.graph_signature.user_inputs
    if not names or not all(isinstance(name, str) for name in names):
        raise _not_served(file, "inputs", "arguments that are not tensors")
    return tuple(_tensor(file, str(name), nodes[str(name)].meta.get("val")) for name in names)


def _outputs(file: ServedFile, program: ExportedProgram) -> tuple[Tensor, ...]:
    nodes = {node.name: node for node in program.graph.nodes}
    names = program.graph_signature.user_outputs
    if not names or not all(isinstance(name, str) for name in names):
        raise _not_served(file, "outputs", "values that are not tensors")
    called = ["output"] if len(names) == 1 else [f"output_{number}" for number in range(len(names))]
    values = [nodes[str(name)].meta.get("val") for name in names]
    return tuple(_tensor(file, name, value) for name, value in zip(called, values, strict=True))


def _tensor(file: ServedFile, name: str, value: object) -> Tensor:
    if not isinstance(value, torch.Tensor) or value.dtype not in DATATYPES:
        raise _not_served(file, name, f"a {getattr(value, 'dtype', type(value).__name__)}")
    shape = tuple(size if isinstance(size, int) else DYNAMIC for size in value.shape)
    return Tensor(name=name, datatype=DATATYPES[value.dtype], shape=shape)


def _not_served(file: ServedFile, where: str, given: str) -> InvalidInput:
    return InvalidInput.at(
        f"{file.model}@{file.version} {where}",
        given=given,
        allowed="tensors of numbers",
        fix="export a module that takes and returns tensors",
    )


def _dtype(tensor: Tensor) -> torch.dtype:
    return next(dtype for dtype, datatype in DATATYPES.items() if datatype is tensor.datatype)


def _on_cpu(called: Any, program: ExportedProgram, types: Sequence[torch.dtype]) -> Run:
    def run(inputs: Sequence[Array]) -> list[Array]:
        with torch.inference_mode():
            given = [_from_numpy(array).to(dtype) for array, dtype in zip(inputs, types, strict=True)]
            return [_to_numpy(tensor) for tensor in _called(called, program, given)]

    return run


def _called(called: Any, program: ExportedProgram, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    args, kwargs = pytree.tree_unflatten(list(given), program.call_spec.in_spec)
    found: list[torch.Tensor] = pytree.tree_leaves(called(*args, **kwargs))
    return found


class _CudaRunner:
    """Runs on a GPU, each thread on a stream of its own: one copies its values while another one computes."""

    def __init__(
        self, called: Any, program: ExportedProgram, types: Sequence[torch.dtype], device: torch.device
    ) -> None:
        self._called = called
        self._program = program
        self._types = types
        self._device = device
        self._of_thread = threading.local()

    def __call__(self, inputs: Sequence[Array]) -> list[Array]:
        stream = self._stream()
        with torch.inference_mode(), torch.cuda.stream(stream):
            given = [
                _pinned(array).to(self._device, non_blocking=True).to(dtype)
                for array, dtype in zip(inputs, self._types, strict=True)
            ]
            outputs = _called(self._called, self._program, given)
            held = [_host_copy(tensor) for tensor in outputs]
        stream.synchronize()
        return [_to_numpy(tensor) for tensor in held]

    def _stream(self) -> torch.cuda.Stream:
        """Return the stream of this thread, so that the copies of one run overlap with another's computation."""
        found: torch.cuda.Stream | None = getattr(self._of_thread, "stream", None)
        if found is None:
            found = self._of_thread.stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return found


def _pinned(array: Array) -> torch.Tensor:
    """Return the values in memory from which the card copies by itself; torch keeps and reuses such memory."""
    plain = _from_numpy(array)
    return torch.empty_like(plain, pin_memory=True).copy_(plain)


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    held = torch.empty_like(tensor, device="cpu", pin_memory=True)
    return held.copy_(tensor, non_blocking=True)


def _from_numpy(array: Array) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about arrays that must not be written; nothing is written here
        return torch.from_numpy(np.ascontiguousarray(array))


def _to_numpy(tensor: torch.Tensor) -> Array:
    plain = tensor.detach().contiguous()
    found: Array = (plain.float() if plain.dtype is torch.bfloat16 else plain).numpy()
    return found
