"""Requests per second of several model server processes on one port, against one; the client shares the machine.

    python benchmarks/serving_scaling.py [--processes 1,2,4]

Model A of `serving_rest`, by REST JSON with 64 connections from wrk, with everything switched on: token, validation,
metrics, prediction log and sketches. wrk has as many threads as there are processes. On two cores the client and the
log take part of what the second process would need.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from harness import Result, Rule, cpu_seconds, report, say
from serving_rest import SECONDS, WARM_UP_S, WIDTHS, Server, falaj_serving, save_mlp, wrk

GOAL = 1.2
ROUNDS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", default="1,2", help="numbers of processes; the first is compared with")
    counts = [int(each) for each in parser.parse_args().processes.split(",")]
    if shutil.which("wrk") is None:
        sys.exit("wrk is missing; apt-get install wrk")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as servers:
        model = save_mlp(Path(folder) / "a.onnx", WIDTHS)
        started = {
            count: servers.enter_context(falaj_serving(Path(folder) / str(count), model, processes=count))
            for count in counts
        }
        rates: dict[int, list[float]] = {count: [] for count in counts}
        for _ in range(ROUNDS):
            for count, server in started.items():
                rates[count].append(rate(server, count))
    one = median(rates[counts[0]])
    report(
        "serving_scaling",
        [
            Result(
                f"requests/s at c=64, {count} processes against {counts[0]}, {len(os.sched_getaffinity(0))} cores",
                median(rates[count]),
                one,
                GOAL,
                Rule.RATIO_AT_LEAST,
            )
            for count in counts[1:]
        ],
    )


def rate(server: Server, processes: int) -> float:
    before = cpu_seconds(server[1])
    found = wrk(*server, threads=processes)
    spent = (cpu_seconds(server[1]) - before) * 1e6 / (found * (SECONDS + WARM_UP_S))
    say(
        f"{processes} processes: {found:,.0f} requests/s, {spent:.1f} µs CPU a request in them and their children"
    )
    return found


if __name__ == "__main__":
    main()
