"""`falaj optimization show` prints the variants as one table."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from falaj.apps.cli.commands.optimization import print_table
from falaj.records.names import ObjectId
from falaj.records.optimization import (
    AcceptanceBudget,
    Measurement,
    Optimization,
    OptimizationReport,
    OptimizationVerdict,
    Variant,
)

ORIGINAL = Measurement(
    latency_p50_us=115.69,
    latency_p99_us=300.2,
    rows_per_s_32=225549.4,
    rows_per_s_256=835671.4,
    cpu_us_per_row=1.2,
    size_bytes=64639,
    loss=0.29576,
    auc=0.96153,
)


def test_the_table_has_the_original_and_every_variant(capsys: pytest.CaptureFixture[str]) -> None:
    quick = ORIGINAL.model_copy(update={"latency_p50_us": 6.2, "size_bytes": 26728, "auc": None})
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
            report=OptimizationReport(
                metric="log_loss", rows=1500, host="EPYC", original=ORIGINAL, variants=variants
            ),
            created_at=datetime(2026, 11, 15, tzinfo=UTC),
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
            "115.7",
            "300.2",
            "225,549",
            "835,671",
            "63.1",
            "KiB",
            "0.29576",
            "0.96153",
            "late@1",
        ],
        ["onnx", "accepted", "6.2", "300.2", "225,549", "835,671", "26.1", "KiB", "0.29576", "-", "late@2"],
        ["int8", "refused", *["-"] * 8],
    ]
    assert lines[-2] == "onnx is accepted: faster: a single row 18×"
    assert lines[-1] == r"int8 is refused: trees only compare\x1b[31m and add"
