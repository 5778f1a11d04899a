"""Requests per second of one row each, against FastAPI + uvicorn + orjson, MLServer and BentoML.

Falaj runs under `falaj up`: requests pass the hot path with a token, are validated, metered and audited in windows. A
second platform also logs every prediction and sketches it for drift, as by default. The peers do none of that. The load
generator shares the machine; its share of a core is printed, and must stay below one. `--unique 1000000` checks the
answers to that many different inputs, too.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TypeVar

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

import falaj as fj
from falaj.apps.supervisor import status
from falaj.monitoring.windows.collector import Collector
from falaj.records.monitoring.sketches import ColumnRole
from falaj.sdk.platform import Platform
from harness import (
    HERE,
    Result,
    Rule,
    cpu_seconds,
    environment,
    free_port,
    get,
    peer_venv,
    process_tree,
    report,
    running,
    say,
    stop,
    wait_until_ready,
)
from peers.http_load import infer_request

QUICK = True
ROUNDS = 5
SECONDS = 1.5
WARM_UP_S = 0.5
PARTS = HERE / "peers"
TRITON = 4.4
"""Requests a second of Triton 2.51 with its ONNX Runtime back end against FastAPI, measured in one run on two cores.
What pip installs of Triton lacks that back end, so FastAPI is the yardstick."""
WIDTHS = (32, 64, 32, 1)
SLOW_WIDTHS = (32, 2048, 2048, 2048, 1)
"""Model B: about 2 ms a row."""
Server = tuple[int, int, str]
"""Port, process and token."""
PEER = [
    *("fastapi==0.162.4", "uvicorn==0.54.0", "uvloop==0.23.0", "httptools==0.9.0"),
    *("orjson>=3.11,<4", "onnxruntime==1.31.1", "numpy==2.4.6"),
]
MLSERVER = ["mlserver==1.7.1", "onnxruntime>=1.20", "numpy"]
BENTOML = ["bentoml>=1.4,<1.5", "onnxruntime>=1.20", "numpy"]


def main() -> None:
    if shutil.which("wrk") is None:
        sys.exit("wrk is missing; apt-get install wrk")
    unique = int(sys.argv[sys.argv.index("--unique") + 1]) if "--unique" in sys.argv else 0
    with tempfile.TemporaryDirectory() as folder:
        results = [
            *model_a(Path(folder)),
            *model_b(Path(folder) / "b"),
        ]
        if unique:
            results.append(unique_inputs(Path(folder) / "unique", unique))
    report("serving_rest", results)


def model_a(folder: Path) -> list[Result]:
    model = save_mlp(folder / "a.onnx", WIDTHS)
    python = peer_venv("fastapi-onnx", PEER)
    with (
        falaj_serving(folder / "plain", model, predictions="forget") as ours,
        falaj_serving(folder / "logged", model, predictions="log") as logged,
        serving_fastapi(python, model) as fastapi,
        serving_mlserver(folder / "mlserver", model) as mlserver,
        serving_bentoml(folder, model) as bentoml,
    ):
        both, servers = (logged, fastapi), (ours, logged, fastapi)
        many, some, one = alternate(64, *servers), alternate(16, *both), alternate(1, *both)
        slow = alternate(64, logged, mlserver, bentoml, rounds=3)
        tensors = alternate(64, logged, logged, rounds=3, kinds=("binary", "json"))
        by_wrk = [
            median(rates) for rates in zip(*([wrk(*each) for each in both] for _ in range(3)), strict=True)
        ]
    plain, kept, peer = (measured(rounds) for rounds in many)
    others, (binary, text) = [measured(rounds) for rounds in slow], [measured(rounds) for rounds in tensors]
    return [
        *ratio("requests/s at c=64", "rate", kept, peer, 7),
        *ratio("requests/s at c=64, not logged", "rate", plain, peer, 7),
        Result(
            "requests/s at c=64, Triton as a multiple of FastAPI",
            kept["rate"],
            TRITON * peer["rate"],
            1,
            Rule.RATIO_AT_LEAST,
        ),
        Result("requests/s at c=64, by wrk", *by_wrk, 7, Rule.RATIO_AT_LEAST),
        *ratio("requests/s at c=16", "rate", *map(measured, some), 4),
        *ratio("requests/s at c=1", "rate", *map(measured, one), 1),
        *ratio("requests/s at c=64, MLServer", "rate", others[0], others[1], 10),
        *ratio("requests/s at c=64, BentoML", "rate", others[0], others[2], 10),
        *ratio("requests/s at c=64, binary tensors against JSON", "rate", binary, text, 1),
        Result("server CPU µs a request, binary tensors against JSON", binary["cpu_us"], text["cpu_us"], 1),
        Result("p99 ms at c=64", kept["p99_ms"], peer["p99_ms"], 1),
        Result("server CPU µs a request at c=64", kept["cpu_us"], peer["cpu_us"], 1 / 7),
        Result("server CPU µs a request at c=64, not logged", plain["cpu_us"], peer["cpu_us"], 1 / 7),
        Result("sketching, µs a row, against a logged request", sketching_us(), kept["cpu_us"], 0.1),
    ]


def model_b(folder: Path) -> list[Result]:
    """Return rows per second of a model that takes milliseconds, against its session alone on all cores."""
    folder.mkdir()
    model = save_mlp(folder / "b.onnx", SLOW_WIDTHS)
    ours, raw = [], []
    with falaj_serving(folder, model, predictions="log") as server:
        for _ in range(3):
            raw.append(raw_rows_per_second(model))
            ours.append(load(*server, 16, kind="binary", width=SLOW_WIDTHS[0])["rate"])
    return [
        Result("model B, rows/s at c=16, ONNX Runtime", median(ours), median(raw), 0.95, Rule.RATIO_AT_LEAST)
    ]


def raw_rows_per_second(path: Path) -> float:
    """Return the rows of sessions with one thread, one on each core."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    sessions = [ort.InferenceSession(path, options) for _ in range(os.cpu_count() or 1)]
    row, until = np.ones((1, SLOW_WIDTHS[0]), np.float32), time.perf_counter() + SECONDS

    def rows(session: ort.InferenceSession) -> int:
        done = 0
        while time.perf_counter() < until:
            session.run(None, {"x": row})
            done += 1
        return done

    with ThreadPoolExecutor(len(sessions)) as pool:
        return sum(pool.map(rows, sessions)) / SECONDS


