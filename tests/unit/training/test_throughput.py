"""Throughput of every run: rates, MFU, goodput over restarts; and the parameters of a run."""

from __future__ import annotations

import functools
import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from falaj.training.runtime.agent.agents import read_metrics
from falaj.training.runtime.checkpointing.position import Position
from falaj.training.runtime.data.batches import BatchPlan
from falaj.training.runtime.errors import LossNotFinite
from falaj.training.runtime.fit import fit
from falaj.training.runtime.planning.plan import Plan
from falaj.training.runtime.profiling import peaks as peaks_module
from falaj.training.runtime.profiling.cost import CostCounter
from falaj.training.runtime.profiling.peaks import device_peaks
from falaj.training.runtime.reporting.throughput import ModelCost, StepClock, ThroughputMeter

PLAN = BatchPlan(100, 10, seed=0)
ROWS = torch.randn(40, 3)


class OwnClock(StepClock):
    """Time as the test wants it."""

    def __init__(self, seconds: float, useful: float) -> None:
        super().__init__()
        self.times = seconds, useful

    def read(self) -> tuple[float, float]:
        return self.times


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FALAJ_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FALAJ_OUTPUTS", str(tmp_path / "outputs"))


def mse(found: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(found, target)


def metrics_of(folder: Path) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for metric in read_metrics(folder):
        found.setdefault(metric.name, {})[metric.step] = metric.value
    return found


def test_rates_are_of_the_steps_since_the_last_time() -> None:
    clock = OwnClock(0.0, 0.0)
    meter = ThroughputMeter(clock, PLAN, Position(), total=100, model_cost=None)

    clock.times = 4.0, 2.0
    first = {metric.name: metric.value for metric in meter.since_last(10)}
    clock.times = 6.0, 3.0
    second = {metric.name: metric.value for metric in meter.since_last(20)}
    clock.times = 6.1, 3.1
    soon = meter.since_last(21)

    assert first == {"samples_per_second": 50.0, "step_time": 0.2, "goodput": 0.5}
    assert second == {"samples_per_second": 100.0, "step_time": 0.1, "goodput": 0.5}
    assert soon == []


def test_goodput_counts_the_time_lost_by_a_kill() -> None:
    clock = OwnClock(0.0, 0.0)
    # 40 s of steps in 50 s, then it was killed, and was down for 30 s, its last steps included.
    before = Position(step=10, useful_s=40.0, spent_s=50.0, left_at=clock.began_at - 30.0)
    meter = ThroughputMeter(clock, PLAN, before, total=100, model_cost=None)
    clock.times = 20.0, 20.0

    assert meter.overall(20).goodput == pytest.approx(60.0 / 100.0)


def test_no_time_counts_after_a_normal_end() -> None:
    clock = OwnClock(50.0, 40.0)
    ended = ThroughputMeter(clock, PLAN, Position(), total=10, model_cost=None).remember(
        Position(step=10), ends=True
    )
    before = time.time()
    going_on = ThroughputMeter(clock, PLAN, Position(), total=20, model_cost=None).remember(
        Position(step=10), ends=False
    )

    assert (ended.useful_s, ended.spent_s, ended.left_at) == (40.0, 50.0, None)
    assert going_on.left_at is not None
    assert before <= going_on.left_at <= time.time()


def test_nested_excluded_times_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("falaj.training.runtime.reporting.throughput.time.perf_counter", lambda: now[0])
    clock = StepClock()

    now[0] = 1.0
    with clock.excluded():
        now[0] = 2.0
        with clock.excluded():
            now[0] = 3.0
        inside = clock.read()
        now[0] = 4.0

    assert inside == (3.0, 1.0)
    assert clock.read() == (4.0, 1.0)


def test_every_run_logs_and_prints_its_figures(tmp_path: Path) -> None:
    result = fit(
        nn.Linear(3, 1), mse, (ROWS, ROWS[:, :1]), batch_size=8, epochs=2, lr=0.5, run=tmp_path, device="cpu"
    )

    params = json.loads((tmp_path / "params.json").read_text())
    figures = metrics_of(tmp_path)
    assert {name: set(values) for name, values in figures.items() if name != "loss"} == {
        "samples_per_second": {10},
        "step_time": {10},
        "goodput": {10},
    }
    assert figures["samples_per_second"][10] == pytest.approx(result.samples_per_second)
    assert 0 < figures["goodput"][10] <= 1
    assert (
        params
        | {
            "lr": "0.5",
            "epochs": "2",
            "optimizer": "adamw",
            "batch_size": "8",
            "total_steps": "10",
            "plan": "fp32",
            "processes": "1",
            "data.samples": "40",
            "model": "Linear",
            "model.parameters": "4",
            "hardware.device": "cpu",
            "torch": torch.__version__,
            "ledger.10": result.ledger,
        }
        == params
    )
    assert {"hardware.cpu", "hardware.cores", "hardware.memory_gib"} <= params.keys()
    assert "clip" not in params


def test_interrupted_run_records_its_last_time_and_a_completed_one_does_not(tmp_path: Path) -> None:
    def breaking(found: Tensor, target: Tensor) -> Tensor:
        calls.append(1)
        return mse(found, target) if len(calls) != 6 else mse(found, target) * math.nan

    calls: list[int] = []
    options: dict[str, Any] = {"batch_size": 8, "run": tmp_path, "device": "cpu", "checkpoint_every": 2}

    with pytest.raises(LossNotFinite):
        fit(nn.Linear(3, 1), breaking, (ROWS, ROWS[:, :1]), epochs=2, **options)
    broken_off = newest_position(tmp_path)
    fit(nn.Linear(3, 1), breaking, (ROWS, ROWS[:, :1]), epochs=2, **options)
    ended = newest_position(tmp_path)

    assert (broken_off["step"], ended["step"]) == (4, 10)
    assert broken_off["left_at"] is not None
    assert ended["left_at"] is None
    assert 0 < broken_off["useful_s"] < broken_off["spent_s"]
    assert ended["useful_s"] > broken_off["useful_s"]
    assert metrics_of(tmp_path)["goodput"][10] < 1


def newest_position(folder: Path) -> dict[str, Any]:
    manifest = max((folder / "checkpoints").rglob("manifest.json"))
    found: dict[str, Any] = json.loads(manifest.read_text())["checkpoint"]["run"]["position"]
    return found


class Caching(nn.Module):
    """Keeps a tensor of its first call, has state that training changes, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Dropout(0.5)
        self.cached: Tensor | None = None

    def forward(self, rows: Tensor) -> Tensor:
        if self.cached is None:
            self.cached = torch.arange(5, device=rows.device, dtype=rows.dtype)
        found: Tensor = self.drop(self.norm(self.linear(rows))) + self.cached
        return found


def test_counting_changes_neither_the_model_nor_the_random_state() -> None:
    model, sample = Caching(), (torch.randn(1, 3), torch.randn(1, 5))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.get_rng_state()

    cost = CostCounter(model, mse).count(sample, samples=64)

    assert cost.flops == 2 * (2 * 64 * 3 * 5)  # forward, and the gradient of the weights; inputs need none
    assert cost.bytes > 64 * 3 * 4
    assert model.cached is None
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(random_state, torch.get_rng_state())
    model(torch.randn(2, 3))


class DataDependent(nn.Module):
    """Its operations depend on values, not on shapes alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, rows: Tensor) -> Tensor:
        found: Tensor = self.linear(rows) if float(rows.sum()) > -1e9 else rows
        return found


