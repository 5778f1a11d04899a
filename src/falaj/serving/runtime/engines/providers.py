"""Execution providers of ONNX Runtime: which of them a model gets, and how its tensors reach a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from falaj.errors import Unavailable
from falaj.records.serving.settings import Device

Array = npt.NDArray[Any]

TENSORRT, CUDA, CPU = "TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"
ON_GPU = (TENSORRT, CUDA)
"""The providers of GPUs, the fastest first."""


def choose_providers(available: Sequence[str], device: Device, *, has_gpu: bool) -> list[str]:
    """Return the providers of a session, in the order in which they get the nodes of a graph.

    `available` is what ONNX Runtime was built with; that says nothing of the machine. The CPU comes last always: it
    takes what the others do not support.
    """
    found = [provider for provider in ON_GPU if provider in available]
    if device == "gpu" and not (found and has_gpu):
        missing = "this machine has none" if found else "onnxruntime has no provider for one"
        raise Unavailable(
            f"the model is to run on a GPU, and {missing}; install onnxruntime-gpu on a machine with a GPU, or choose "
            "the device auto"
        )
    return [*(found if device != "cpu" and has_gpu else ()), CPU]


def providers_here(device: Device | None) -> list[str]:
    """Return the providers on this machine."""
    has_gpu = Path("/dev/nvidiactl").exists()
    return choose_providers(ort.get_available_providers(), device or "auto", has_gpu=has_gpu)


class BoundSession:
    """A session whose tensors are bound to a device: they are copied there once, and back once."""

    def __init__(self, session: ort.InferenceSession, device: str = "cuda") -> None:
        self._session = session
        self._device = device
        self._outputs = [node.name for node in session.get_outputs()]

    def run(self, names: None, feed: Mapping[str, Array], options: ort.RunOptions) -> list[Array]:
        binding = self._session.io_binding()
        for name, array in feed.items():
            value = ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array), self._device, 0)
            binding.bind_ortvalue_input(name, value)
        for name in self._outputs:
            binding.bind_output(name, self._device)
        self._session.run_with_iobinding(binding, options)
        found: list[Array] = binding.copy_outputs_to_cpu()
        return found