def unique_inputs(folder: Path, requests: int) -> Result:
    """Return how many of so many requests of 64 clients got a wrong answer: one that is not the number they sent."""
    folder.mkdir()
    nodes = [helper.make_node("Identity", ["x"], ["y"])]
    ends = [[helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 1])] for name in "xy"]
    model = save(helper.make_graph(nodes, "a", *ends), folder / "echo.onnx")
    with falaj_serving(folder, model, predictions="log") as (port, _, token):
        command = [sys.executable, PARTS / "unique_load.py", str(port), "64", str(requests), token]
        answer = subprocess.run(command, check=True, capture_output=True, env=environment(), text=True)
    found = json.loads(answer.stdout)
    say(f"{found['answered']:,} answers, {found['wrong']} wrong, {found['rate']:,.0f} a second")
    return Result(
        f"wrong answers to {requests:,} unique inputs", found["wrong"], requests, 0, Rule.FALAJ_AT_MOST
    )


def sketching_us() -> float:
    """Return the CPU time of sketching one row of model A, and its output, in the process of the log."""
    rows = np.random.default_rng(0).normal(size=(20_000, WIDTHS[0])).astype(np.float32)
    costs = []
    for _ in range(3):
        collector, began = Collector(), time.thread_time()
        collector.add("a", "1", {"x": rows})
        collector.add("a", "1", {"y": rows[:, :1]}, role=ColumnRole.PREDICTION)
        collector.flush()
        costs.append((time.thread_time() - began) / len(rows) * 1e6)
    return median(costs)


