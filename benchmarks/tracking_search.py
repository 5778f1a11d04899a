"""Searches over 10,000 and 100,000 runs with 12,000 distinct metrics and 10 million points, on SQLite.

The goals are limits in milliseconds of CPU time of one call, in one process; of searches, a page of 100 runs. What they
are measured against is the limit, not a peer. In the large home a run is logged to and plotted as well: that must not
cost more than in an empty one. Then the client of MLflow searches 10,000 runs by a metric on a server of MLflow and on
Falaj, in turns; to read an answer of 100 runs takes that client longer than Falaj takes to make it.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import falaj as fj
from falaj.records.tracking import MetricPoint
from falaj.sdk.platform import Platform
from harness import Result, Rule, report, say
from tracking_data import POINTS_PER_METRIC, fill, series_of
from tracking_peer import falaj_server, in_turns, mlflow_server

QUICK = True
ROUNDS = 5
TURNS, SECONDS = 5, 1.5
PEER_RUNS = 10_000
BATCH, KEYS = 1_000, 10
SEARCHES: dict[str, dict[str, Any]] = {
    "the newest": {},
    "the newest with parameters, tags and metrics": {"show": ("params", "tags", "metrics")},
    "metrics.auc > 0.9": {"where": "metrics.auc > 0.9"},
    "metrics.auc > 2, which none has": {"where": "metrics.auc > 2"},
    "one of 12,000 metrics": {"where": "metrics.metric-77 > 0.5"},
    "metric, parameter and tag": {
        "where": "metrics.auc > 0.9 and params.lr = '0.1' and tags.team LIKE 'ri%'"
    },
    "sorted by a metric": {"order_by": ("metrics.auc DESC",)},
}
SIZES = {10_000: 100.0, 100_000: 500.0}
"""The limit in milliseconds by the number of runs."""
SLOWER = 1.5
"""How many times the CPU time of an empty home a batch may take in the large one."""


def main() -> None:
    results = []
    with tempfile.TemporaryDirectory(prefix="tracking-search-") as folder:
        empty = Path(folder) / "empty"
        os.environ["FALAJ_CONFIG_DIR"] = str(empty / "config")
        with fj.open(empty / "home") as platform:
            alone = milliseconds(batches(platform))
        for size, limit in SIZES.items():
            place = Path(folder) / str(size)
            began = time.perf_counter()
            fill(place / "home", place / "config", runs=size)
            say(f"{size:,} runs written in {time.perf_counter() - began:.0f} s")
            os.environ["FALAJ_CONFIG_DIR"] = str(place / "config")
            with fj.open(place / "home") as platform:
                for name, given in SEARCHES.items():
                    taken = milliseconds(search(platform, given))
                    what = f"CPU ms, {size:,} runs: {name}"
                    results.append(Result(what, taken, limit, goal=limit, rule=Rule.FALAJ_AT_MOST))
                results += in_a_full_home(platform, size, alone=alone)
    report("tracking_search", [*results, *by_the_client_of_mlflow()])


def in_a_full_home(platform: Platform, runs: int, *, alone: float) -> list[Result]:
    """Return the cost of logging and of a plot in a home of so many runs."""
    points = series_of(runs) * POINTS_PER_METRIC
    batch = (
        f"CPU ms, {BATCH:,} points logged beside {runs:,} runs and {points:,} points, and in an empty home"
    )
    newest = platform.runs.list(experiments=("bench",), limit=1, show=("metrics",)).items[0]
    keys = tuple(each.key for each in newest.metrics)
    plot = milliseconds(lambda: platform.runs.curves(newest.id, keys, points=1_000))
    return [
        Result(batch, milliseconds(batches(platform)), alone, goal=SLOWER, rule=Rule.RATIO_AT_MOST),
        Result(f"CPU ms, curves of a run among {runs:,}", plot, 20.0, goal=20.0, rule=Rule.FALAJ_AT_MOST),
    ]


def by_the_client_of_mlflow() -> list[Result]:
    with tempfile.TemporaryDirectory(prefix="tracking-search-") as name:
        folder = Path(name)
        experiment = fill(folder / "home", folder / "config", runs=PEER_RUNS)
        with (
            falaj_server(folder / "home", folder / "config", experiment=experiment) as ours,
            mlflow_server(folder / "mlflow", runs=PEER_RUNS) as theirs,
        ):
            found = in_turns([ours, theirs], ["search"], rounds=TURNS, seconds=SECONDS, folder=folder)
    both, what = found["search"], f"{PEER_RUNS:,} runs, metrics.auc > 0.9, a page of 100"
    return [
        Result(f"searches {per}, {what}", *rates, goal=5, rule=Rule.RATIO_AT_LEAST)
        for per, rates in (
            ("by the client of MLflow per CPU second of the server", [each.per_cpu_s for each in both]),
            ("by the client of MLflow per second of waiting", [each.per_waited_s for each in both]),
            ("by the client of MLflow per second, with its own work", [each.per_s for each in both]),
        )
    ]


def search(platform: Platform, given: dict[str, Any]) -> Callable[[], object]:
    return lambda: platform.runs.list(experiments=("bench",), **given)


def batches(platform: Platform) -> Callable[[], object]:
    """Return what logs the next batch of points, which are made already, to a new run."""
    run, start = platform.runs.start("logged").id, datetime.now(UTC)
    made = [
        tuple(
            MetricPoint(
                key=f"metric-{step % KEYS}",
                value=step * 0.001,
                step=step,
                timestamp=start + timedelta(milliseconds=step),
            )
            for step in range(first, first + BATCH)
        )
        for first in range(0, ROUNDS * BATCH, BATCH)
    ]
    return lambda: platform.runs.log_metrics(run, made.pop(0))


def milliseconds(work: Callable[[], object]) -> float:
    """Return the least CPU time of `work`."""
    taken = []
    for _ in range(ROUNDS):
        began = time.process_time()
        work()
        taken.append(time.process_time() - began)
    return 1000 * min(taken)


if __name__ == "__main__":
    main()
