"""The client of KServe, from pip and in a virtualenv of its own: the V1 and the V2 protocol over REST."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from model_servers import TOKEN, constant, deployment, serving
from polling import PATIENCE_S
from virtualenvs import environment

CLIENT = """
import asyncio, json, sys
import numpy as np
from kserve import InferenceRESTClient, InferInput, InferRequest, RESTConfig

async def ask(base, token):
    headers = {"Authorization": f"Bearer {token}"}
    found = {}
    v1 = InferenceRESTClient(RESTConfig(protocol="v1", retries=0))
    found["v1"] = await v1.infer(base, {"instances": [[1, 2]]}, model_name="m", headers=headers)
    found["v1 ready"] = await v1.is_model_ready(base, "m", headers=headers)
    v2 = InferenceRESTClient(RESTConfig(protocol="v2", retries=0))
    for binary in (True, False):
        tensor = InferInput("x", [1, 2], "FP32")
        tensor.set_data_from_numpy(np.array([[1, 2]], np.float32), binary_data=binary)
        request = InferRequest(model_name="m", infer_inputs=[tensor])
        answer = await v2.infer(base, request, model_name="m", headers=dict(headers))
        found[f"v2 {binary}"] = answer.outputs[0].as_numpy().tolist()
    found["v2 ready"] = await v2.is_model_ready(base, "m", headers=headers)
    found["live"] = await v2.is_server_live(base, headers=headers)
    print(json.dumps(found))

asyncio.run(ask(*sys.argv[1:]))
"""


def test_the_client_of_kserve_speaks_v1_and_v2(tmp_path: Path) -> None:
    python = environment("kserve") / "bin" / "python"
    with serving(deployment(("m", "1", constant(tmp_path / "m.onnx", 3)))) as server:
        command = [python, "-c", CLIENT, f"http://127.0.0.1:{server.port}", TOKEN]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)

    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == {
        "v1": {"predictions": [[3.0]]},
        "v1 ready": True,
        "v2 True": [[3.0]],
        "v2 False": [[3.0]],
        "v2 ready": True,
        "live": True,
    }
