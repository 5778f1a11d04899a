"""Drift detection against Evidently's default preset: time per window, and false alarms without drift.

Evidently's time includes the summary statistics of its preset. It picks its method by the size of the reference: KS at
0.05 per column up to 1,000 rows, Wasserstein beyond.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from falaj.monitoring.drift.verdicts import detect_drift
from falaj.monitoring.sketches.sketchers import WindowSketcher, sketch_reference
from falaj.records.monitoring.sketches import ColumnKind, WindowSketch
from harness import Result, environment, peer_venv, report, say

QUICK = True
PEER = ["evidently==0.7.23", "pandas<3"]
COLUMNS = [f"x{number}" for number in range(10)]
REFERENCE_ROWS = {"small": 1_000, "large": 20_000}
WINDOW_ROWS = 500
WINDOWS = 5
NOON = datetime(2013, 7, 1, 12, tzinfo=UTC)

Floats = npt.NDArray[np.float64]
Looks = dict[str, dict[str, float]]

EVIDENTLY = """
import json, sys, time
import numpy as np, pandas as pd
from evidently import Report
from evidently.presets import DataDriftPreset

data, looks = np.load(sys.argv[1]), {}
for size in ("small", "large"):
    names = [f"x{number}" for number in range(data[size].shape[1])]
    frame = lambda rows: pd.DataFrame(rows, columns=names)
    reference, alarms, times = frame(data[size]), 0, []
    for rows in data["windows"]:
        began = time.perf_counter()
        found = Report([DataDriftPreset()]).run(frame(rows), reference).dict()["metrics"]
        times.append(time.perf_counter() - began)
        alarms += int(found[0]["value"]["count"])
    looks[size] = {"ms": float(np.median(times)) * 1e3, "alarms": alarms}
print(json.dumps(looks))
"""


def main() -> None:
    rng = np.random.default_rng(2013)
    data = {size: rng.normal(size=(rows, len(COLUMNS))) for size, rows in REFERENCE_ROWS.items()}
    data["windows"] = rng.normal(size=(WINDOWS, WINDOW_ROWS, len(COLUMNS)))
    theirs, ours = evidently(data), falaj(data)
    say(f"columns called drifted, none is: falaj {alarms(ours)}, evidently {alarms(theirs)}")
    results = [
        Result(f"a look, {size} reference, ms", ours[size]["ms"], theirs[size]["ms"], 0.1) for size in ours
    ]
    every = WINDOWS * len(COLUMNS)
    for size in ours:
        if theirs[size]["alarms"]:  # no ratio to a peer without false alarms
            what = f"columns of {every} falsely called drifted, {size} reference"
            results.append(Result(what, ours[size]["alarms"], theirs[size]["alarms"], 0.2))
    report("drift", results)


def alarms(looks: Looks) -> str:
    return " and ".join(f"{look['alarms']:g} ({size} reference)" for size, look in looks.items())


def falaj(data: dict[str, Floats]) -> Looks:
    """Sketch each window and detect drift with the default budget; the time covers both."""
    looks: Looks = {}
    for size in REFERENCE_ROWS:
        pinned = sketch_reference("calm@1", [named(data[size])])
        found, times = 0, []
        for rows in data["windows"]:
            began = time.perf_counter()
            found += len(detect_drift(pinned, sketched(rows)).drifted)
            times.append(time.perf_counter() - began)
        looks[size] = {"ms": float(np.median(times)) * 1e3, "alarms": found}
    return looks


def sketched(rows: Floats) -> WindowSketch:
    sketcher = WindowSketcher("calm@1", features=dict.fromkeys(COLUMNS, ColumnKind.NUMERIC))
    sketcher.update(named(rows))
    return sketcher.cut(since=NOON, until=NOON + timedelta(hours=1))


def named(rows: Floats) -> dict[str, Floats]:
    return dict(zip(COLUMNS, rows.T, strict=True))


def evidently(data: dict[str, Floats]) -> Looks:
    python = peer_venv("evidently", PEER)
    with tempfile.TemporaryDirectory() as folder:
        arrays: dict[str, Any] = data
        np.savez(Path(folder) / "data.npz", **arrays)
        command = [python, "-W", "ignore", "-c", EVIDENTLY, "data.npz"]
        done = subprocess.run(
            command, cwd=folder, env=environment(), check=True, stdout=subprocess.PIPE, text=True
        )
    looks: Looks = json.loads(done.stdout.splitlines()[-1])
    return looks


if __name__ == "__main__":
    main()
