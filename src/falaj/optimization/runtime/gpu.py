"""Run models on the GPU of this host: torch exports by torch, ONNX by ONNX Runtime's CUDA provider."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from falaj.optimization.runtime.candidates import Candidate, Predict, onnx_candidate, program_input
from falaj.optimization.runtime.conversion.converted import Array

CUDA = "CUDAExecutionProvider"
DEVICE = "cuda"
"""What torch calls the GPU."""


class NotOnGpu(Exception):
    """The model cannot run on the GPU; the message is the reason."""


def device_name() -> str | None:
    """Return the name of the GPU that this process may use."""
    if find_spec("torch") is None:
        return None
    import torch

    return str(torch.cuda.get_device_name(0)) if torch.cuda.is_available() else None


def open_on_gpu(candidate: Candidate) -> Candidate:
    """Return the same model on the GPU. Raise NotOnGpu if it cannot run there."""
    if candidate.content is not None:
        _require_cuda_provider()
        return onnx_candidate(candidate.name, candidate.content, path=candidate.path, provider=CUDA)
    if candidate.path is None or candidate.path.suffix != ".pt2":
        raise NotOnGpu("only ONNX models and torch exports run on the GPU")
    return replace(candidate, predict=_torch_predict(copy_module(candidate.source)), device="gpu")


def half_model(original: Candidate, sample: Array, dtype: str) -> tuple[bytes, str]:
    """Return a file of the model in half precision, whose input and output stay as they are, and its suffix."""
    if original.content is not None:
        if dtype == "bfloat16":
            raise NotOnGpu("an ONNX model is converted to fp16 only; optimize the torch export for bf16")
        _require_cuda_provider()
        return half_graph(original.content), ".onnx"
    if original.path is None or original.path.suffix != ".pt2":
        raise NotOnGpu("only ONNX models and torch exports have a half-precision form")
    return _half_export(original.source, sample, dtype), ".pt2"


def half_graph(content: bytes) -> bytes:
    """Return an ONNX model in float16, with inputs and outputs of float32."""
    import onnx
    from onnxruntime.transformers.float16 import convert_float_to_float16

    model = convert_float_to_float16(onnx.load_from_string(content), keep_io_types=True)
    return bytes(model.SerializeToString())


def open_half(name: str, path: Path) -> Candidate:
    """Open a torch export on the GPU."""
    import torch

    program = torch.export.load(str(path))
    predict = _torch_predict(copy_module(program))
    return Candidate(
        name, predict, path.stat().st_size, program_input(program), source=program, path=path, device="gpu"
    )


def copy_module(program: Any) -> Any:
    """Return an exported program as a module with weights of its own; what `program.module()` gives shares them."""
    from torch import fx, nn

    shared = program.module()
    made = fx.GraphModule(shared, shared.graph)
    for name, weight in [*made.named_parameters(), *made.named_buffers()]:
        owner, _, last = name.rpartition(".")
        holder, value = made.get_submodule(owner), weight.detach().clone()
        setattr(
            holder, last, nn.Parameter(value, weight.requires_grad) if last in holder._parameters else value
        )
    return made


def _half_export(program: Any, sample: Array, dtype: str) -> bytes:
    import torch
    from torch import nn

    half = getattr(torch, dtype)

    class HalfPrecision(nn.Module):
        """Casts floating-point inputs to half precision and the output back."""

        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner.to(half)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = self.inner(rows.to(half) if rows.is_floating_point() else rows)
            return made.float()

    # It is traced on the GPU: the casts of a trace are checked against the device that it was made on.
    rows = torch.from_numpy(sample[: max(2, min(len(sample), 8))]).to(DEVICE)
    try:
        traced = torch.export.export(
            HalfPrecision(copy_module(program)).to(DEVICE),
            (rows,),
            dynamic_shapes=({0: torch.export.Dim("rows")},),
        )
        traced._example_inputs = None  # otherwise they are pickled, and the registry refuses the file
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.pt2"
            torch.export.save(traced, path)
            return path.read_bytes()
    except Exception as error:  # torch.export raises many types, some of them private
        reason = next(iter(str(error).strip().splitlines()), "")
        raise NotOnGpu(
            f"the model cannot be exported in {dtype}: {type(error).__name__}: {reason}"
        ) from error


def _torch_predict(module: Any) -> Predict:
    import torch

    module.to(DEVICE)

    def predict(rows: Array) -> Array:
        with torch.inference_mode():
            made: Array = module(torch.from_numpy(rows).to(DEVICE)).cpu().numpy()
        return made

    return predict


def _require_cuda_provider() -> None:
    import onnxruntime as ort

    if CUDA not in ort.get_available_providers():
        raise NotOnGpu(
            "this ONNX Runtime has no CUDA provider (onnxruntime-gpu has); register the torch export to use the GPU"
        )
