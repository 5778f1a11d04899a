"""`falaj optimization show` and `falaj models optimize`: the Pareto table, the budget in words, and live progress."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import falaj as fj
from falaj.apps.cli.app import run
from falaj.apps.cli.commands.models_optimize import VariantLines
from falaj.apps.cli.commands.optimization import print_table
from falaj.optimization.pareto import pareto_table, recommend
from falaj.optimization.progress import VariantProgress
from falaj.records.names import ObjectId
from falaj.records.optimization import (
    AcceptanceBudget,
    Measurement,
    Optimization,
    OptimizationReport,
    OptimizationVerdict,
    Variant,
)

if TYPE_CHECKING:
    from conftest import OptimizationEnv  # type: ignore[attr-defined]

ORIGINAL = Measurement(
    latency_p50_us=115.69,
    latency_p99_us=300.2,
    rows_per_s_32=225549.4,
    rows_per_s=835671.4,
    best_batch=256,
    memory_bytes=12 << 20,
    cpu_us_per_row=1.2,
    size_bytes=64639,
    loss=0.29576,
    auc=0.96153,
)


def test_the_table_has_the_original_every_variant_and_the_recommendation(
    capsys: pytest.CaptureFixture[str],
) -> None:
    quick = ORIGINAL.model_copy(update={"latency_p50_us": 6.2, "size_bytes": 26728, "rows_per_s": 9e5})
    variants = (
        Variant(
            recipe="onnx",
            verdict=OptimizationVerdict.ACCEPTED,
            reason="faster: a single row 18×",
            measured=quick,
            version="late@2",
        ),
        Variant(
            recipe="int8", verdict=OptimizationVerdict.REFUSED, reason="trees only compare\x1b[31m and add"
        ),
    )
    report = OptimizationReport(
        metric="log_loss",
        rows=1500,
        host="EPYC",
        instruction_set=("avx2", "fma"),
        original=ORIGINAL,
        variants=variants,
    )
    rows = pareto_table(report, model="late@1", prices=None)
    print_table(
        Optimization(
            id=ObjectId("optimization_1"),
            workspace=ObjectId("w"),
            model="late@1",
            data="june",
            target="late",
            features=("f0",),
            budget=AcceptanceBudget(),
            job=ObjectId("job_1"),
            report=report,
            created_at=datetime(2026, 11, 15, tzinfo=UTC),
            table=rows,
            recommendation=recommend(rows, report, prices=None),
        )
    )

    lines = capsys.readouterr().out.splitlines()
    table = [
        line.split()
        for line in lines
        if line.startswith(("original", "onnx ", "int8 ")) and " is " not in line
    ]
    assert "log_loss of late on 1500 rows of june" in lines[1]
    assert table == [
        [
            "original",
            "-",
            "cpu",
            "115.7",
            "835,671",
            "256",
            "63.1",
            "KiB",
            "12",
            "MiB",
            "0.29576",
            "-",
            "late@1",
        ],
        [
            "onnx",
            "accepted",
            "cpu",
            "*",
            "6.2",
            "900,000",
            "256",
            "26.1",
            "KiB",
            "12",
            "MiB",
            "0.29576",
            "-",
            "late@2",
        ],
        ["int8", "refused", *["-"] * 10],
    ]
    assert "onnx is accepted: faster: a single row 18×" in lines
    assert r"int8 is refused: trees only compare\x1b[31m and add" in lines
    assert lines[-1].startswith("recommended  CPU, late@2 (onnx): 900,000 rows/s at batches of 256")


def test_progress_is_read_from_the_log_whatever_else_it_says() -> None:
    seen: list[VariantProgress] = []
    stream = VariantLines(seen.append)
    made = VariantProgress(name="int8", stage="made", size_bytes=7)

    for piece in ("evaluating auc\nvari", made.line()[4:], '\nvariant {"name": 7}\nvariant ', "nonsense\n"):
        stream.write(piece)

    assert seen == [made]


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (["--budget", "auc +0.002"], 'fix      "auc -0.002"'),
        (["--budget", "speed -1"], "one of the metrics"),
        (["--recipe", "int4"], "--recipe"),
        (["--gpus", "7"], "--gpus"),
    ],
    ids=["sign", "metric", "recipe", "gpus"],
)
def test_what_is_typed_wrong_is_refused_before_anything_runs(
    typed: list[str], words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    status = run(["--home", str(tmp_path / "home"), "models", "optimize", "late@1", *typed])

    assert status == 2
    assert words in capsys.readouterr().err


@pytest.mark.slow
def test_optimize_shows_progress_and_prints_the_table(
    tmp_path: Path, populated: Callable[[Any], OptimizationEnv], capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "home"
    with fj.open(home) as platform:
        populated(platform)
    typed = ["models", "optimize", "late@1", "--target", "late", "--budget", "auc -0.01"]

    status = run(["--home", str(home), *typed, "--recipe", "onnx", "--recipe", "fp16", "--json"])

    printed = capsys.readouterr()
    assert status == 0, printed.err
    assert "onnx accepted: " in printed.err, printed.err
    found = json.loads(printed.out)
    assert (found["report"]["metric"], found["budget"]["worse"]) == ("auc", 0.01)
    assert [row["name"] for row in found["table"]] == ["original", "onnx"]
    assert found["recommendation"]["version"] in ("late@1", "late@2")
    assert "no GPU was measured" in found["recommendation"]["words"]
