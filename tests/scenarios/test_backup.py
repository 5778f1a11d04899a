"""`falaj backup` of a platform that runs, killed half-way, and `falaj restore` where its home was destroyed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import falaj as fj
from command_line import environment
from falaj.apps.supervisor import down, status
from falaj.sdk import credentials
from model_servers import constant
from polling import PATIENCE_S, eventually

FALAJ = [sys.executable, "-c", "import sys; from falaj.apps.cli.app import run; sys.exit(run(sys.argv[1:]))"]


class Machine:
    """`falaj` as processes, on a home of the test."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home = folder, folder / "home"
        self.environment = environment(folder)
        self.up: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.up = subprocess.Popen([*FALAJ, "up", "--port", "0"], env=self.environment, cwd=self.folder)
        eventually(lambda: status(self.home).ready)

    def stop(self) -> None:
        down(self.home)
        if self.up is not None:
            self.up.wait(PATIENCE_S)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*FALAJ, *arguments], env=self.environment, cwd=self.folder, capture_output=True, text=True
        )

    def json(self, *arguments: str) -> Any:
        ran = self.run("--json", *arguments)
        assert ran.returncode == 0, ran.stderr
        return json.loads(ran.stdout)

    def predict(self) -> Any:
        """Ask the endpoint, once the model server serves it."""
        body = {"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1.0, 2.0]}]}
        url = eventually(lambda: status(self.home).models)
        token = credentials.token_for(status(self.home).url)
        header = {"Authorization": f"Bearer {token}"}

        def ask() -> httpx.Response | None:
            answer = httpx.post(f"{url}/v2/models/churn/infer", json=body, headers=header)
            return answer if answer.status_code == 200 else None

        return eventually(ask).json()


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    made = Machine(tmp_path)
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    try:
        yield made
    finally:
        made.stop()


def work(machine: Machine) -> None:
    """Run a job that succeeds, register a model and serve it."""
    (machine.folder / "train.py").write_text("print('trained')\n")
    assert machine.run("train", "train.py", "--name", "first").returncode == 0
    with fj.connect(status(machine.home).url) as platform:
        for number in range(20):
            platform.put(f"large-{number}", os.urandom(1_000_000))
        model = platform.put("model", constant(machine.folder / "model.onnx", 7.0).read_bytes())
        platform.models.register("churn", files=(model.id,), paths=("model.onnx",))
        platform.endpoints.deploy("churn", model="churn@1")


@pytest.mark.slow
def test_a_platform_is_backed_up_while_it_runs_killed_and_restored(machine: Machine) -> None:
    machine.start()
    work(machine)
    before = machine.predict()
    logged = ("endpoints", "prediction", before["id"])
    eventually(lambda: machine.run(*logged).returncode == 0)
    backup = subprocess.Popen([*FALAJ, "backup", "backups"], env=machine.environment, cwd=machine.folder)
    eventually((machine.folder / "backups" / "objects").exists, every=0.001)
    backup.send_signal(signal.SIGKILL)
    backup.wait()

    made = machine.json("backup", "backups", "--keys", "safe")
    machine.run("blobs", "put", "train.py", "later")
    with fj.connect(status(machine.home).url) as platform:
        platform.audit.inclusion_proof(0)  # a head of it is signed
    machine.stop()
    shutil.rmtree(machine.home)
    shutil.rmtree(machine.folder / "config" / "keys")
    done = machine.json("restore", "backups", "--keys", "safe")
    machine.start()

    assert (made["missing"], done["name"]) == ([], made["name"])
    assert machine.predict()["outputs"] == before["outputs"]
    assert machine.json(*logged)["id"] == before["id"]
    assert [job["state"] for job in machine.json("jobs", "list")["items"]] == ["done"]
    verdict = machine.json("audit", "verify")
    assert (verdict["ok"], len(verdict["notes"])) == (True, 1)
    assert machine.run("blobs", "get", "later", "-").returncode == 1
    assert machine.run("train", "train.py", "--name", "second").returncode == 0
