"""Requests per second of one row each over gRPC, against MLServer and grpc.aio with the same model; REST beside it.

Falaj runs under `falaj up`: calls pass the hot path with a token, are validated, metered and audited in windows. A
second platform also logs every prediction and sketches it for drift, as by default. The peers do none of that. h2load
(in Debian: nghttp2-client) sends a message of ModelInfer with raw contents; it shares the machine.
"""

from __future__ import annotations

import json
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import numpy as np
from tritonclient.grpc import service_pb2

from falaj.apps.supervisor import status
from harness import Result, Rule, cpu_seconds, environment, free_port, peer_venv, report, say, stop
from serving_rest import MLSERVER, OWN_SESSION, PARTS, WIDTHS, falaj_serving, save_model_a, serving_mlserver

TRITON = 5.1
"""Requests a second of Triton 2.51 by gRPC against `grpc.aio`, measured in one run on two cores."""
QUICK = False
ROUNDS = 3
SECONDS = 2
REST = "rest"
LOGGED = ", every prediction logged"
INFER = "/inference.GRPCInferenceService/ModelInfer"
Address = tuple[int, int, str]
"""Port, process id and token of a server."""


def main() -> None:
    if shutil.which("h2load") is None:
        sys.exit("h2load is missing; apt-get install nghttp2-client")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = save_model_a(folder / "a.onnx")
        messages = write_messages(folder)
        with (
            falaj_serving(folder / "plain", model, predictions="forget") as rest,
            falaj_serving(folder / "logged", model, predictions="log") as logged,
            serving_aio(model) as aio,
            serving_mlserver(folder / "mlserver", model) as mlserver,
        ):
            ours = grpc_of(folder / "plain", rest)
            kept = grpc_of(folder / "logged", logged)
            peer = (mlserver[0] + 1, mlserver[1], "none")
            servers = {"falaj": ours, "logged": kept, "aio": aio, "mlserver": peer}
            one = alternate(servers, messages, 1)
            many = alternate(servers | {REST: rest}, messages, 64)
    report("serving_grpc", results(many, one))


def results(many: dict[str, dict[str, float]], one: dict[str, dict[str, float]]) -> list[Result]:
    at_least = Rule.RATIO_AT_LEAST
    found = []
    for how, name in (("", "falaj"), (LOGGED, "logged")):
        ours = many[name]
        found += [
            Result(f"requests/s at c=64, MLServer{how}", ours["rate"], many["mlserver"]["rate"], 5, at_least),
            Result(f"requests/s at c=64, grpc.aio{how}", ours["rate"], many["aio"]["rate"], 2, at_least),
            Result(
                f"requests/s at c=64, Triton as a multiple of grpc.aio{how}",
                ours["rate"],
                TRITON * many["aio"]["rate"],
                1,
                at_least,
            ),
            Result(f"requests/s at c=1, grpc.aio{how}", one[name]["rate"], one["aio"]["rate"], 1, at_least),
            Result(
                f"server CPU µs a request at c=64, grpc.aio{how}", ours["cpu_us"], many["aio"]["cpu_us"], 0.5
            ),
        ]
    cpu_us = many["falaj"]["cpu_us"], many["mlserver"]["cpu_us"]
    found.append(Result("server CPU µs a request at c=64, MLServer", *cpu_us, 0.2))
    return [
        *found,
        Result("requests/s at c=64, REST", many["falaj"]["rate"], many[REST]["rate"], 1, at_least),
    ]


def write_messages(folder: Path) -> Path:
    """Write a request as gRPC and as JSON; return the folder."""
    rows = np.random.default_rng(0).standard_normal((1, WIDTHS[0])).astype(np.float32)
    request = service_pb2.ModelInferRequest(model_name="a")
    request.inputs.add(name="x", datatype="FP32", shape=rows.shape)
    request.raw_input_contents.append(rows.tobytes())
    message = request.SerializeToString()
    (folder / "message").write_bytes(struct.pack(">BL", 0, len(message)) + message)
    tensor = {"name": "x", "datatype": "FP32", "shape": rows.shape, "data": rows.ravel().tolist()}
    (folder / "json").write_text(json.dumps({"inputs": [tensor]}))
    return folder


def grpc_of(folder: Path, server: Address) -> Address:
    address = status(folder / "home").models_grpc or ""
    return int(address.rpartition(":")[2]), server[1], server[2]


@contextmanager
def serving_aio(model: Path) -> Iterator[Address]:
    port, python = free_port(), peer_venv("mlserver", MLSERVER)
    command = [python, PARTS / "grpc_aio_server.py", model, str(port)]
    process = subprocess.Popen(
        command, env=environment(), stdin=subprocess.PIPE, start_new_session=OWN_SESSION
    )
    try:
        yield port, process.pid, "none"
    finally:
        stop(process)


def alternate(servers: dict[str, Address], messages: Path, clients: int) -> dict[str, dict[str, float]]:
    """Return the median measurements of each server, taken in turns."""
    seen: dict[str, list[dict[str, float]]] = {name: [] for name in servers}
    for _ in range(ROUNDS):
        for name, server in servers.items():
            seen[name].append(load(server, messages, clients, name=name))
    return {name: measured(rounds) for name, rounds in seen.items()}


def measured(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {figure: median(each[figure] for each in rounds) for figure in rounds[0]}


def load(server: Address, messages: Path, clients: int, *, name: str) -> dict[str, float]:
    is_rest = name == REST
    port, pid, token = server
    kind = ["-H", "content-type: application/json"] if is_rest else ["-H", "content-type: application/grpc"]
    more = ["--h1"] if is_rest else ["-H", "te: trailers"]
    path, data = ("/v2/models/a/infer", "json") if is_rest else (INFER, "message")
    command = ["h2load", "-c", str(clients), "-D", str(SECONDS), "--warm-up-time", "1", *kind, *more]
    command += ["-H", f"authorization: Bearer {token}", "-d", str(messages / data)]
    before, began = cpu_seconds(pid), time.monotonic()
    answer = subprocess.run(
        [*command, f"http://127.0.0.1:{port}{path}"], check=True, capture_output=True, text=True
    )
    spent, took = cpu_seconds(pid) - before, time.monotonic() - began
    counts = re.search(r"(\d+) total, .* (\d+) succeeded, (\d+) failed", answer.stdout)
    if counts is None or int(counts[3]) or not int(counts[2]):
        raise RuntimeError(f"{name}: {answer.stdout}{answer.stderr}")
    rate = int(counts[2]) / SECONDS
    found = {"rate": rate, "cpu_us": spent * 1e6 / (rate * took)}
    say(f"{name}, c={clients}: {rate:,.0f} requests/s, {found['cpu_us']:.1f} µs CPU a request")
    return found


if __name__ == "__main__":
    main()
