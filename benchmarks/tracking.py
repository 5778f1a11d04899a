"""Metric points per second of `runs.log_metrics`, against MLflow's `log_batch`, each by its own client.

One client, ten metrics, batches of 1,000 points (MLflow's limit); only the calls are timed. Both use SQLite, over HTTP
(MLflow with one worker and no jobs) and in process. What Falaj acknowledges is on disk, authorized and audited.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import falaj as fj
from falaj.records.tracking import BATCH_POINTS, MetricPoint
from falaj.sdk.platform import Platform
from harness import (
    Result,
    Rule,
    environment,
    free_port,
    peer_venv,
    report,
    running,
    saved_token,
    say,
    wait_until_ready,
)

QUICK = True
SECONDS = 3.0
KEYS = 10
BATCH = 1000
MLFLOW = "mlflow==3.17.2"

PEER = """
import sys, time
from mlflow import MlflowClient
from mlflow.entities import Metric

client = MlflowClient(sys.argv[1])
seconds, keys, size = float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
run = client.create_run(client.create_experiment("bench")).info.run_id
start, spent, done, number = int(time.time() * 1000), 0.0, 0, 0
while spent < seconds:
    first = number * size
    batch = [Metric(f"metric-{i % keys}", i * 0.001, start + i, i) for i in range(first, first + size)]
    began = time.perf_counter()
    client.log_batch(run, metrics=batch)
    took = time.perf_counter() - began
    number += 1
    if number > 1:  # the first one warms up
        spent, done = spent + took, done + size
print(done / spent)
"""


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="tracking-") as folder:
        near, near_large = falaj_in_process(Path(folder))
        far, far_large = falaj_over_http(Path(folder))
        peer_far = mlflow_over_http(Path(folder))
        peer_near = mlflow_rate(f"sqlite:///{folder}/near.db", Path(folder))
    report(
        "tracking",
        [
            Result(
                f"points/s over HTTP, batches of {BATCH}", far, peer_far, goal=10, rule=Rule.RATIO_AT_LEAST
            ),
            Result(
                f"points/s in process, batches of {BATCH}", near, peer_near, goal=10, rule=Rule.RATIO_AT_LEAST
            ),
            Result(
                f"points/s over HTTP, each one's largest batch ({BATCH_POINTS} and {BATCH})",
                far_large,
                peer_far,
                goal=10,
                rule=Rule.RATIO_AT_LEAST,
            ),
            Result(
                f"points/s in process, each one's largest batch ({BATCH_POINTS} and {BATCH})",
                near_large,
                peer_near,
                goal=10,
                rule=Rule.RATIO_AT_LEAST,
            ),
        ],
    )


def falaj_in_process(folder: Path) -> tuple[float, float]:
    with fj.open(folder / "near") as platform:
        return falaj_rates(platform, "in process")


def falaj_over_http(folder: Path) -> tuple[float, float]:
    port, home, config = free_port(), folder / "far", folder / "config"
    command = [Path(sys.executable).with_name("falaj"), "--home", home, "up", "--port", str(port)]
    variables = environment(FALAJ_CONFIG_DIR=str(config))
    with running(command, cwd=folder, env=variables) as pid:
        address = f"http://127.0.0.1:{port}"
        wait_until_ready(f"{address}/readyz", pid=pid)
        token = saved_token(config)
        with fj.connect(address, token) as platform:
            return falaj_rates(platform, "over HTTP")


def falaj_rates(platform: Platform, how: str) -> tuple[float, float]:
    """Return points/s in batches as large as the peer's, and in the largest possible ones."""
    rates = falaj_rate(platform, BATCH), falaj_rate(platform, BATCH_POINTS)
    say(f"falaj {how}: {rates[0]:,.0f} points/s, {rates[1]:,.0f} in batches of {BATCH_POINTS}")
    return rates


def falaj_rate(platform: Platform, size: int) -> float:
    run = platform.runs.start("bench").id
    batches = _batches(size)
    platform.runs.log_metrics(run, next(batches))
    return _rate(lambda points: platform.runs.log_metrics(run, points), batches)


def _batches(size: int) -> Iterator[list[MetricPoint]]:
    start, first = datetime.now(UTC), 0
    while True:
        yield [
            MetricPoint(
                key=f"metric-{i % KEYS}", value=i * 0.001, step=i, timestamp=start + timedelta(milliseconds=i)
            )
            for i in range(first, first + size)
        ]
        first += size


def _rate(log: Callable[[list[MetricPoint]], object], batches: Iterator[list[MetricPoint]]) -> float:
    spent, done = 0.0, 0
    while spent < SECONDS:
        points = next(batches)
        began = time.perf_counter()
        log(points)
        spent += time.perf_counter() - began
        done += len(points)
    return done / spent


def mlflow_over_http(folder: Path) -> float:
    port, home = free_port(), folder / "mlflow"
    home.mkdir()
    command = [peer_venv("mlflow", [MLFLOW]).with_name("mlflow"), "server"]
    command += ["--port", str(port), "--workers", "1"]
    variables = environment(HOME=str(home), MLFLOW_SERVER_ENABLE_JOB_EXECUTION="false")
    with running(command, cwd=home, env=variables) as pid:
        wait_until_ready(f"http://127.0.0.1:{port}/health", pid=pid)
        return mlflow_rate(f"http://127.0.0.1:{port}", home)


def mlflow_rate(uri: str, folder: Path) -> float:
    python = peer_venv("mlflow", [MLFLOW])
    command = [python, "-c", PEER, uri, str(SECONDS), str(KEYS), str(BATCH)]
    variables = environment(HOME=str(folder))
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    rate = float(done.stdout.splitlines()[-1])
    say(f"mlflow at {uri.partition(':')[0]}: {rate:,.0f} points/s")
    return rate


if __name__ == "__main__":
    main()
