"""Replicas of the model server under load: restarted, killed, given new versions, stopped when idle."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

import falaj as fj
from falaj.apps.supervisor import status
from falaj.records.control.replicas import ReplicaState, ServerReplicas
from falaj.sdk.platform import Platform
from model_servers import constant
from polling import PATIENCE_S, eventually
from processes import children

pytestmark = pytest.mark.slow

UP = "import sys; from falaj.apps.supervisor import up; sys.exit(up(port=0))"
BODY = {"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1.0, 2.0]}]}


@dataclass
class Running:
    """A running platform with the model m, and a client of its owner."""

    home: Path
    process: subprocess.Popen[bytes]
    platform: Platform
    token: str

    @property
    def models(self) -> str:
        return eventually(lambda: status(self.home).models)

    def register(self, value: float) -> None:
        content = constant(self.home.parent / f"{value}.onnx", value).read_bytes()
        blob = self.platform.blobs.upload(iter([content]))
        self.platform.models.register("m", files=(blob.id,), paths=("model.onnx",))

    def replicas(self) -> set[int]:
        return set(children(self.process.pid, "falaj.apps.model_server"))

    def are_ready(self, number: int) -> bool:
        """Tell whether so many replicas run and are ready, and no others run."""
        found = self.platform.endpoints.replicas().replicas
        ready = {each.pid for each in found if each.state is ReplicaState.READY}
        return len(ready) == len(found) == number and ready == self.replicas()

    def ask(self, client: httpx.Client) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.token}"}
        return client.post(f"{self.models_url}/v2/models/m/infer", json=BODY, headers=headers)

    models_url: str = ""


@contextmanager
def running_platform(folder: Path, settings: str) -> Iterator[Running]:
    home = folder / "home"
    home.mkdir(mode=0o700)
    (home / "falaj.toml").write_text(f"[serving]\nlog_every = 0.3\n[serving.replicas]\n{settings}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FALAJ_HOME", str(home))
        patch.setenv("FALAJ_CONFIG_DIR", str(folder / "config"))
        patch.delenv("FALAJ_TOKEN", raising=False)
        with subprocess.Popen([sys.executable, "-c", UP], stdout=subprocess.DEVNULL) as process:
            try:
                eventually(lambda: status(home).ready)
                with fj.connect(str(status(home).url)) as platform:
                    made = Running(home, process, platform, platform.tokens.issue(purpose="test").secret)
                    made.register(1)
                    platform.endpoints.deploy("m", model="m@1")
                    made.models_url = made.models
                    yield made
            finally:
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(PATIENCE_S)
                process.kill()


@dataclass
class Load:
    """Clients that ask without pause, half of them with a new connection for each request."""

    running: Running
    seen: Counter[Any] = field(default_factory=Counter)
    over: threading.Event = field(default_factory=threading.Event)

    def ask(self, *, keep_alive: bool) -> None:
        while not self.over.is_set():
            with httpx.Client(timeout=PATIENCE_S) as client:
                while not self.over.is_set():
                    try:
                        answer = self.running.ask(client)
                        found = answer.raise_for_status().json()
                        right = float(found["model_version"]) == found["outputs"][0]["data"][0]
                        self.seen[answer.status_code, found["model_version"], right] += 1
                    except (httpx.HTTPError, KeyError, ValueError) as error:
                        self.seen[repr(error)] += 1
                    if not keep_alive:
                        break

    def answered(self) -> int:
        return sum(number for key, number in self.seen.copy().items() if isinstance(key, tuple))

    def failures(self) -> Counter[Any]:
        """Return what was neither an answer nor right, and forget it."""
        found = Counter(
            {
                key: number
                for key, number in self.seen.items()
                if not isinstance(key, tuple) or key[0] != 200 or not key[2]
            }
        )
        for key in found:
            del self.seen[key]
        return found

    def grows(self, version: str, by: int = 100) -> None:
        """Wait until so many more answers of a version have come."""
        before = self.seen[200, version, True]
        eventually(lambda: self.seen[200, version, True] >= before + by)


@contextmanager
def load_on(running: Running) -> Iterator[Load]:
    made = Load(running)
    threads = [
        threading.Thread(target=made.ask, kwargs={"keep_alive": bool(number % 2)}) for number in range(4)
    ]
    for thread in threads:
        thread.start()
    try:
        yield made
    finally:
        made.over.set()
        for thread in threads:
            thread.join(PATIENCE_S)


def test_replicas_are_replaced_and_changed_under_load_and_no_request_fails(tmp_path: Path) -> None:
    with running_platform(tmp_path, "min = 2\nmax = 2") as running:
        running.register(2)
        eventually(lambda: running.are_ready(2))
        with load_on(running) as load:
            load.grows("1")
            first = running.replicas()
            assert {each.pid for each in running.platform.endpoints.replicas().replicas} == first

            running.platform.endpoints.restart()
            eventually(lambda: not first & running.replicas() and running.are_ready(2))
            load.grows("1")
            assert not load.failures()

            running.platform.endpoints.deploy("m", model="m@2")
            load.grows("2", by=200)
            running.platform.endpoints.deploy("m", model="m@1")
            load.grows("1", by=200)
            assert not load.failures()

            written = load.answered()
            eventually(lambda: counted(running)[0] >= written)
            killed = running.replicas().pop()
            os.kill(killed, signal.SIGKILL)
            eventually(lambda: killed not in running.replicas())
            uncounted = load.answered() - written  # at most: what the killed one counted since it last wrote
            eventually(lambda: running.are_ready(2))
            load.grows("1")
            failed = load.failures()

        assert sum(failed.values()) <= 4, failed  # one for each client: what the killed one was answering
        assert not any("ConnectError" in str(key) for key in failed)
        eventually(lambda: running.platform.endpoints.replicas().status == "2 ready")
        eventually(lambda: are_measured(running.platform.endpoints.replicas()))
        eventually(lambda: counted(running)[0] >= load.answered() - uncounted)
        assert counted(running)[1] >= {"1", "2"}
        # one that was killed counts as running until what it wrote last is old
        eventually(lambda: len(running.platform.endpoints.load().replicas) == 2)


def are_measured(found: ServerReplicas) -> bool:
    return all(each.load is not None and each.load.rss_bytes > 10**7 for each in found.replicas)


def counted(running: Running) -> tuple[float, set[str]]:
    """Return the answered requests in the metrics, and the replicas that have them."""
    headers = {"Authorization": f"Bearer {running.token}"}
    text = httpx.get(f"{running.models_url}/metrics", headers=headers).text
    samples = [
        (float(line.rpartition(" ")[2]), re.findall('replica="(.*?)"', line)[0])
        for line in text.splitlines()
        if line.startswith("falaj_serving_requests_total") and 'status="200"' in line
    ]
    return sum(number for number, _ in samples), {replica for _, replica in samples}


def test_the_last_replica_stops_when_idle_and_the_next_request_waits_for_another(tmp_path: Path) -> None:
    with running_platform(tmp_path, 'min = 0\nidle = "1s"') as running:
        eventually(lambda: not running.replicas())
        assert (status(running.home).replicas or "").startswith(
            "0 ready, between 0 and 1 (there was no request"
        )

        with load_on(running) as load:
            load.grows("1")
            assert not load.failures()

        eventually(lambda: not running.replicas())
        answer = running.platform.endpoints.infer("m", inputs=BODY["inputs"])
        assert answer.outputs[0].data == [1.0]


def test_load_and_metrics_show_every_replica(tmp_path: Path) -> None:
    with running_platform(tmp_path, "min = 2\nmax = 2") as running:
        eventually(lambda: running.are_ready(2))
        with load_on(running) as load:
            load.grows("1")

            def both() -> Any:
                found = running.platform.endpoints.load()
                return found if len(found.replicas) == 2 else None

            found = eventually(both)
            headers = {"Authorization": f"Bearer {running.token}"}
            metrics = eventually(
                lambda: _of_both(httpx.get(f"{running.models_url}/metrics", headers=headers).text)
            )

        assert {each.pid for each in found.replicas} == running.replicas()
        assert {each.replica for each in found.versions} == {each.replica for each in found.replicas}
        assert sum(each.requests for each in found.versions) > 0
        assert all(each.cpu_s > 0 and each.rss_bytes > 10**7 for each in found.replicas)
        assert metrics.count("# TYPE nv_inference_count counter") == 1


def _of_both(text: str) -> str | None:
    counts = [line for line in text.splitlines() if line.startswith("nv_inference_request_success{")]
    return text if len(counts) == 2 else None
