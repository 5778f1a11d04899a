"""The client of MLflow against both servers, each on SQLite: MLflow's own, with one worker and no jobs, and Falaj."""

from __future__ import annotations

import json
import random
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from harness import (
    cpu_seconds,
    environment,
    free_port,
    peer_venv,
    running,
    saved_token,
    say,
    settle,
    wait_until_ready,
)

MLFLOW = "mlflow==3.17.2"
CLIENT = """
import json, sys, time
from mlflow import MlflowClient
from mlflow.entities import Metric
from requests.adapters import HTTPAdapter

waited, send = [0.0], HTTPAdapter.send
def timed(*args, **options):
    began = time.perf_counter()
    try:
        return send(*args, **options)
    finally:
        waited[0] += time.perf_counter() - began
HTTPAdapter.send = timed

client, experiment = MlflowClient(), sys.argv[1]
for line in sys.stdin:
    work, seconds = line.split()
    if work != "search":
        run = client.create_run(client.create_experiment(f"{work}-{time.time_ns()}")).info.run_id
    start, spent, done, number = int(time.time() * 1000), 0.0, 0, 0
    while spent < float(seconds):
        if work == "batch":
            first = number * 1000
            points = [Metric(f"metric-{i % 10}", i * 0.001, start + i, i) for i in range(first, first + 1000)]
            began, size = time.perf_counter(), 1000
            client.log_batch(run, metrics=points)
        elif work == "single":
            began, size = time.perf_counter(), 1
            client.log_metric(run, "m", number * 0.001, start + number, number)
        else:
            began, size = time.perf_counter(), 1
            found = client.search_runs([experiment], "metrics.auc > 0.9", max_results=100)
            assert len(found) == 100, len(found)
        number += 1
        if number > 1:
            spent, done = spent + time.perf_counter() - began, done + size
        else:  # the first one warms up
            waited[0] = 0.0
            print("ready", flush=True)
    print(json.dumps({"done": done, "seconds": spent, "waited": waited[0]}), flush=True)
"""


@dataclass(frozen=True)
class TrackingServer:
    """A server that clients of MLflow speak to; `experiment` has 10,000 runs, where it was filled."""

    name: str
    address: str
    pid: int
    token: str = ""
    experiment: str = "0"

    @contextmanager
    def client(self, folder: Path) -> Iterator[TrackingClient]:
        """Start a client of MLflow."""
        variables = environment(
            HOME=str(folder),
            MLFLOW_TRACKING_URI=self.address,
            MLFLOW_DISABLE_TELEMETRY="true",
            **({"MLFLOW_TRACKING_TOKEN": self.token} if self.token else {}),
        )
        command: list[str | Path] = [peer_venv("mlflow", [MLFLOW]), "-c", CLIENT, self.experiment]
        pipe = subprocess.PIPE
        with subprocess.Popen(
            command, cwd=folder, env=variables, stdin=pipe, stdout=pipe, text=True
        ) as process:
            yield TrackingClient(self, process)


class Rates(NamedTuple):
    """What a client did per second, per CPU second of the server, and per second of waiting for its answers.

    The last leaves out the client's own work, which is the same at every server: a request made, and an answer read.
    """

    per_s: float
    per_cpu_s: float
    per_waited_s: float


@dataclass(frozen=True)
class TrackingClient:
    """A process with the client of MLflow, at one server."""

    server: TrackingServer
    process: subprocess.Popen[str]

    def work(self, work: str, *, seconds: float) -> Rates:
        """Return how much the client did of `work`."""
        orders, answers = self.process.stdin, self.process.stdout
        assert orders is not None
        assert answers is not None
        print(work, seconds, file=orders, flush=True)
        if answers.readline() != "ready\n":
            raise RuntimeError(f"the client of MLflow failed at {work}")
        before = cpu_seconds(self.server.pid)
        found: dict[str, Any] = json.loads(answers.readline())
        cpu = cpu_seconds(self.server.pid) - before
        rates = Rates(found["done"] / found["seconds"], found["done"] / cpu, found["done"] / found["waited"])
        say(
            f"{self.server.name}, {work}: {rates.per_s:,.1f} per second, {rates.per_cpu_s:,.1f} per CPU second of "
            f"the server, {rates.per_waited_s:,.1f} per second of waiting for it"
        )
        return rates


