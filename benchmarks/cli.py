"""CPU seconds of `falaj --help`, against `mlflow --help`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from statistics import median

from harness import Result, Rule, environment, peer_venv, report

QUICK = True
ROUNDS = 10
MLFLOW = "mlflow==3.17.2"


def main() -> None:
    falaj = Path(sys.executable).with_name("falaj")
    mlflow = peer_venv("mlflow", [MLFLOW]).with_name("mlflow")
    ours, theirs = [], []
    help_cpu_seconds(falaj), help_cpu_seconds(mlflow)  # bytecode and page cache
    for _ in range(ROUNDS):
        ours.append(help_cpu_seconds(falaj))
        theirs.append(help_cpu_seconds(mlflow))
    report(
        "cli", [Result("CPU s of --help", median(ours), median(theirs), goal=0.25, rule=Rule.FALAJ_AT_MOST)]
    )


def help_cpu_seconds(program: Path) -> float:
    """Return user and system time of `program --help`, including its child processes."""
    process = subprocess.Popen([program, "--help"], env=environment(), stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise RuntimeError(f"{program} --help ended with {process.returncode}")
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
