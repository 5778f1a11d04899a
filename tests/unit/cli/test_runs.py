"""`falaj runs`: lists with metric columns, comparisons, tags, the best run, and deleted ones."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

import falaj as fj
from command_line import CommandLine, command_line, make_template
from falaj.apps.cli.commands.runs_compare import sparkline
from falaj.records.tracking import MetricPoint


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    make_template(folder)
    return folder


@pytest.fixture
def falaj(home: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[CommandLine]:
    with command_line(home, capsys) as line:
        with fj.open(line.home) as platform:
            if not platform.runs.list().items:
                for name, lr in (("a", 0.1), ("b", 0.2)):
                    with platform.run("churn", name=name, params={"lr": lr, "seed": 1}) as run:
                        points = [MetricPoint(key="loss", value=math.exp(-n * lr), step=n) for n in range(50)]
                        platform.runs.log_metrics(run.id, points)
                        run.log(auc=lr)
                platform.runs.end(platform.runs.start("other", name="c").id)
        yield line


def refused(falaj: CommandLine, *arguments: str, status: int) -> str:
    """Return what a command says that must fail with a status."""
    ran = falaj(*arguments)
    assert ran.status == status
    return ran.err


def test_runs_of_all_experiments_are_listed_with_metrics_as_columns(falaj: CommandLine) -> None:
    shown = falaj.done("runs", "list", "--metrics", "auc,loss", "--sort", "-auc").out.splitlines()
    chosen = falaj.json("runs", "list", "churn", "--filter", "metrics.auc > 0.1 and params.seed = '1'")

    assert shown[0].split()[:5] == ["id", "name", "status", "auc", "loss"]
    assert [line.split()[1] for line in shown[1:]] == ["b", "a", "c"]
    assert [line.split()[3] for line in shown[1:]] == ["0.2", "0.1", "-"]
    assert [run["name"] for run in chosen["items"]] == ["b"]
    assert "position 11" in refused(falaj, "runs", "list", "--filter", "metrics.a ~ 1", status=2)


def test_runs_are_compared(falaj: CommandLine) -> None:
    shown = falaj.done("runs", "compare", "a", "b").out
    found = falaj.json("runs", "compare", "a", "b", "--metrics", "loss")

    rows = [line.split() for line in shown.splitlines()]
    assert ["lr", "0.1", "0.2"] in rows
    assert not any(row[:1] == ["seed"] for row in rows)
    assert ["auc", "0.1", "0.2"] in rows
    assert any(row[0] == "loss" and len(row) == 3 and len(row[1]) == 24 for row in rows if row)
    assert list(found["params"]) == ["lr"]
    assert {curve["key"] for curve in found["curves"]} == {"loss"}
    assert "2 to 20" in refused(falaj, "runs", "compare", "a", status=2)


def test_the_best_run_is_found(falaj: CommandLine) -> None:
    assert falaj.json("runs", "best", "churn", "--metric", "auc")["run"]["name"] == "b"
    assert falaj.json("runs", "best", "churn", "--metric", "auc", "--min")["run"]["name"] == "a"
    assert "no run of churn" in refused(falaj, "runs", "best", "churn", "--metric", "nothing", status=1)


def test_a_run_is_tagged_deleted_and_restored(falaj: CommandLine) -> None:
    falaj.done("runs", "tag", "a", "team=risk", "note=a=b")
    tagged = falaj.json("runs", "tag", "a", "--delete", "note")
    deleted = falaj.json("runs", "delete", tagged["run"]["id"], "--yes")

    assert tagged["tags"] == [{"key": "team", "value": "risk"}]
    assert [run["name"] for run in falaj.json("runs", "list", "--deleted")["items"]] == ["a"]
    falaj.done("runs", "restore", deleted["id"])
    assert len(falaj.json("runs", "list", "churn")["items"]) == 2
    assert "team=risk" in refused(falaj, "runs", "tag", "a", "team", status=2)


def test_a_sparkline_shows_peaks_gaps_and_flat_lines() -> None:
    assert sparkline([0, 0, 1, 0], low=0, high=1) == "▁▁█▁"
    assert sparkline([0, math.nan, math.inf, -math.inf], low=0, high=1) == "▁ █▁"
    assert sparkline([2, 2], low=2, high=2) == "▅▅"
    assert "█" in sparkline([0.0] * 500 + [1.0] + [0.0] * 500, low=0, high=1)
    assert sparkline([], low=0, high=1) == "-"