def test_model_that_cannot_be_counted_is_trained_without_mfu() -> None:
    model = DataDependent()

    assert priced(model).count() is None
    assert fit(model, mse, (ROWS, ROWS[:, :1]), batch_size=8, steps=25, profile=2, device="cpu").mfu is None


def test_shared_weights_are_counted_at_each_use_and_stay_shared() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.other.weight = self.one.weight

        def forward(self, rows: Tensor) -> Tensor:
            found: Tensor = self.other(self.one(rows))
            return found

    ghost = CostCounter(Tied(), mse)
    sample = torch.randn(1, 4), torch.randn(1, 4)

    assert ghost.count(sample, samples=2).flops == 5 * (
        2 * 2 * 4 * 4
    )  # twice forward, three gradients: the inputs need none
    assert ghost._model.one.weight is ghost._model.other.weight


def test_cached_tensors_of_functions_are_not_fake(tmp_path: Path) -> None:
    @functools.cache
    def scale(width: int) -> Tensor:
        return torch.ones(width)

    class Scaling(nn.Linear):
        def forward(self, rows: Tensor) -> Tensor:
            return super().forward(rows) * scale(self.out_features)

    options: dict[str, Any] = {"batch_size": 8, "device": "cpu", "run": tmp_path, "tune": "off"}
    result = fit(Scaling(3, 1), mse, (ROWS, ROWS[:, :1]), steps=30, profile=2, **options)

    assert result.step == 30
    assert result.profile is not None
    assert result.profile.use.flops is not None
    assert type(scale(1)) is Tensor