def measured(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    return {figure: median(each[figure] for each in rounds) for figure in rounds[0]}


def ratio(
    what: str, figure: str, ours: dict[str, float], theirs: dict[str, float], goal: float
) -> list[Result]:
    return [Result(what, ours[figure], theirs[figure], goal, Rule.RATIO_AT_LEAST)]


@contextmanager
def falaj_serving(
    folder: Path, model: Path, *, predictions: str = "log", processes: int = 1
) -> Iterator[Server]:
    """Yield port, process id and token of a model server under `falaj up`, once the endpoint `a` is ready.

    The process is that of the server, or their parent if there are several.
    """
    home = folder / "home"
    home.mkdir(mode=0o700, parents=True)
    replicas = f"[serving.replicas]\nmin = {processes}\nmax = {processes}\n"
    (home / "falaj.toml").write_text(f'[serving]\npredictions = "{predictions}"\n{replicas}')
    places = {"FALAJ_HOME": str(home), "FALAJ_CONFIG_DIR": str(folder / "config")}
    os.environ |= places
    program = Path(sys.executable).with_name("falaj")
    with running([program, "up", "--port", "0"], cwd=folder, env=environment(**places)) as pid:
        url = until(lambda: status(home).url if status(home).ready else None)
        with fj.connect(url) as platform:
            token = deploy(platform, model)
            models = until(lambda: status(home).models)
        port = int(models.rpartition(":")[2])
        headers = {"Authorization": f"Bearer {token}"}
        until(lambda: get(f"{models}/v2/models/a/ready", headers=headers) == 200)
        servers = until(lambda: found if len(found := model_servers(pid)) == processes else None)
        yield port, servers[0] if processes == 1 else pid, token


def deploy(platform: Platform, model: Path) -> str:
    """Register and deploy the model, and return a token that may call it."""
    blob = platform.put("a.onnx", model)
    version = platform.models.register("a", files=(blob.id,), paths=("model.onnx",))
    platform.endpoints.deploy("a", model=version.reference)
    return platform.tokens.issue(purpose="benchmark").secret


def model_servers(pid: int) -> list[int]:
    return [each for each in process_tree(pid) if b"falaj.apps.model_server\0" in command_of(each)]


def command_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


T = TypeVar("T")


def until(found: Callable[[], T | None], *, within_s: float = 60) -> T:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if value := found():
            return value
        time.sleep(0.1)
    raise TimeoutError("the platform did not come up")


def save_model_a(path: Path) -> Path:
    return save_mlp(path, WIDTHS)


def save_mlp(path: Path, widths: Sequence[int]) -> Path:
    """Write dense layers with ReLU, in float32; model A is 32→64→32→1."""
    random = np.random.default_rng(0)
    weights, nodes, value = [], [], "x"
    for number, (a, b) in enumerate(pairwise(widths)):
        w = (random.standard_normal((a, b)) / np.sqrt(a)).astype(np.float32)
        weights += [numpy_helper.from_array(w, f"w{number}"), numpy_helper.from_array(w[0], f"b{number}")]
        last = number == len(widths) - 2
        nodes.append(
            helper.make_node("Gemm", [value, f"w{number}", f"b{number}"], ["y" if last else f"h{number}"])
        )
        if not last:
            nodes.append(helper.make_node("Relu", [f"h{number}"], [f"r{number}"]))
        value = f"r{number}"
    ends = [
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", width])]
        for name, width in (("x", widths[0]), ("y", widths[-1]))
    ]
    return save(helper.make_graph(nodes, "a", *ends, weights), path)


def save(graph: onnx.GraphProto, path: Path) -> Path:
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


# --------------------------------------------------------------------------------------------- the peers


OWN_SESSION = True
"""The kernel divides busy cores among sessions first. Our server has a session of its own, so peers have one too."""


@contextmanager
def serving(
    command: Sequence[str | Path], port: int, *, ready: str = "/v2/health/ready", **extra: str
) -> Iterator[Server]:
    """Yield a ready server, whose standard input stays open: one of ours ends when that closes."""
    process = subprocess.Popen(
        command,
        env=environment(**extra),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=OWN_SESSION,
    )
    try:
        wait_until_ready(f"http://127.0.0.1:{port}{ready}", pid=process.pid)
        yield port, process.pid, "none"
    finally:
        stop(process)


@contextmanager
def serving_fastapi(python: Path, model: Path) -> Iterator[Server]:
    port = free_port()
    with serving([python, PARTS / "fastapi_server.py", model, str(port)], port) as server:
        yield server


@contextmanager
def serving_mlserver(folder: Path, model: Path) -> Iterator[Server]:
    folder.mkdir()
    port, python = free_port(), peer_venv("mlserver", MLSERVER)
    subprocess.run([python, PARTS / "mlserver_runtime.py", folder, model, str(port)], check=True)
    with serving([python.with_name("mlserver"), "start", folder], port) as server:
        yield server


@contextmanager
def serving_bentoml(folder: Path, model: Path) -> Iterator[Server]:
    port, python = free_port(), peer_venv("bentoml", BENTOML)
    options = ["--host", "127.0.0.1", "--port", str(port), "--working-dir", str(PARTS)]
    command = [python.with_name("bentoml"), "serve", "bentoml_service:OnnxService", *options]
    places = {"MODEL": str(model), "BENTOML_HOME": str(folder / "bentoml"), "BENTOML_DO_NOT_TRACK": "True"}
    with serving(command, port, ready="/readyz", **places) as server:
        yield server


# ---------------------------------------------------------------------------------------------- the load


def alternate(
    connections: int, *servers: Server, rounds: int = ROUNDS, kinds: Sequence[str] = ()
) -> list[list[dict[str, float]]]:
    """Return the measurements of the load generator for each server, in alternating rounds."""
    seen: list[list[dict[str, float]]] = [[] for _ in servers]
    for _ in range(rounds):
        for found, server, kind in zip(seen, servers, kinds or ["json"] * len(servers), strict=True):
            found.append(load(*server, connections, kind=kind))
    return seen


def load(
    port: int, pid: int, token: str, connections: int, *, kind: str = "json", width: int = WIDTHS[0]
) -> dict[str, float]:
    figures = (port, connections, SECONDS, WARM_UP_S)
    command = [sys.executable, PARTS / "http_load.py", *map(str, figures), token, kind, str(width)]
    before = cpu_seconds(pid)
    answer = subprocess.run(command, check=True, capture_output=True, env=environment(), text=True)
    found: dict[str, float] = json.loads(answer.stdout)
    found["cpu_us"] = (cpu_seconds(pid) - before) * 1e6 / (found["rate"] * (SECONDS + WARM_UP_S))
    if found["failures"]:
        raise RuntimeError(f"{found['failures']:.0f} requests were not answered with 200")
    say(
        f"c={connections}: {found['rate']:,.0f} requests/s, p50 {found['p50_ms']:.2f} ms, "
        f"p99 {found['p99_ms']:.2f} ms, {found['cpu_us']:.1f} µs CPU a request; "
        f"the generator used {found['generator_cpu']:.0%} of a core"
    )
    return found


def wrk(port: int, _pid: int, token: str, *, threads: int = 1) -> float:
    """Return requests a second as wrk counts them, whose client costs less than ours."""
    body = infer_request("", token, width=WIDTHS[0], seed=0).partition(b"\r\n\r\n")[2].decode()
    lines = [f"wrk.method, wrk.body = 'POST', {json.dumps(body)}"]
    lines += [f"wrk.headers[{name!r}] = {value!r}" for name, value in headers_of(token).items()]
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        script.write("\n".join(lines))
        script.flush()
        url = f"http://127.0.0.1:{port}/v2/models/a/infer"
        command = ["wrk", f"-t{threads}", "-c64", f"-d{SECONDS + WARM_UP_S:g}", "-s", script.name, url]
        answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    if "Non-2xx" in answer:
        raise RuntimeError(f"wrk was not answered with 200: {answer}")
    rate = float(answer.partition("Requests/sec:")[2].split()[0])
    say(f"wrk, c=64: {rate:,.0f} requests/s")
    return rate


def headers_of(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}


if __name__ == "__main__":
    main()
