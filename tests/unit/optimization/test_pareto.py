"""The Pareto table, the cost of predictions and the recommendation follow from the report and the prices."""

from __future__ import annotations

from typing import Any

import pytest

from falaj.optimization.pareto import pareto_table, recommend
from falaj.records.config import Prices
from falaj.records.optimization import (
    Measurement,
    OptimizationReport,
    OptimizationVerdict,
    Variant,
)

PRICES = Prices(currency="AED", cpu_hour=0.18, gpu_hour=12.0, gpu_models={"H200": 36.0})


def measured(latency: float, rate: float, size: int, auc: float) -> Measurement:
    return Measurement(
        latency_p50_us=latency,
        latency_p99_us=2 * latency,
        rows_per_s_32=rate,
        rows_per_s=rate,
        best_batch=64,
        cpu_us_per_row=1e6 / rate,
        size_bytes=size,
        auc=auc,
        loss=0.4,
    )


def variant(
    recipe: Any, figures: Measurement | None, *, verdict: str = "accepted", device: Any = "cpu"
) -> Variant:
    return Variant(
        recipe=recipe,
        verdict=OptimizationVerdict(verdict),
        reason="measured",
        measured=figures,
        device=device,
        version=f"churn@{recipe}" if verdict == "accepted" else None,
    )


def report(*variants: Variant, **more: Any) -> OptimizationReport:
    original = measured(100, 10_000, 1000, 0.9)
    return OptimizationReport(metric="auc", rows=1000, original=original, variants=variants, **more)


def test_the_front_has_what_nothing_else_beats_in_everything() -> None:
    found = report(
        variant("int8", measured(50, 20_000, 300, 0.899)),
        variant("onnx", measured(60, 15_000, 900, 0.898)),  # int8 is better in everything
        variant("distill", measured(10, 90_000, 20, 0.8), verdict="refused"),
        variant("fp16", None, verdict="refused"),
    )

    table = pareto_table(found, model="churn@14", prices=PRICES)

    front = {row.name: row.on_front for row in table}
    assert front == {"original": True, "int8": True, "onnx": False, "distill": False}
    assert table[0].version == "churn@14"
    assert table[1].quality == 0.899


def test_a_million_predictions_cost_the_hours_that_they_take() -> None:
    found = report(
        variant("bf16", measured(30, 2_000_000, 500, 0.9), device="gpu"),
        gpu="H200",
        on_gpu=measured(40, 1_000_000, 1000, 0.9),
    )

    costs = {
        (row.name, row.device): row.cost_per_million
        for row in pareto_table(found, model="m@1", prices=PRICES)
    }

    assert costs[("original", "cpu")] == pytest.approx(0.18 / 3600 * 100)
    assert costs[("original", "gpu")] == pytest.approx((36 + 0.18) / 3600)
    assert costs[("bf16", "gpu")] == pytest.approx((36 + 0.18) / 3600 / 2)
    assert {row.cost_per_million for row in pareto_table(found, model="m@1", prices=None)} == {None}


@pytest.mark.parametrize(
    ("rate", "device", "words"),
    [
        (2_000_000, "cpu", "the CPU costs 1/1.0"),
        (20_000_000, "gpu", "the GPU costs 1/10.0"),
    ],
    ids=["a slow GPU", "a fast GPU"],
)
def test_the_cheaper_device_is_recommended(rate: float, device: str, words: str) -> None:
    found = report(
        variant("int8", measured(50, 10_000, 300, 0.899)),
        variant("bf16", measured(30, rate, 500, 0.9), device="gpu"),
        gpu="H200",
    )
    table = pareto_table(found, model="churn@14", prices=PRICES)

    best = recommend(table, found, prices=PRICES)

    assert best.device == device
    assert words in best.words
    assert "AED a million predictions" in best.words


def test_without_prices_the_break_even_is_told() -> None:
    found = report(variant("bf16", measured(30, 2_000_000, 500, 0.9), device="gpu"), gpu="H200")
    table = pareto_table(found, model="churn@14", prices=None)

    best = recommend(table, found, prices=None)

    assert (best.device, best.version) == ("cpu", "churn@14")
    assert "the GPU is cheaper if its hour costs less than 200.0 CPU-hours" in best.words


def test_without_a_gpu_the_fastest_accepted_variant_is_recommended() -> None:
    found = report(
        variant("int8", measured(50, 20_000, 300, 0.899)),
        variant("distill", measured(10, 90_000, 20, 0.8), verdict="refused"),
    )

    best = recommend(pareto_table(found, model="churn@14", prices=PRICES), found, prices=PRICES)

    assert (best.name, best.version) == ("int8", "churn@int8")
    assert "no GPU was measured" in best.words
