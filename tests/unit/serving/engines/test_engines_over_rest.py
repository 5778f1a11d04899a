"""Each format on a real platform: registered, deployed through the gate, and asked over REST."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from falaj.assembly.parsing import find_sandboxes
from falaj.errors import InvalidInput
from falaj.records.registry import FileFormat, TensorSpec
from framework_models import (
    lightgbm_booster,
    lightgbm_bytes,
    litert_bytes,
    rows,
    torch_bytes,
    torch_module,
    xgboost_booster,
    xgboost_bytes,
)
from model_files import xgboost_ubj
from model_servers import serving_platform
from platforms import OwnPlatform, make_platform
from polling import PATIENCE_S, eventually

PYTHON = b"""
import json

def load(files):
    global SCALE
    SCALE = json.loads(files["scale.json"])

def predict(inputs):
    return {"total": inputs["features"].sum(axis=1) * SCALE}
"""
FEATURES = TensorSpec(name="features", dtype="float32", shape=(-1, 4))
TOTAL = TensorSpec(name="total", dtype="float32", shape=(-1,))
GIVEN = rows(3, seed=9)


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnPlatform]:
    folder: Path = tmp_path_factory.mktemp("platform")
    with make_platform(folder, toml="[serving]\nlog_every = 0.2\n") as made, serving_platform(made.parts):
        yield made


@pytest.fixture(scope="module")
def ask(platform: OwnPlatform) -> Callable[[str], dict[str, Any]]:
    token = platform.tokens.issue(purpose="test").secret

    def infer(name: str) -> dict[str, Any]:
        shown = platform.endpoints.show(name)
        url = f"{shown.url}/infer"

        def answer() -> httpx.Response | None:
            problem = platform.endpoints.show(name).routes[0].problem
            assert problem is None, problem
            input_name = "input" if name == "torch" else "features"
            tensor = {"name": input_name, "shape": [3, 4], "datatype": "FP32", "data": GIVEN.ravel().tolist()}
            headers = {"Authorization": f"Bearer {token}"}
            found = httpx.post(url, json={"inputs": [tensor]}, headers=headers, timeout=PATIENCE_S)
            return found if found.status_code == 200 else None

        found = eventually(answer)
        return {each["name"]: np.reshape(each["data"], each["shape"]) for each in found.json()["outputs"]}

    return infer


def register(platform: OwnPlatform, name: str, files: dict[str, bytes], **facts: Any) -> FileFormat:
    blobs = [platform.blobs.upload(iter([content])).id for content in files.values()]
    return platform.models.register(name, files=tuple(blobs), paths=tuple(files), **facts).format


def test_boosted_trees(platform: OwnPlatform, ask: Callable[[str], dict[str, Any]]) -> None:
    xgb, lgb = xgboost_booster(), lightgbm_booster("multiclass", classes=3)
    assert register(platform, "xgb", {"model.ubj": xgboost_bytes(xgb)}) is FileFormat.XGBOOST
    assert register(platform, "lgb", {"model.txt": lightgbm_bytes(lgb)}) is FileFormat.LIGHTGBM

    for name in ("xgb", "lgb"):
        platform.endpoints.deploy(name, model=f"{name}@1")

    np.testing.assert_allclose(ask("xgb")["probability"][:, 0], xgb.inplace_predict(GIVEN), atol=1e-5)
    np.testing.assert_allclose(ask("lgb")["probabilities"], lgb.predict(GIVEN), atol=1e-5)
    assert eventually(lambda: platform.endpoints.show("xgb").measured)[0].place == "process"


def test_a_litert_model(platform: OwnPlatform, ask: Callable[[str], dict[str, Any]]) -> None:
    weight, bias = rows(2, seed=1), np.array([1, 2], np.float32)
    register(platform, "lite", {"model.tflite": litert_bytes(weight, bias)}, inputs=(FEATURES,))

    platform.endpoints.deploy("lite", model="lite@1")

    np.testing.assert_allclose(ask("lite")["y"], GIVEN @ weight.T + bias, atol=1e-4)


def test_a_torch_export(platform: OwnPlatform, ask: Callable[[str], dict[str, Any]]) -> None:
    module = torch_module()
    register(platform, "torch", {"model.pt2": torch_bytes(module, torch.randn(3, 4))})

    platform.endpoints.deploy("torch", model="torch@1")

    with torch.inference_mode():
        np.testing.assert_allclose(ask("torch")["output"], module(torch.from_numpy(GIVEN)).numpy(), atol=1e-5)


@pytest.mark.skipif(len(find_sandboxes()) == 1, reason="no sandbox works on this machine")
def test_python_code_with_its_files(platform: OwnPlatform, ask: Callable[[str], dict[str, Any]]) -> None:
    files = {"model.py": PYTHON, "scale.json": b"2.5"}
    with pytest.raises(InvalidInput, match="needs a signature"):
        register(platform, "code", files)
    assert register(platform, "code", files, inputs=(FEATURES,), outputs=(TOTAL,)) is FileFormat.PYTHON

    platform.endpoints.deploy("code", model="code@1")

    np.testing.assert_allclose(ask("code")["total"], GIVEN.sum(axis=1) * 2.5, atol=1e-5)


def test_a_damaged_model_is_a_problem_of_its_route(platform: OwnPlatform) -> None:
    register(platform, "cut", {"model.ubj": xgboost_ubj()})  # an XGBoost model by its keys alone

    platform.endpoints.deploy("cut", model="cut@1")

    problem = eventually(lambda: platform.endpoints.show("cut").routes[0].problem)
    assert "cut@1 is not an XGBoost model that can be opened" in problem
