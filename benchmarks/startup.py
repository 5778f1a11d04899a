"""CPU seconds and memory (PSS) of `falaj up`, against `mlflow server`, over all their processes.

Both start with their defaults in an empty home, become ready, answer one request and become idle. MLflow is also
measured in its leanest setting (one worker, no jobs).
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from harness import (
    Result,
    cpu_seconds,
    environment,
    free_port,
    get,
    peer_venv,
    process_tree,
    pss_mb,
    report,
    running,
    saved_token,
    say,
    settle,
    wait_until_ready,
)

QUICK = True
ROUNDS = 3
MLFLOW = "mlflow==3.17.2"


@dataclass(frozen=True)
class Server:
    """The command of a server in a folder on a port, and the request to send."""

    name: str
    command: Callable[[Path, int], list[str | Path]]
    ready: str
    request: str
    variables: Callable[[Path], Mapping[str, str]]
    headers: Callable[[Path], Mapping[str, str]] = lambda home: {}


@dataclass(frozen=True)
class Cost:
    ready_s: float
    cpu_s: float
    pss_mb: float
    processes: int


def main() -> None:
    falaj, default, lean = servers()
    costs: dict[str, list[Cost]] = {server.name: [] for server in (falaj, default, lean)}
    say("warming up: bytecode and page cache")
    for server in (falaj, lean):
        measure(server)
    for number in range(1, ROUNDS + 1):
        for server in (falaj, default, lean):
            cost = measure(server)
            costs[server.name].append(cost)
            say(f"round {number}  {server.name}: {shown(cost)}")
    ours = costs[falaj.name]
    beside = [compare(ours, costs[peer.name], peer.name) for peer in (default, lean)]
    report("startup", [result for results in beside for result in results])


def servers() -> tuple[Server, Server, Server]:
    program = Path(sys.executable).with_name("falaj")
    mlflow = peer_venv("mlflow", [MLFLOW]).with_name("mlflow")
    falaj = Server(
        "falaj up",
        command=lambda home, port: [program, "--home", home / "home", "up", "--port", str(port)],
        ready="/readyz",
        request="/api/v1/workspaces/list",
        variables=lambda home: {"FALAJ_HOME": str(home / "home"), "FALAJ_CONFIG_DIR": str(home / "config")},
        headers=lambda home: {"Authorization": f"Bearer {saved_token(home / 'config')}"},
    )
    default = Server(
        "mlflow server",
        command=lambda home, port: [mlflow, "server", "--port", str(port)],
        ready="/health",
        request="/api/2.0/mlflow/experiments/search?max_results=10",
        variables=lambda home: {"HOME": str(home)},
    )
    lean = Server(
        "mlflow server, one worker, no jobs",
        command=lambda home, port: [*default.command(home, port), "--workers", "1"],
        ready=default.ready,
        request=default.request,
        variables=lambda home: {"HOME": str(home), "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
    )
    return falaj, default, lean


def measure(server: Server) -> Cost:
    """Start `server` in an empty folder, send one request, wait until it is idle, and read its usage."""
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory(prefix="startup-") as folder:
        home = Path(folder)
        started = time.monotonic()
        with running(server.command(home, port), cwd=home, env=environment(**server.variables(home))) as pid:
            wait_until_ready(address + server.ready, pid=pid)
            ready_s = time.monotonic() - started
            if (status := get(address + server.request, headers=server.headers(home))) != 200:
                raise RuntimeError(f"{server.name} answered {server.request} with {status}")
            settle(pid)
            return Cost(ready_s, cpu_seconds(pid), pss_mb(pid), len(process_tree(pid)))


def compare(ours: list[Cost], theirs: list[Cost], peer: str) -> list[Result]:
    def both(figure: Callable[[Cost], float]) -> tuple[float, float]:
        return median(map(figure, ours)), median(map(figure, theirs))

    return [
        Result(f"CPU s to be up, beside {peer}", *both(lambda cost: cost.cpu_s), goal=0.4),
        Result(f"MB (PSS) when up, beside {peer}", *both(lambda cost: cost.pss_mb), goal=0.5),
    ]


def shown(cost: Cost) -> str:
    return f"ready after {cost.ready_s:.1f} s, {cost.cpu_s:.1f} CPU s, {cost.pss_mb:.0f} MB, {cost.processes} processes"


if __name__ == "__main__":
    main()