def test_cost_is_counted_once_for_a_structure(monkeypatch: pytest.MonkeyPatch) -> None:
    first = priced().count()
    monkeypatch.setattr(CostCounter, "count", lambda *_, **__: pytest.fail("counted"))
    again = priced()
    again.recall()

    assert again.cost == first
    assert first is not None


def test_cost_includes_parameters_changed_after_the_copy() -> None:
    model = nn.Linear(3, 1)
    model_cost = priced(model)
    model_cost.make_ghost()
    model.weight = nn.Parameter(torch.randn(1, 300))

    found = model_cost.count()

    assert found is not None
    assert found.flops == 8 * 12


def priced(model: nn.Module | None = None, *, devices: int = 1) -> ModelCost:
    sample, device = (ROWS[:1], ROWS[:1, :1]), torch.device("cpu")
    model = model or nn.Linear(3, 1)
    return ModelCost(model, mse, sample, samples=8, device=device, devices=devices, precision="fp32")


def test_mfu_is_model_flops_over_peak_flops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peaks_module, "measure_flops", lambda *_: 48_000.0)

    model_cost = priced(devices=2)

    unknown = model_cost.mfu(1000.0)
    model_cost.count()
    found = model_cost.mfu(1000.0)

    assert unknown is None
    assert found == pytest.approx(12 * 1000 / 2 / 48_000)  # 12 operations a sample, forward and backward


def test_peak_that_a_run_exceeds_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = iter([10.0, 30.0])
    monkeypatch.setattr(peaks_module, "measure_flops", lambda *_: next(rates))
    device = torch.device("cpu")

    found = [device_peaks(device, "fp32", reached=reached).flops for reached in (0.0, 5.0, 20.0, 25.0)]

    assert found == [10.0, 10.0, 30.0, 30.0]


def test_bandwidth_is_measured_on_request_and_cached() -> None:
    device = torch.device("cpu")

    first = device_peaks(device, "fp32")
    with_bandwidth_measured = device_peaks(device, "fp32", with_bandwidth=True)

    assert first.flops > 0
    assert first.bandwidth is None
    assert with_bandwidth_measured.flops == first.flops
    assert with_bandwidth_measured.bandwidth
    assert device_peaks(device, "fp32") == with_bandwidth_measured


def test_device_without_memory_to_measure_has_no_mfu(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> float:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(peaks_module, "measure_flops", full)

    model_cost = priced()

    assert model_cost.count() is not None
    assert model_cost.mfu(1000.0) is None


def test_long_run_counts_its_mfu_and_a_short_one_uses_the_cached_cost(tmp_path: Path) -> None:
    clock = OwnClock(0.0, 0.0)
    sample = ROWS[:1], ROWS[:1, :1]
    options: dict[str, Any] = {
        "samples": 8,
        "device": torch.device("cpu"),
        "devices": 1,
        "precision": Plan().precision,
    }

    def metered(*, seconds_a_step: float) -> set[str]:
        meter = ThroughputMeter(
            clock, PLAN, Position(), total=100, model_cost=ModelCost(nn.Linear(3, 1), mse, sample, **options)
        )
        clock.times = 10 * seconds_a_step, 10 * seconds_a_step
        found = {metric.name for metric in meter.since_last(10)}
        clock.times = 0.0, 0.0
        return found

    assert "mfu" not in metered(seconds_a_step=0.1)
    assert "mfu" in metered(seconds_a_step=1.0)
    assert "mfu" in metered(seconds_a_step=0.1)