def in_turns(
    servers: Sequence[TrackingServer], works: Sequence[str], *, rounds: int, seconds: float, folder: Path
) -> dict[str, list[Rates]]:
    """Return the median rates at each server by work. They take turns, so that what else runs here slows all."""
    found: dict[str, list[list[Rates]]] = {work: [[] for _ in servers] for work in works}
    with ExitStack() as stack:
        clients = [stack.enter_context(server.client(folder)) for server in servers]
        for server in servers:
            settle(server.pid, within_s=30)
        for number in range(rounds):
            for work in works:
                for at, client in enumerate(clients):
                    rates = client.work(work, seconds=seconds)
                    if number or rounds == 1:  # the first round warms up
                        found[work][at].append(rates)
    return {
        work: [Rates(*(median(column) for column in zip(*each, strict=True))) for each in of_servers]
        for work, of_servers in found.items()
    }


@contextmanager
def falaj_server(home: Path, config: Path, *, experiment: str = "0") -> Iterator[TrackingServer]:
    port = free_port()
    command: list[str | Path] = [
        Path(sys.executable).with_name("falaj"),
        "--home",
        home,
        "up",
        "--port",
        str(port),
    ]
    with running(command, cwd=config.parent, env=environment(FALAJ_CONFIG_DIR=str(config))) as pid:
        address = f"http://127.0.0.1:{port}"
        wait_until_ready(f"{address}/readyz", pid=pid)
        yield TrackingServer("falaj", address, pid, saved_token(config), experiment)


@contextmanager
def mlflow_server(folder: Path, *, runs: int = 0) -> Iterator[TrackingServer]:
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    command: list[str | Path] = [peer_venv("mlflow", [MLFLOW]).with_name("mlflow"), "server"]
    command += ["--port", str(port), "--workers", "1", "--backend-store-uri", f"sqlite:///{folder}/mlflow.db"]
    variables = environment(HOME=str(folder), MLFLOW_SERVER_ENABLE_JOB_EXECUTION="false")
    with running(command, cwd=folder, env=variables) as pid:
        wait_until_ready(f"http://127.0.0.1:{port}/health", pid=pid)
        if runs:
            fill_mlflow(folder / "mlflow.db", runs)
        yield TrackingServer("mlflow", f"http://127.0.0.1:{port}", pid)


def fill_mlflow(path: Path, runs: int) -> None:
    """Write runs to the database of an MLflow server, as `tracking_data` writes them to that of Falaj."""
    rng = random.Random(0)
    with sqlite3.connect(path) as database:
        for number in range(runs):
            run, at = f"{number:032x}", 1_767_225_600_000 + 1000 * number
            database.execute(
                "INSERT INTO runs (run_uuid, name, source_type, user_id, status, start_time, end_time, "
                "lifecycle_stage, artifact_uri, experiment_id) "
                "VALUES (?,?,'LOCAL','bench','FINISHED',?,?,'active',?,0)",
                (run, f"run-{number}", at, at + 10_000, f"mlflow-artifacts:/0/{run}/artifacts"),
            )
            metrics = ["auc", *(f"metric-{n}" for n in rng.sample(range(11_999), 4))]
            database.executemany(
                "INSERT INTO latest_metrics (key, value, timestamp, step, is_nan, run_uuid) VALUES (?,?,?,19,0,?)",
                [(key, rng.random(), at + 19, run) for key in metrics],
            )
            values = [("lr", "0.1"), ("depth", "3"), *((f"p{n}", str(rng.random())) for n in range(3))]
            insert = "INSERT INTO {} (key, value, run_uuid) VALUES (?,?,?)"
            database.executemany(insert.format("params"), [(*each, run) for each in values])
            tags = [("team", "risk"), ("n", str(number)), ("mlflow.runName", f"run-{number}")]
            database.executemany(insert.format("tags"), [(*each, run) for each in tags])
