"""Requests per second and latency of the API under 200 clients, against MLflow's tracking server on the same mix.

80 % of the requests read (a run, a page of runs, a model, who the caller is), 20 % write (start a run, set tags, log a
metric). Server and load generator are processes of their own on the same cores. What Falaj acknowledges is authorized,
audited and on disk; MLflow has neither users nor a log.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

import falaj as fj
from falaj.records.governance.identity import Role
from harness import (
    HERE,
    Result,
    Rule,
    cpu_seconds,
    environment,
    free_port,
    peer_venv,
    pss_mb,
    report,
    running,
    saved_token,
    say,
    settle,
    wait_until_ready,
)

QUICK = True
CLIENTS = 200
SECONDS, WARM_UP_S = 10.0, 3.0
USERS, RUNS, MODELS = 10, 50, 10
MLFLOW = "mlflow==3.17.2"
WEIGHTS = {
    "run": 35,
    "runs": 15,
    "model": 20,
    "who": 10,
    "start": 5,
    "tags": 8,
    "metric": 7,
}
RATE, P99_MS = 1000, 1000


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="api-load-") as folder:
        with falaj_server(Path(folder)) as (port, mix):
            ours = loaded("falaj", port, mix, Path(folder))
        if ours["failures"]:  # MLflow refuses tags that two clients set at a time, and may
            raise RuntimeError(f"{ours['failures']} requests failed; the first: {ours['failure']}")
        with mlflow_server(Path(folder)) as (port, mix):
            peer = loaded("mlflow", port, mix, Path(folder))
    name = f"{CLIENTS} clients, 80 % reads"
    report(
        "api_load",
        [
            Result(f"requests/s, {name}", ours["rate"], peer["rate"], RATE, Rule.FALAJ_AT_LEAST),
            Result(f"p99 in ms, {name}", ours["p99_ms"], peer["p99_ms"], P99_MS, Rule.FALAJ_AT_MOST),
        ],
    )


def loaded(name: str, port: int, mix: Path, folder: Path) -> dict[str, Any]:
    python = peer_venv("http_load", ["uvloop"])
    command = [
        python,
        HERE / "peers" / "api_load.py",
        str(port),
        str(CLIENTS),
        str(SECONDS),
        str(WARM_UP_S),
        mix,
    ]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    say(f"{name}: {found}")
    return found


# --------------------------------------------------------------------------------------------- falaj


@contextmanager
def falaj_server(folder: Path) -> Iterator[tuple[int, Path]]:
    port, home, config = free_port(), folder / "falaj", folder / "config"
    command = [Path(sys.executable).with_name("falaj"), "--home", home, "up", "--port", str(port)]
    with running(command, cwd=folder, env=environment(FALAJ_CONFIG_DIR=str(config))) as pid:
        address = f"http://127.0.0.1:{port}"
        wait_until_ready(f"{address}/readyz", pid=pid)
        token = saved_token(config)
        with fj.connect(address, token) as platform:
            mix = falaj_mix(platform, folder / "falaj.json")
        settle(pid)
        before = cpu_seconds(pid)
        yield port, mix
        say(f"falaj: {cpu_seconds(pid) - before:.1f} s of CPU, {pss_mb(pid):.0f} MB")


def falaj_mix(platform: Any, file: Path) -> Path:
    tokens = []
    for number in range(USERS):
        platform.users.create(f"user-{number}")
        platform.workspaces.grant("default", f"user-{number}", role=Role.DEVELOPER)
        tokens.append(platform.tokens.issue(user=f"user-{number}", purpose="load").secret)
    runs = [platform.runs.start("load", params={"lr": 0.1}, tags={"a": "b"}).id for _ in range(RUNS)]
    blob = platform.blobs.commit(platform.blobs.upload(iter([safetensors()])).id, name="weights").id
    for number in range(MODELS):
        platform.models.register(f"model-{number}", files=(blob,), paths=("model.safetensors",))

    def posts(path: str, bodies: list[dict[str, Any]], *, writes: bool = False) -> list[str]:
        head = "Idempotency-Key: @KEY@\r\n" if writes else ""
        return [
            post(f"/api/v1/{path}", body, f"Authorization: Bearer {token}\r\n{head}")
            for token in tokens
            for body in bodies
        ]

    point = {"key": "loss", "value": 0.5, "step": "@STEP@"}
    return write_mix(
        file,
        {
            "run": posts("runs/show", [{"run": run} for run in runs]),
            "runs": posts("runs/list", [{"experiment": "load", "limit": 20}]),
            "model": posts("models/show", [{"model": f"model-{number}"} for number in range(MODELS)]),
            "who": posts("users/whoami", [{}]),
            "start": posts("runs/start", [{"experiment": "load", "params": {"lr": 0.1}}], writes=True),
            "tags": posts(
                "runs/set_tags", [{"run": run, "tags": {"step": "@STEP@"}} for run in runs], writes=True
            ),
            "metric": posts(
                "runs/log_metrics", [{"run": run, "points": [point]} for run in runs], writes=True
            ),
        },
    )


def safetensors() -> bytes:
    """Return the smallest model file: one number."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(4)


