"""Which execution providers ONNX Runtime gets. CUDA and TensorRT are not run here: there is no GPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from falaj.errors import Unavailable
from falaj.records.serving.endpoints import ServedFile
from falaj.records.serving.settings import Device, ServingSettings
from falaj.serving.runtime.engines.providers import CPU, CUDA, TENSORRT, BoundSession, choose_providers
from falaj.serving.runtime.loading import load
from model_servers import mlp, tabular

ALL = [CPU, "AzureExecutionProvider", CUDA, TENSORRT]


@pytest.mark.parametrize(
    ("available", "device", "has_gpu", "chosen"),
    [
        (ALL, "auto", True, [TENSORRT, CUDA, CPU]),
        (ALL, "gpu", True, [TENSORRT, CUDA, CPU]),
        (ALL, "cpu", True, [CPU]),
        (ALL, "auto", False, [CPU]),
        ([CPU, CUDA], "auto", True, [CUDA, CPU]),
        ([CPU], "auto", True, [CPU]),
        (["AzureExecutionProvider", CPU], "auto", False, [CPU]),
    ],
)
def test_the_fastest_provider_that_is_there_comes_first(
    available: list[str], device: Device, has_gpu: bool, chosen: list[str]
) -> None:
    assert choose_providers(available, device, has_gpu=has_gpu) == chosen


@pytest.mark.parametrize(("available", "has_gpu"), [(ALL, False), ([CPU], True), ([CPU], False)])
def test_a_gpu_that_was_asked_for_and_is_not_there_is_told(available: list[str], has_gpu: bool) -> None:
    with pytest.raises(Unavailable, match=r"is to run on a GPU, and .*device auto"):
        choose_providers(available, "gpu", has_gpu=has_gpu)


def test_an_endpoint_that_asks_for_a_gpu_is_refused_here(tmp_path: Path) -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has a GPU")
    settings = ServingSettings(device="gpu")

    with pytest.raises(Unavailable, match="is to run on a GPU"):
        load(ServedFile(model="m", version="1", path=mlp(tmp_path / "m.onnx"), settings=settings))


def test_bound_tensors_give_the_same_answer(tmp_path: Path) -> None:
    session = ort.InferenceSession(tabular(tmp_path / "m.onnx"), providers=[CPU])
    feed = {"amount": np.array([1.5, 9.0]), "category": np.array([1, 4])}

    bound = BoundSession(session, "cpu").run(None, feed, ort.RunOptions())

    for one, other in zip(bound, session.run(None, feed), strict=True):
        assert one.tolist() == other.tolist()
