"""Requests per second of one JSON row each, against FastAPI + uvicorn + orjson, at concurrency 64 and 1.

Falaj runs under `falaj up`: requests pass the hot path with a token, are validated, metered and audited in windows. A
second platform also logs every prediction and sketches it for drift, as by default. The peer does none of that.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TypeVar

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import falaj as fj
from falaj.apps.supervisor import status
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

QUICK = True
ROUNDS = 5
SECONDS = 1.5
WARM_UP_S = 0.5
PARTS = HERE / "peers"
LOGGED = ", every prediction logged"
Seen = list[list[dict[str, float]]]
WIDTHS = (32, 64, 32, 1)
PEER = [
    *("fastapi==0.162.4", "uvicorn==0.54.0", "uvloop==0.23.0", "httptools==0.9.0"),
    *("orjson>=3.11,<4", "onnxruntime==1.31.1", "numpy==2.4.6"),
]


def main() -> None:
    python = peer_venv("fastapi-onnx", PEER)
    with tempfile.TemporaryDirectory() as folder:
        model = save_model_a(Path(folder) / "a.onnx")
        theirs = free_port()
        with (
            falaj_serving(Path(folder) / "plain", model, predictions="forget") as ours,
            falaj_serving(Path(folder) / "logged", model, predictions="log") as logged,
            serving([python, PARTS / "fastapi_server.py", model, str(theirs)], theirs) as their_pid,
        ):
            servers = (ours, logged, (theirs, their_pid, "none"))
            many, one = alternate(64, *servers), alternate(1, *servers)
    report("serving_rest", [*claims("", many, one, drop=1), *claims(LOGGED, many, one, drop=0)])


def claims(how: str, many: Seen, one: Seen, *, drop: int) -> list[Result]:
    """Return the results of one of the two platforms next to the peer; the other one is dropped."""
    many, one = ([rounds for n, rounds in enumerate(seen) if n != drop] for seen in (many, one))
    rates = (4, 1) if not how else (2.5, 1)
    return [
        Result(f"requests/s at c=64{how}", *middle("rate", many), rates[0], Rule.RATIO_AT_LEAST),
        Result(f"requests/s at c=1{how}", *middle("rate", one), rates[1], Rule.RATIO_AT_LEAST),
        Result(f"p99 ms at c=64{how}", *middle("p99_ms", many), 1, Rule.RATIO_AT_MOST),
        Result(
            f"server CPU µs a request at c=64{how}",
            *middle("cpu_us", many),
            rates[0] ** -1,
            Rule.RATIO_AT_MOST,
        ),
    ]


@contextmanager
def falaj_serving(folder: Path, model: Path, *, predictions: str = "log") -> Iterator[tuple[int, int, str]]:
    """Yield port, process id and token of a model server under `falaj up`, once the endpoint `a` is ready."""
    home = folder / "home"
    home.mkdir(mode=0o700, parents=True)
    (home / "falaj.toml").write_text(f'[serving]\npredictions = "{predictions}"\n')
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
        (server,) = [each for each in process_tree(pid) if b"falaj.apps.model_server\0" in command_of(each)]
        yield port, server, token


def deploy(platform: Platform, model: Path) -> str:
    """Register and deploy the model, and return a token that may call it."""
    blob = platform.put("a.onnx", model)
    version = platform.models.register("a", files=(blob.id,), paths=("model.onnx",))
    platform.endpoints.deploy("a", model=version.reference)
    return platform.tokens.issue(purpose="benchmark").secret


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
    """Write the model: 32→64→32→1, dense with ReLU, in float32."""
    random = np.random.default_rng(0)
    weights, nodes, value = [], [], "x"
    for number, (a, b) in enumerate(pairwise(WIDTHS)):
        w = (random.standard_normal((a, b)) / np.sqrt(a)).astype(np.float32)
        weights += [numpy_helper.from_array(w, f"w{number}"), numpy_helper.from_array(w[0], f"b{number}")]
        last = number == len(WIDTHS) - 2
        nodes.append(
            helper.make_node("Gemm", [value, f"w{number}", f"b{number}"], ["y" if last else f"h{number}"])
        )
        if not last:
            nodes.append(helper.make_node("Relu", [f"h{number}"], [f"r{number}"]))
        value = f"r{number}"
    ends = [
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", width])]
        for name, width in (("x", WIDTHS[0]), ("y", WIDTHS[-1]))
    ]
    graph = helper.make_graph(nodes, "a", *ends, weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


@contextmanager
def serving(command: Sequence[str | Path], port: int) -> Iterator[int]:
    """Yield the id of a ready server, whose standard input stays open: one of ours ends when that closes."""
    process = subprocess.Popen(command, env=environment(), stdin=subprocess.PIPE)
    try:
        wait_until_ready(f"http://127.0.0.1:{port}/v2/health/ready", pid=process.pid)
        yield process.pid
    finally:
        stop(process)


def alternate(connections: int, *servers: tuple[int, int, str]) -> Seen:
    """Return the measurements of the load generator for each server, in alternating rounds."""
    seen: Seen = [[] for _ in servers]
    for _ in range(ROUNDS):
        for rounds, (port, pid, token) in zip(seen, servers, strict=True):
            rounds.append(load(port, pid, token, connections))
    return seen


def load(port: int, pid: int, token: str, connections: int) -> dict[str, float]:
    figures = (port, connections, SECONDS, WARM_UP_S)
    command = [sys.executable, PARTS / "http_load.py", *map(str, figures), token]
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


def middle(figure: str, seen: Seen) -> list[float]:
    return [median(each[figure] for each in rounds) for rounds in seen]


if __name__ == "__main__":
    main()
