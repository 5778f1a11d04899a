"""A real Triton, from pip and in a virtualenv of its own, behind an endpoint of Falaj.

NVIDIA's pytriton brings tritonserver with its Python back end alone, and so the model of its repository is Python.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from model_servers import mlp, serving_platform
from platforms import make_platform
from polling import PATIENCE_S, eventually
from virtualenvs import environment

CONFIGURATION = """
name: "doubled"
backend: "python"
max_batch_size: 64
input [ { name: "x" data_type: TYPE_FP32 dims: [ 3 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 1 ] } ]
dynamic_batching { }
"""
MODEL = """
import sys

sys.path.insert(0, {packages!r})
import numpy as np
import triton_python_backend_utils as backend


class TritonPythonModel:
    def execute(self, requests):
        return [self._answer(backend.get_input_tensor_by_name(each, "x").as_numpy()) for each in requests]

    def _answer(self, x):
        y = (x.sum(axis=1, keepdims=True) * 2).astype(np.float32)
        return backend.InferenceResponse(output_tensors=[backend.Tensor("y", y)])
"""


def write_repository(folder: Path, packages: Path) -> None:
    """Write a model repository, and the back end with the stub for this version of Python."""
    version = folder / "models" / "doubled" / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text(CONFIGURATION)
    (version / "model.py").write_text(MODEL.format(packages=str(packages)))
    server = packages / "pytriton" / "tritonserver"
    shutil.copytree(server / "backends", folder / "backends")
    python = packages.parent.name.removeprefix("python")
    stub = server / "python_backend_stubs" / python / "triton_python_backend_stub"
    shutil.copy(stub, folder / "backends" / "python")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as opened:
        return int(opened.getsockname()[1])


@contextmanager
def triton(folder: Path) -> Iterator[str]:
    """Run tritonserver, and yield its address."""
    virtualenv = environment("triton")
    packages = next(virtualenv.glob("lib/python3*/site-packages"))
    write_repository(folder, packages)
    port = free_port()
    options = {
        "model-repository": folder / "models",
        "backend-directory": folder / "backends",
        "http-address": "127.0.0.1",
        "http-port": port,
        "allow-grpc": "false",
        "allow-metrics": "false",
    }
    command = [str(packages / "pytriton" / "tritonserver" / "bin" / "tritonserver")]
    command += [f"--{name}={value}" for name, value in options.items()]
    variables = os.environ | {
        "PATH": os.pathsep.join([str(virtualenv / "bin"), os.environ["PATH"]]),
        "LD_LIBRARY_PATH": str(packages / "nvidia_pytriton.libs"),
    }
    url = f"http://127.0.0.1:{port}"
    with (folder / "triton.log").open("wb") as log:
        process = subprocess.Popen(command, env=variables, stdout=log, stderr=log, cwd=folder)
        try:

            def is_ready() -> bool:
                assert process.poll() is None, (folder / "triton.log").read_text()
                try:
                    return httpx.get(f"{url}/v2/models/doubled/ready", timeout=PATIENCE_S).status_code == 200
                except httpx.TransportError:
                    return False

            eventually(is_ready)
            yield url
        finally:
            process.terminate()
            process.wait(PATIENCE_S)


def request(rows: int) -> dict[str, Any]:
    values = [float(number) for number in range(rows * 3)]
    return {"inputs": [{"name": "x", "shape": [rows, 3], "datatype": "FP32", "data": values}]}


def test_triton_itself_runs_the_version_of_an_endpoint(tmp_path: Path) -> None:
    content = mlp(tmp_path / "m.onnx").read_bytes()
    with triton(tmp_path) as url:
        toml = f'[serving.triton]\nurl = "{url}"\nconnections = 4\n[egress]\nallow = ["127.0.0.0/8"]\n'
        with make_platform(tmp_path / "home", toml=toml) as made:
            file = made.blobs.upload(iter([content]))
            made.models.register("doubled", files=(file.id,), paths=("model.onnx",))
            headers = {"Authorization": f"Bearer {made.tokens.issue(purpose='test').secret}"}
            with serving_platform(made.parts), httpx.Client(headers=headers, timeout=PATIENCE_S) as client:
                made.endpoints.deploy("twice", model="doubled@1")
                made.endpoints.configure("twice", engine="triton")
                eventually(
                    lambda: {each.place for each in made.endpoints.show("twice").measured} == {"threads"},
                )
                address = f"{made.endpoints.show('twice').url}/infer"
                answers = [client.post(address, json=request(rows)) for rows in (1, 2, 50)]
                wrong = request(1)
                wrong["inputs"][0]["shape"] = [3, 1]
                refused = client.post(address, json=wrong)
                statistics = httpx.get(f"{url}/v2/models/doubled/stats").json()["model_stats"][0]

    for rows, answer in zip((1, 2, 50), answers, strict=True):
        (output,) = answer.json()["outputs"]
        assert output["shape"] == [rows, 1]
        assert output["data"] == [2.0 * sum(range(3 * row, 3 * row + 3)) for row in range(rows)]
    assert refused.status_code == 400
    assert statistics["inference_count"] >= 53
