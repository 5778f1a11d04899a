"""Homes full of runs for the benchmarks of tracking: written to the database directly, as the platform would."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from falaj.assembly.home import open_home
from falaj.assembly.platform import assemble
from falaj.governance import objects
from falaj.ports.metadata import Database, encode_json, to_micros
from falaj.records.governance.residency import UNRESTRICTED
from falaj.records.names import ROOT, new_id

DISTINCT_METRICS = 12_000
METRICS_PER_RUN = 5
POINTS_PER_METRIC = 20
SLICE = 5_000
_LABEL = encode_json(UNRESTRICTED.model_dump(mode="json"))


def fill(home: Path, config: Path, *, runs: int) -> str:
    """Make a home with so many runs of the experiment `bench`, and return the id of the experiment.

    Every run has the metric `auc`, four of the 12,000 others, 20 points of each, five parameters and two tags.
    """
    platform = assemble(open_home(home, config), as_owner=True)
    try:
        first = platform.services.runs.start("bench")
        with platform.database.read() as tx:
            workspace = objects.resolve(tx, "default", kind="workspace", workspace=ROOT)
        for start in range(0, runs, SLICE):
            count = min(SLICE, runs - start)
            _insert(platform.database, _runs(start, count, first.experiment, workspace.id, first.owner))
        return str(first.experiment)
    finally:
        platform.close()


def series_of(runs: int) -> int:
    """Return how many series so many runs have."""
    return runs * METRICS_PER_RUN


def _insert(database: Database, tables: dict[str, tuple[tuple[str, ...], list[tuple[Any, ...]]]]) -> None:
    with database.write() as tx:
        for table, (columns, rows) in tables.items():
            tx.bulk_insert(table, [f'"{name}"' for name in columns], rows)


def _runs(
    start: int, count: int, experiment: str, workspace: str, owner: str
) -> dict[str, tuple[tuple[str, ...], list[tuple[Any, ...]]]]:
    rng = random.Random(start)
    made: dict[str, list[tuple[Any, ...]]] = {name: [] for name in COLUMNS}
    began = datetime(2026, 1, 1, tzinfo=UTC)
    for number in range(start, start + count):
        ident, at = new_id("run"), to_micros(began + timedelta(seconds=number))
        made["governance_objects"].append((ident, workspace, "run", ident, owner, _LABEL, _LABEL, at))
        status = rng.choice(("finished", "finished", "failed", "running"))
        made["tracking_runs"].append((ident, experiment, f"run-{number}", status, at + 10**7, at))
        made["tracking_params"] += [
            (ident, "lr", rng.choice(("0.1", "0.01", "0.001"))),
            (ident, "depth", str(rng.randrange(12))),
            *((ident, f"p{n}", str(rng.random())) for n in range(3)),
        ]
        made["tracking_tags"] += [(ident, "team", rng.choice(("risk", "fraud"))), (ident, "n", str(number))]
        for series, key in enumerate(_keys(rng)):
            row, block = _series(rng, number * METRICS_PER_RUN + series + 1, ident, key, at)
            made["tracking_series"].append(row)
            made["tracking_blocks"].append(block)
    return {name: (COLUMNS[name], rows) for name, rows in made.items()}


def _keys(rng: random.Random) -> Iterator[str]:
    yield "auc"
    for number in rng.sample(range(DISTINCT_METRICS - 1), METRICS_PER_RUN - 1):
        yield f"metric-{number}"


def _series(
    rng: random.Random, ident: int, run: str, key: str, at: int
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    size = POINTS_PER_METRIC
    values = [rng.random() for _ in range(size)]
    steps, moments = range(size), [at + step for step in range(size)]
    data = struct.pack(f"<{2 * size}q{size}d", *steps, *moments, *values)
    last = (size - 1, moments[-1])
    summary = (ident, run, key, size, values[-1], *last, min(values), max(values), 1, 0, size)
    return summary, (ident, 0, 0, at, *last, data)


COLUMNS = {
    "governance_objects": ("id", "workspace", "kind", "name", "owner", "label", "own_label", "created_at"),
    "tracking_runs": ("id", "experiment", "name", "status", "ended_at", "started_at"),
    "tracking_params": ("run", "key", "value"),
    "tracking_tags": ("run", "key", "value"),
    "tracking_series": (
        *("id", "run", "key", "points", "last", "last_step", "last_at", "low", "high"),
        *("blocks", "open_from", "open_points"),
    ),
    "tracking_blocks": ("series", "number", "first_step", "first_at", "last_step", "last_at", "data"),
}
