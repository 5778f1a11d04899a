"""An import that is killed at any moment continues, and copies nothing twice."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import falaj as fj
import killed_import
from command_line import environment
from foreign_runs import MlflowFixture

RUNS, POINTS = 40, 400
WRITES = (2, 3, 5, 8, 13, 21, 34)
"""How many writes each attempt begins before it is killed."""


@pytest.mark.slow
def test_an_import_that_is_killed_copies_everything_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FALAJ_CONFIG_DIR", str(tmp_path / "config"))
    fj.open(tmp_path / "home").close()
    source = made(tmp_path / "mlflow")

    *killed, said, status = attempts(tmp_path, source, *WRITES, 1_000_000)

    with fj.open(tmp_path / "home") as platform:
        runs = platform.runs.list(view="all", show=("params", "metrics"), limit=1000).items
        details = [platform.runs.show(run.id) for run in runs]
        verdict = platform.verify_audit(deep=True)
    assert (killed, status) == (["-9"] * len(WRITES), "0")
    report = json.loads(said)
    assert report["complete"], report
    assert 0 < report["new_runs"] < RUNS - len(WRITES)
    assert sorted(run.name for run in runs) == sorted(f"r{number}" for number in range(RUNS))
    assert {metric.points for run in runs for metric in run.metrics} == {POINTS // 2}
    assert {each.artifacts[0].size_bytes for each in details} == {200_000}
    assert sum(run.parent is not None for run in runs) == RUNS // 2
    assert sum(run.deleted_at is not None for run in runs) == RUNS // 10
    assert {run.status for run in runs} == {"finished"}
    assert verdict.ok, verdict.problems


def made(folder: Path) -> MlflowFixture:
    """Return a database whose runs are nested in pairs, each with points and a file; some are deleted."""
    source = MlflowFixture(folder).create()
    source.experiment(1, "churn")
    for number in range(RUNS):
        source.run(
            f"r{number}",
            params={"lr": "0.1"},
            tags={"mlflow.parentRunId": f"r{number + 1}"} if number % 2 == 0 else {},
            points=[(f"m{at % 2}", float(at), at, at) for at in range(POINTS)],
            stage="deleted" if number % 10 == 5 else "active",
            files={"weights.bin": bytes([number]) * 200_000},
        )
    return source


def attempts(folder: Path, source: MlflowFixture, *writes: int) -> list[str]:
    """Return the lines of the process that imports: the exit code of each attempt, after what it said."""
    command = [sys.executable, killed_import.__file__, str(folder / "home"), str(source.path)]
    ran = subprocess.run(
        [*command, *map(str, writes)],
        env=environment(folder),
        stdout=subprocess.PIPE,
        text=True,
        timeout=480,
        check=True,
    )
    return ran.stdout.splitlines()