# -------------------------------------------------------------------------------------------- MLflow


@contextmanager
def mlflow_server(folder: Path) -> Iterator[tuple[int, Path]]:
    """Run MLflow's server with a worker for each core, on SQLite."""
    port, home = free_port(), folder / "mlflow"
    home.mkdir()
    command = [peer_venv("mlflow", [MLFLOW]).with_name("mlflow"), "server"]
    command += ["--port", str(port), "--workers", "2"]
    variables = environment(HOME=str(home), MLFLOW_SERVER_ENABLE_JOB_EXECUTION="false")
    with running(command, cwd=home, env=variables) as pid:
        wait_until_ready(f"http://127.0.0.1:{port}/health", pid=pid)
        mix = mlflow_mix(port, folder / "mlflow.json")
        settle(pid)
        before = cpu_seconds(pid)
        yield port, mix
        say(f"mlflow: {cpu_seconds(pid) - before:.1f} s of CPU, {pss_mb(pid):.0f} MB")


def mlflow_mix(port: int, file: Path) -> Path:
    root = "/api/2.0/mlflow"
    with httpx.Client(base_url=f"http://127.0.0.1:{port}{root}", trust_env=False, timeout=60) as client:

        def made(path: str, body: dict[str, Any]) -> Any:
            return client.post(path, json=body).raise_for_status().json()

        experiment = made("/experiments/create", {"name": "load"})["experiment_id"]
        start = {"experiment_id": experiment, "start_time": 0}
        runs = [made("/runs/create", start)["run"]["info"]["run_id"] for _ in range(RUNS)]
        for run in runs:
            made("/runs/log-parameter", {"run_id": run, "key": "lr", "value": "0.1"})
            made("/runs/set-tag", {"run_id": run, "key": "a", "value": "b"})
        for number in range(MODELS):
            made("/registered-models/create", {"name": f"model-{number}"})
    point = {"key": "loss", "value": 0.5, "timestamp": "@STEP@", "step": "@STEP@"}
    return write_mix(
        file,
        {
            "run": [get(f"{root}/runs/get?run_id={run}") for run in runs],
            "runs": [post(f"{root}/runs/search", {"experiment_ids": [experiment], "max_results": 20})],
            "model": [get(f"{root}/registered-models/get?name=model-{number}") for number in range(MODELS)],
            "who": [get(f"{root}/experiments/get?experiment_id={experiment}")],
            "start": [post(f"{root}/runs/create", {"experiment_id": experiment, "start_time": 0})],
            "tags": [
                post(f"{root}/runs/set-tag", {"run_id": run, "key": "step", "value": "@STEP@"})
                for run in runs
            ],
            "metric": [post(f"{root}/runs/log-metric", {"run_id": run, **point}) for run in runs],
        },
    )


# ------------------------------------------------------------------------------------------ requests


def get(path: str) -> str:
    return f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


def post(path: str, body: dict[str, Any], headers: str = "") -> str:
    """Return a request; `@STEP@` stands for nine digits, and is a number in `step` and `timestamp`."""
    text = json.dumps(body).replace('"step": "@STEP@"}]', '"step": @STEP@}]')
    for name in ("timestamp", "step"):
        if '"run_id"' in text and '"value": 0.5' in text:
            text = text.replace(f'"{name}": "@STEP@"', f'"{name}": @STEP@')
    size = len(text.replace("@STEP@", "1" * 9))
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{headers}Content-Type: application/json\r\n"
    return f"{head}Content-Length: {size}\r\n\r\n{text}"


def write_mix(file: Path, requests: dict[str, list[str]]) -> Path:
    file.write_text(
        json.dumps([{"name": n, "weight": w, "requests": requests[n]} for n, w in WEIGHTS.items()])
    )
    return file


if __name__ == "__main__":
    main()
