"""Point-in-time join against Feast's duckdb store, on the same rows.

Two views (1M and 500k rows), 100k spine rows, ttl 30 days; both exclude rows created after the spine row's time. Each
side runs in its own process, from stored tables to Arrow in memory; CPU seconds are those of the call. Feast's cost
grows with the rows per entity, so both a dense (90) and a sparse (20) history are measured.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from statistics import median

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq

from harness import HERE, Result, Rule, environment, peer_venv, report, say

QUICK = False
FEAST = "feast[duckdb]==0.67.0"
ROUNDS = 3
SPINE_ROWS = 100_000
VIEWS = {"trips": 1_000_000, "fares": 500_000}
FEATURES = [f"f{number}" for number in range(5)]
SHAPES = {"90 rows per entity": 11_111, "20 rows per entity": 50_000}
"""Number of entities by the resulting rows per entity of the larger view."""
TTL = timedelta(days=30)
SPAN_US = 90 * 86_400_000_000
START_US = 1_700_000_000_000_000
MOMENT = pa.timestamp("us", "UTC")


def main() -> None:
    results = []
    for shape, entities in SHAPES.items():
        with tempfile.TemporaryDirectory(prefix="features-join-") as folder:
            results += measure(Path(folder), shape, entities)
    report("features_join", results)


def measure(folder: Path, shape: str, entities: int) -> list[Result]:
    write_rows(folder, entities)
    sides = {
        "falaj": [sys.executable, __file__, str(folder)],
        "feast": [str(peer_venv("feast", [FEAST])), str(HERE / "peers" / "feast_join.py"), str(folder)],
    }
    spent: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    for number in range(ROUNDS):
        for side, command in sides.items():
            spent[side].append(run(command))
            say(f"{shape}, round {number}  {side} {spent[side][-1]}")
    check(folder)
    seconds = {side: median(each["cpu_s"] for each in rounds) for side, rounds in spent.items()}
    sizes = {side: max(each["peak_mb"] for each in rounds) for side, rounds in spent.items()}
    rate, size = f"joins per CPU s, {shape}", f"peak RSS in MB, {shape}"
    return [
        Result(rate, 1 / seconds["falaj"], 1 / seconds["feast"], 1.5, Rule.RATIO_AT_LEAST),
        Result(size, sizes["falaj"], sizes["feast"], 1.0, Rule.RATIO_AT_MOST),
    ]


def write_rows(folder: Path, entities: int) -> None:
    """Write the same rows for both: Parquet for Feast, Delta tables for Falaj."""
    from falaj.drivers.deltalake.tables import DeltaTables
    from falaj.features.joins import ARRIVAL
    from falaj.ports.tables import TableKey

    for seed, (name, count) in enumerate(VIEWS.items()):
        rows = view_rows(count, entities, seed=seed)
        pq.write_table(rows, folder / f"{name}.parquet")
        numbered = rows.append_column(ARRIVAL, pa.array(np.arange(count)))
        DeltaTables(folder).overwrite(TableKey(name), numbered)
    random = np.random.default_rng(99)
    spine = {
        "driver": random.integers(0, entities * 11 // 10, SPINE_ROWS),  # some are in no view
        "event_timestamp": pa.array(START_US + random.integers(0, SPAN_US, SPINE_ROWS), MOMENT),
        "number": np.arange(SPINE_ROWS),
    }
    pq.write_table(pa.table(spine), folder / "spine.parquet")


def view_rows(count: int, entities: int, *, seed: int) -> pa.Table:
    random = np.random.default_rng(seed)
    event = START_US + random.integers(0, SPAN_US, count)
    created = event + random.integers(0, 86_400_000_000, count)
    return pa.table(
        {
            "driver": random.integers(0, entities, count),
            "event_timestamp": pa.array(event, MOMENT),
            "created": pa.array(created, MOMENT),
            **{feature: random.random(count) for feature in FEATURES},
        }
    )


def run(command: list[str]) -> dict[str, float]:
    done = subprocess.run(command, env=environment(), stdout=subprocess.PIPE, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def join_with_falaj(folder: Path) -> None:
    """Run Falaj in its own process."""
    from falaj.drivers.deltalake.tables import DeltaTables
    from falaj.drivers.duckdb.queries import BUDGET_BYTES, DuckDbQueryEngine
    from falaj.features.arrow_tables import in_memory_if_small
    from falaj.features.joins import ROW, JoinedView, join
    from falaj.ports.machine.memory import MemoryBudget
    from falaj.ports.tables import TableKey

    tables, queries = DeltaTables(folder), DuckDbQueryEngine(spill=folder / "spill")
    views = [
        JoinedView(
            rows=name,
            keys=("driver",),
            event_time="event_timestamp",
            created_time="created",
            ttl=TTL,
            features={feature: f"{name}__{feature}" for feature in FEATURES},
        )
        for name in VIEWS
    ]

    versions = {name: tables.file_hashes(TableKey(name), version=0) for name in VIEWS}

    def work() -> pa.Table:
        spine = pq.read_table(folder / "spine.parquet")
        numbered = spine.append_column(ROW, pa.array(np.arange(spine.num_rows)))
        with MemoryBudget(BUDGET_BYTES).lease() as memory:
            stored = {
                name: in_memory_if_small(tables.read(TableKey(name), version=versions[name]), memory=memory)
                for name in VIEWS
            }
        inputs = {"spine": numbered, **stored}
        return join(queries, inputs, spine.column_names, event_time="event_timestamp", views=views)

    found, cost = measured(work)
    pq.write_table(found, folder / "falaj.result.parquet")
    print(json.dumps(cost))


def measured(work: Callable[[], pa.Table]) -> tuple[pa.Table, dict[str, float]]:
    before, started = cpu_seconds(), time.perf_counter()
    found = work()
    cost = {"cpu_s": cpu_seconds() - before, "wall_s": time.perf_counter() - started}
    return found, cost | {"peak_mb": peak_mb()}


def peak_mb() -> float:
    """Return the peak memory of this process; ru_maxrss would begin with that of its parent."""
    (line,) = [
        each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith("VmHWM")
    ]
    return int(line.split()[1]) / 1024


def cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def check(folder: Path) -> None:
    """Check that both found the same values for every row of the spine."""
    spine = pq.read_table(folder / "spine.parquet")
    ours = pq.read_table(folder / "falaj.result.parquet")
    theirs = pq.read_table(folder / "feast.result.parquet").sort_by("number")
    if not ours.select(spine.column_names).equals(spine):
        raise RuntimeError("rows of the spine were lost or moved")
    say(f"rows kept of {SPINE_ROWS}: falaj {ours.num_rows}, feast {theirs.num_rows}")
    for name in (f"{view}__{feature}" for view in VIEWS for feature in FEATURES):
        mine, other = ours[name].combine_chunks(), theirs[name].combine_chunks().cast(pa.float64())
        say(f"{name}: {mine.null_count} nulls; the same in all rows: {mine.equals(other)}")
        if not mine.equals(other):
            raise RuntimeError(f"{name} differs")


if __name__ == "__main__":
    join_with_falaj(Path(sys.argv[1])) if len(sys.argv) > 1 else main()
