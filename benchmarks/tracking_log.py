"""One series of a million points: logged in batches of 10,000, downsampled to 1,000 for a plot, and read in full.

In one process on SQLite; CPU time, since that is what a busy machine has to share. What it is measured against is the
limit, not a peer. Then the client of MLflow logs to a server of MLflow and to Falaj in turns: batches of 1,000 points,
and single points.
"""

from __future__ import annotations

import math
import tempfile
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import falaj as fj
from falaj.records.tracking import BATCH_POINTS, MetricPoint
from falaj.sdk.platform import Platform
from harness import Result, Rule, report, say
from tracking_peer import falaj_server, in_turns, mlflow_server

QUICK = True
POINTS = 1_000_000
SHOWN = 1_000
ROUNDS = 5
CURVE_MS, READ_MS = 100.0, 1_000.0
TURNS, SECONDS = 5, 1.5


def main() -> None:
    with (
        tempfile.TemporaryDirectory(prefix="tracking-log-") as folder,
        fj.open(Path(folder) / "home") as platform,
    ):
        run = platform.runs.start("bench").id
        began = time.process_time()
        log_points(platform, run)
        say(f"{POINTS / (time.process_time() - began):,.0f} points logged per CPU second, with making them")
        curve = min(curve_ms(platform, run) for _ in range(ROUNDS))
        whole = min(read_ms(platform, run) for _ in range(ROUNDS))
    report(
        "tracking_log",
        [
            Result(
                f"CPU ms, {POINTS:,} points downsampled to {SHOWN:,}",
                curve,
                CURVE_MS,
                goal=CURVE_MS,
                rule=Rule.FALAJ_AT_MOST,
            ),
            Result(
                f"CPU ms, {POINTS:,} points read in full",
                whole,
                READ_MS,
                goal=READ_MS,
                rule=Rule.FALAJ_AT_MOST,
            ),
            *by_the_client_of_mlflow(),
        ],
    )


def by_the_client_of_mlflow() -> list[Result]:
    with (
        tempfile.TemporaryDirectory(prefix="tracking-log-") as name,
        falaj_server(Path(name) / "home", Path(name) / "config") as ours,
        mlflow_server(Path(name) / "mlflow") as theirs,
    ):
        works = ("batch", "single")
        found = in_turns([ours, theirs], works, rounds=TURNS, seconds=SECONDS, folder=Path(name))
    batch, single = (found[work] for work in works)
    return [
        Result(f"{what} by the client of MLflow", *rates, goal=goal, rule=Rule.RATIO_AT_LEAST)
        for what, rates, goal in (
            (
                "points per CPU second of the server, log_batch of 1,000",
                [each.per_cpu_s for each in batch],
                10,
            ),
            ("points/s, log_batch of 1,000", [each.per_s for each in batch], 5),
            ("log_metric per CPU second of the server,", [each.per_cpu_s for each in single], 5),
            ("log_metric per second of waiting for the server,", [each.per_waited_s for each in single], 5),
            ("log_metric/s", [each.per_s for each in single], 5),
        )
    ]


def log_points(platform: Platform, run: str) -> None:
    start = datetime.now(UTC)
    for first in range(0, POINTS, BATCH_POINTS):
        points = tuple(
            MetricPoint(
                key="loss",
                value=math.sin(step / 1000),
                step=step,
                timestamp=start + timedelta(milliseconds=step),
            )
            for step in range(first, first + BATCH_POINTS)
        )
        platform.runs.log_metrics(run, points)


def curve_ms(platform: Platform, run: str) -> float:
    began = time.process_time()
    (curve,) = platform.runs.curves(run, ("loss",), points=SHOWN)
    taken = time.process_time() - began
    if curve.total != POINTS or len(curve.points) > SHOWN:
        raise RuntimeError(f"{len(curve.points)} of {curve.total} points")
    return 1000 * taken


def read_ms(platform: Platform, run: str) -> float:
    began = time.process_time()
    rows = platform.runs.metrics(run, "loss").read_all().num_rows  # type: ignore[attr-defined]
    taken = time.process_time() - began
    if rows != POINTS:
        raise RuntimeError(f"{rows} points")
    return 1000 * taken


if __name__ == "__main__":
    main()
