"""Serving as real processes: deployed from the CLI, called by a stock client, changed and killed under load."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

import falaj as fj
from command_line import CommandLine, restored_log
from falaj.apps.supervisor import status
from falaj.records.serving.endpoints import Route, ScoringRule
from falaj.records.serving.predictions import GroundTruth
from falaj.sdk.platform import Platform
from model_servers import constant
from polling import PATIENCE_S, eventually
from processes import children

pytestmark = pytest.mark.slow

UP = "import sys; from falaj.apps.supervisor import up; sys.exit(up(port=0))"
BODY = {"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1.0, 2.0]}]}


@dataclass
class Running:
    """A running platform, and a client of its owner."""

    folder: Path
    process: subprocess.Popen[bytes]
    platform: Platform
    token: str
    idle: tuple[int | None, str | None] = (None, None)
    """The model server's process and address before anything was deployed."""
    deployed: str = ""
    """Output of the command that deployed the first version."""

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @cached_property
    def models(self) -> str:
        return eventually(lambda: status(self.home).models)

    def register(self, value: float) -> str:
        blob = self.platform.blobs.upload(iter([constant(self.folder / f"{value}.onnx", value).read_bytes()]))
        return self.platform.models.register("m", files=(blob.id,), paths=("model.onnx",)).reference

    def serve(self, version: str) -> None:
        """Route everything to `version`, and wait until it answers."""
        self.platform.endpoints.deploy("m", model=f"m@{version}", scoring=ScoringRule.SQUARED_ERROR)
        with httpx.Client() as client:
            eventually(lambda: self.ask(client).json().get("model_version") == version)

    def ask(self, client: httpx.Client, name: str = "m") -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.token}"}
        return client.post(f"{self.models}/v2/models/{name}/infer", json=BODY, headers=headers)

    def server_pid(self) -> int | None:
        return next(iter(children(self.process.pid, "falaj.apps.model_server")), None)

    def log_pid(self) -> int | None:
        """Return the process of the prediction log of the server that runs now."""
        server = self.server_pid()
        return None if server is None else next(iter(children(server, "log_process")), None)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Yield a platform with three versions of the model m, the first of which is deployed from the CLI.

    The tests share it, in any order: each first selects the version that it needs.
    """
    folder = tmp_path_factory.mktemp("serving")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FALAJ_HOME", str(folder / "home"))
        patch.setenv("FALAJ_CONFIG_DIR", str(folder / "config"))
        patch.delenv("FALAJ_TOKEN", raising=False)
        (folder / "home").mkdir(mode=0o700)
        (folder / "home" / "falaj.toml").write_text("[serving]\nlog_every = 0.3\n")
        with started(folder) as process:
            eventually(lambda: status(folder / "home").ready)
            with fj.connect(str(status(folder / "home").url)) as platform:
                token = platform.tokens.issue(purpose="scenario").secret
                made = Running(folder, process, platform, token)
                for value in (1, 2, 3):
                    made.register(value)
                made.idle = (made.server_pid(), status(folder / "home").models)
                command = [sys.executable, "-m", "falaj", "deploy", "m@1"]
                made.deployed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
                yield made


@contextmanager
def started(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", UP], stdout=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE_S)
            process.kill()


@pytest.fixture
def falaj(running: Running, capsys: pytest.CaptureFixture[str]) -> Iterator[CommandLine]:
    with restored_log():
        yield CommandLine(running.folder, capsys)


@pytest.mark.slow
def test_a_model_deployed_from_the_cli_answers_the_stock_client(running: Running, falaj: CommandLine) -> None:
    assert running.idle == (None, None)  # nothing is deployed, so no server runs
    assert "m is served by m@1 (100)" in running.deployed
    assert f"{running.models}/v2/models/m/infer" in running.deployed
    assert "undo   falaj endpoints remove m" in running.deployed

    running.serve("1")

    for binary in (True, False):
        answer = infer(running, "m", np.ones((3, 2), np.float32), binary=binary)
        assert answer.as_numpy("y").tolist() == [[1.0]] * 3
        assert answer.get_response()["id"].startswith("predictions_")
    assert falaj.json("endpoints", "show", "m")["url"] == f"{running.models}/v2/models/m"
    assert falaj.json("status")["models"] == running.models


def infer(running: Running, name: str, rows: Any, *, binary: bool, datatype: str = "FP32") -> Any:
    given = triton.InferInput("x", list(rows.shape), datatype)
    given.set_data_from_numpy(rows, binary_data=binary)
    wanted = [triton.InferRequestedOutput("y", binary_data=binary)]
    headers = {"Authorization": f"Bearer {running.token}"}

    def answered() -> Any:
        with triton.InferenceServerClient(urlsplit(running.models).netloc) as client:
            try:
                return client.infer(name, [given], outputs=wanted, headers=headers)
            except InferenceServerException as error:
                if "no endpoint" in str(error):  # it is still loading
                    return None
                raise

    return eventually(answered)


def test_bad_input_is_explained_and_the_server_stays_up(running: Running, falaj: CommandLine) -> None:
    with pytest.raises(InferenceServerException, match=r"given shape \[1, 3\], allowed \[-1, 2\]"):
        infer(running, "m", np.ones((1, 3), np.float32), binary=True)
    with pytest.raises(InferenceServerException, match="datatype FP64, allowed FP32"):
        infer(running, "m", np.ones((1, 2)), binary=True, datatype="FP64")
    url, headers = f"{running.models}/v2/models/m/infer", {"Authorization": f"Bearer {running.token}"}
    with httpx.Client() as client:
        assert client.post(url, content=b"{", headers=headers).status_code == 400
        assert client.post(url, content=b"{}").status_code == 401
        assert client.post(url, headers=headers, content=b" " * (17 * 2**20)).status_code == 413
        assert running.ask(client, "nothing").status_code == 404
        assert running.ask(client).status_code == 200
    refused = falaj("deploy", "m@1", "--name", "x", "--lookup", "nowhere=a")
    assert (refused.status, "nowhere" in refused.err) == (1, True)


def test_routes_change_under_load_and_no_request_fails(running: Running) -> None:
    running.serve("1")
    over, seen = threading.Event(), Counter[tuple[int, str]]()
    askers = [threading.Thread(target=keep_requesting, args=(running, over, seen)) for _ in range(4)]
    for asker in askers:
        asker.start()
    for number in range(8):
        wanted, before = str(number % 2 + 1), seen.copy()
        routes = (Route(version=wanted, weight=3), Route(version=str(2 - number % 2), weight=number % 3))
        running.platform.endpoints.route("m", routes=routes)
        eventually(lambda: seen[200, wanted] > before[200, wanted])  # noqa: B023 - used at once
    running.platform.endpoints.deploy("m", model="m@3")
    eventually(lambda: seen[200, "3"] > 20)
    over.set()
    for asker in askers:
        asker.join(PATIENCE_S)

    assert {code for code, _ in seen} == {200}
    assert {version for _, version in seen} == {"1", "2", "3"}


def keep_requesting(running: Running, over: threading.Event, seen: Counter[tuple[int, str]]) -> None:
    with httpx.Client() as client:
        while not over.is_set():
            try:
                answer = running.ask(client)
                seen[answer.status_code, answer.json().get("model_version", "")] += 1
            except httpx.TransportError:
                seen[0, ""] += 1


@pytest.mark.slow
def test_a_killed_server_comes_back_with_its_counters_and_log(running: Running) -> None:
    running.serve("3")
    with httpx.Client() as client:
        idents = [running.ask(client).json()["id"] for _ in range(10)]
    eventually(lambda: requests(running, "3") >= 10)
    eventually(
        lambda: (
            not running.platform.endpoints.feedback(
                "m", predictions=tuple(GroundTruth(id=ident, value=1) for ident in idents)
            ).unknown
        )
    )
    before, address, pid = requests(running, "3"), running.models, running.server_pid()
    assert pid is not None

    os.kill(pid, signal.SIGKILL)
    eventually(lambda: running.server_pid() not in (None, pid))
    with httpx.Client() as client:
        eventually(lambda: status_of_request(running, client) == 200)

    assert status(running.home).models == address
    eventually(lambda: requests(running, "3") > before)
    assert running.platform.endpoints.prediction(idents[0]).label == 1
    stats = {each.version: each for each in running.platform.endpoints.stats("m").versions}
    assert (stats["3"].labelled, stats["3"].score_mean) == (10, 4.0)
    assert running.platform.verify_audit().ok


@pytest.mark.slow
def test_predictions_that_were_logged_first_survive_kill_9(running: Running) -> None:
    """Every response that says Falaj-Logged is found, although the server and its log are killed under load."""
    running.serve("2")
    logged, over = list[str](), threading.Event()
    threads = [threading.Thread(target=ask_logged, args=(running, logged, over)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for victims in (("server",), ("log",), ("log", "server")):
        enough = len(logged) + 20
        eventually(lambda enough=enough: len(logged) >= enough)
        pids = {"server": running.server_pid(), "log": running.log_pid()}
        for victim in victims:
            os.kill(int(pids[victim] or 0), signal.SIGKILL)
        eventually(lambda old=pids["log"]: running.log_pid() not in (None, old))
    over.set()
    for thread in threads:
        thread.join()

    found = [running.platform.endpoints.prediction(ident).outputs for ident in logged]

    assert found == [{"y": [2.0]}] * len(logged)
    assert len(set(logged)) == len(logged) >= 60


def ask_logged(running: Running, logged: list[str], over: threading.Event) -> None:
    """Send requests until `over`; keep the ids of those that were logged first."""
    while not over.is_set():
        with suppress(httpx.TransportError), httpx.Client() as client:
            while not over.is_set():
                headers = {"Authorization": f"Bearer {running.token}"}
                body = BODY | {"parameters": {"falaj_logged": True}}
                answer = client.post(f"{running.models}/v2/models/m/infer", json=body, headers=headers)
                if answer.headers.get("falaj-logged") == "true":
                    logged.append(answer.headers["falaj-prediction"])


def status_of_request(running: Running, client: httpx.Client) -> int:
    try:
        return running.ask(client).status_code
    except httpx.TransportError:
        return 0


def requests(running: Running, version: str) -> int:
    found = running.platform.endpoints.stats("m").versions
    return next((each.requests for each in found if each.version == version), 0)


def test_the_command_line_routes_and_shows(running: Running, falaj: CommandLine) -> None:
    running.serve("3")

    routed = falaj.done("endpoints", "route", "m", "1=90", "3=10").out
    wrong = falaj("endpoints", "route", "m", "1=lots")

    assert "m is served by m@1 (90), m@3 (10)" in routed
    assert "undo   falaj endpoints route " in routed
    assert routed.rstrip().endswith("3=100")
    eventually(lambda: "squared error" in falaj.done("endpoints", "stats", "m").out)
    assert (wrong.status, "a whole number behind '='" in wrong.err) == (2, True)
    assert "1 90%, 3 10%" in falaj.done("endpoints", "list").out
    assert "not logged" in falaj.done("endpoints", "show", "m").out
