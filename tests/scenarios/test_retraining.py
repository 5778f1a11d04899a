"""A retraining whose controller is killed at each step continues, and no step takes effect twice."""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest

import falaj as fj
from falaj.errors import FalajError
from falaj.records.control.pipelines import Canary
from falaj.records.control.workflows import WorkflowRun
from falaj.records.features import ColumnType, Entity, Feature, FeatureView
from falaj.records.record import utc_now
from falaj.sdk.platform import Platform
from model_servers import constant
from polling import eventually

pytestmark = pytest.mark.slow

UP = "import sys; from falaj.apps.supervisor import up; sys.exit(up(port=0))"
TOML = "[server]\nport = 0\n\n[serving]\nport = 0\n"
KILLS = ("training set", "train", "register", "canary", "route all to it")
"""The controller is killed once at each of these steps that is observed."""

SCRIPT = """
import base64, json
import falaj as fj

(fj.job.outputs / "model").mkdir()
(fj.job.outputs / "model" / "model.onnx").write_bytes(base64.b64decode({model!r}))
(fj.job.outputs / "model.json").write_text(json.dumps({{"files": ["model/model.onnx"], "metrics": {{"auc": 0.7}}}}))
"""
BODY = {"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1.0, 2.0]}]}


@pytest.fixture
def platform(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Platform]:
    """Yield a platform that runs as under `falaj up`."""
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    (home / "falaj.toml").write_text(TOML)
    monkeypatch.setenv("FALAJ_HOME", str(home))
    monkeypatch.setenv("FALAJ_CONFIG_DIR", str(tmp_path / "config"))
    with subprocess.Popen([sys.executable, "-c", UP], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[3]
            with fj.connect(url) as connected:
                yield connected
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


def test_a_retraining_survives_kills_of_its_controller(platform: Platform, tmp_path: Path) -> None:
    prepare(platform, tmp_path)

    with traffic(platform):
        work = platform.pipelines.start("weekly")
        killed, ended = kill_along(platform, work.id)

    assert len(killed) >= 2, f"killed at {killed} only"
    assert ended.error is None
    assert ended.result is not None
    assert ended.result["verdict"]["promote"], ended.result["verdict"]["words"]
    assert platform.models.show("m").versions == 2
    assert platform.models.resolve("m", alias="champion").reference == "m@2"
    assert [job.attempt for job in platform.jobs.list().items] == [1]
    assert len(platform.features.training_sets().items) == 1
    assert {each.version: each.weight for each in platform.endpoints.show("m").routes} == {"2": 100}


def prepare(platform: Platform, folder: Path) -> None:
    """Deploy a weak champion, and apply a pipeline that trains a better model."""
    platform.apply(
        [
            Entity(name="customer", key="customer"),
            FeatureView(
                name="facts",
                entities=("customer",),
                columns=(Feature(name="value", type=ColumnType.FLOAT),),
            ),
        ]
    )
    rows = pa.table({"customer": ["a", "b"], "event_time": [utc_now()] * 2, "value": [1.0, 2.0]})
    platform.ingest("facts", rows)
    champion = platform.blobs.upload(iter([constant(folder / "half.onnx", 0.5).read_bytes()]))
    platform.models.register("m", files=(champion.id,), paths=("model.onnx",))
    platform.endpoints.deploy("m", model="m@1")
    code = folder / "code"
    code.mkdir()
    surer = base64.b64encode(constant(folder / "surer.onnx", 0.9).read_bytes()).decode()
    (code / "train.py").write_text(SCRIPT.format(model=surer))
    platform.pipeline(
        code / "train.py",
        name="weekly",
        endpoint="m",
        model="m",
        spine="facts",
        views=("facts",),
        window=timedelta(days=1),
        canary=Canary(share=50, requests=20, labels=20, error_rate=0.2, latency=0.5, tolerance=0.5),
    )


@contextmanager
def traffic(platform: Platform) -> Iterator[None]:
    """Send requests, and labels that are all 1, until the end of the block."""
    stop = threading.Event()
    url = eventually(lambda: platform.endpoints.show("m").url)
    token = platform.tokens.issue(purpose="traffic").secret

    def send() -> None:
        with httpx.Client(headers={"Authorization": f"Bearer {token}"}) as client:
            while not stop.wait(0.05):
                with suppress(httpx.HTTPError, FalajError, KeyError):
                    response: dict[str, Any] = client.post(f"{url}/infer", json=BODY).json()
                    waiting.append(response["id"])
                    if len(waiting) >= 20:
                        outcomes = [{"id": name, "value": 1.0} for name in waiting]
                        scored = platform.endpoints.feedback("m", predictions=outcomes)
                        waiting[:] = [name for name in waiting if name in set(scored.unknown)]

    waiting: list[str] = []
    sender = threading.Thread(target=send)
    sender.start()
    try:
        yield
    finally:
        stop.set()
        sender.join()


def kill_along(platform: Platform, work: str) -> tuple[list[str], WorkflowRun]:
    """Kill the controller once at each observed step in KILLS; return those steps, and the final workflow."""
    killed: list[str] = []

    def kill_and_look() -> WorkflowRun | None:
        now = platform.workflows.show(work)
        doing = (now.doing or "").partition(":")[0]
        controller = platform.platform.status().controller
        if doing in KILLS and doing not in killed and controller is not None:
            with suppress(ProcessLookupError):
                os.kill(int(controller.split(":")[1]), signal.SIGKILL)
                killed.append(doing)
        return now if now.state.ended else None

    ended = eventually(kill_and_look, every=0.01)
    assert ended is not None
    return killed, ended
