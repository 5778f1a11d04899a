"""The socket between the API and the model server: a job under Landlock can connect to it, and is not trusted."""

from __future__ import annotations

import json
from pathlib import Path

import httpx

from falaj.records.serving.predictions import InferInput
from model_servers import constant, serving_platform
from platforms import OwnPlatform
from polling import eventually

X = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [0.5, 2.0]}


def test_nobody_names_a_caller_without_the_secret(light_platform: OwnPlatform, tmp_path: Path) -> None:
    blob = light_platform.put("m", constant(tmp_path / "m.onnx", 1.0).read_bytes())
    light_platform.models.register("m", files=(blob.id,), paths=("model.onnx",))
    light_platform.endpoints.deploy("churn", model="m@1")
    with serving_platform(light_platform.parts):
        given = InferInput.model_validate(X)
        eventually(lambda: _answers(light_platform, given))
        published = light_platform.home.model_server
        facts = json.loads(published.read_text())
        transport = httpx.HTTPTransport(uds=facts["socket"])
        with httpx.Client(transport=transport, base_url="http://model-server") as client:
            refused = [
                client.post("/v2/models/churn/infer", json={"inputs": [X]}, headers=headers).status_code
                for headers in (
                    {"Falaj-Caller": "owner"},
                    {"Falaj-Caller": "owner", "Falaj-Secret": ""},
                    {"Falaj-Caller": "owner", "Falaj-Secret": facts["secret"][:-1]},
                )
            ]

        assert refused == [401, 401, 401]
        assert published.stat().st_mode & 0o077 == 0


def _answers(platform: OwnPlatform, given: InferInput) -> bool:
    try:
        return platform.endpoints.infer("churn", inputs=(given,)).model_version == "1"
    except Exception:
        return False
