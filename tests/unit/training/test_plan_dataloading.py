"""The search for the best data loading options of a plan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from falaj.training.runtime.data.dataloading import start_method
from falaj.training.runtime.data.sources import DatasetSource
from falaj.training.runtime.fit import FitResult, fit
from falaj.training.runtime.planning import dataloading_search, trials
from falaj.training.runtime.planning.candidates import SearchSpace
from falaj.training.runtime.planning.dataloading_search import DataloadingTrials, search_dataloading
from falaj.training.runtime.planning.plan import Plan
from falaj.training.runtime.planning.search import SearchResult, format_outcomes, search
from falaj.training.runtime.planning.trials import SampledSource, TrialOutcome, sample_items
from polling import let_pass


class Slow:
    """Samples that take a while, like a picture that must be decoded."""

    def __init__(self, pause_s: float = 0.0, *, name: bool = False) -> None:
        self._pause_s, self._name = pause_s, name

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        let_pass(self._pause_s)
        row = torch.tensor([index, 1.0])
        return {"row": row, "name": str(index)} if self._name else (row, row.sum().reshape(1))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FALAJ_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(start_method, "reason_not_to_fork", lambda: None)
    monkeypatch.setattr(dataloading_search, "cores_per_rank", lambda: 8)
    for timing, name in ((dataloading_search, "TIMED_S"), (trials, "TIMED_S"), (trials, "CURVE_S")):
        monkeypatch.setattr(timing, name, 0.05)  # the result is not judged here


def found(rate: Callable[[Plan], float], **options: Any) -> SearchResult:
    def try_out(plan: Plan) -> TrialOutcome:
        return TrialOutcome(plan=plan, samples_per_second=rate(plan))

    given: dict[str, Any] = {"share": 0.5, "allowed_s": 100.0, **options}
    return search_dataloading(DatasetSource(Slow()), Plan(fused=True), try_out, **given)


def test_more_workers_are_tried_while_they_speed_up_reading() -> None:
    result = found(lambda plan: 100.0 * min(plan.workers or 0.5, 3))

    assert [each.plan.workers for each in result.tried] == [0, 1, 2, 4, 8, 4]
    assert result.plan == Plan(fused=True, workers=4)
    assert "fp32, fused, 4 workers" in format_outcomes(result)


def test_deeper_prefetching_is_tried_with_the_best_worker_count() -> None:
    result = found(lambda plan: 100.0 * bool(plan.workers) * (plan.prefetch or 2) + 1)

    assert result.plan == Plan(fused=True, workers=1, prefetch=4)


def test_workers_that_do_not_speed_up_reading_are_not_started() -> None:
    result = found(lambda plan: 100.0 - (plan.workers or 0))

    assert result.plan == Plan(fused=True, workers=0)
    assert [each.plan.workers for each in result.tried] == [0, 1]


def test_cheap_reading_is_not_tried_at_all() -> None:
    def never(_: Plan) -> float:
        pytest.fail("nobody asked")

    result = found(never, share=0.04)

    assert (result.plan, result.tried) == (Plan(fused=True, workers=0), [])


def test_when_the_time_is_up_the_rest_is_named() -> None:
    result = found(lambda _: 100.0, allowed_s=0.0)

    assert result.plan == Plan(fused=True, workers=0)
    assert result.tried[1].rejection == "not tried: out of time"


def test_a_dataset_that_cannot_be_pickled_is_read_in_the_main_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        dataloading_search,
        "choose_start_method",
        lambda _: start_method.StartMethod(None, "threads, and no pickle"),
    )

    result = found(lambda _: 100.0)

    assert result.plan == Plan(fused=True, workers=0)
    assert "threads, and no pickle" in format_outcomes(result)


def test_unpinned_transfers_are_tried_on_a_gpu_when_batches_are_copied() -> None:
    space = SearchSpace(on_gpu=True, start=Plan(), fixed={}, batch_size=32, copies_batches=True)

    def tried(space: SearchSpace) -> list[Plan]:
        result = search(
            space, lambda plan, _: TrialOutcome(plan=plan, samples_per_second=1e3), budget=lambda _: 1e3
        )
        return [each.plan for each in result.tried]

    assert any(plan.pinned is False for plan in tried(space))
    assert not any(
        plan.pinned is False for plan in tried(SearchSpace(**{**vars(space), "copies_batches": False}))
    )


# --------------------------------------------------------------------------------- on a real dataset


def test_compute_trials_use_a_sample_of_the_dataset() -> None:
    source, seconds = sample_items(DatasetSource(Slow(0.02)))

    assert isinstance(source, SampledSource)
    assert len(source) == 64
    rows, _ = source.read(torch.tensor([3, 3 + len(source._columns)]), seed=0)
    assert rows[:, 0].tolist() == [3.0, 3.0]
    assert seconds >= 0.02
    assert isinstance(sample_items(DatasetSource(Slow(name=True)))[0], DatasetSource)


def train(**options: Any) -> FitResult:
    torch.manual_seed(0)
    given = {"batch_size": 8, "steps": 12, "device": "cpu", **options}
    return fit(nn.Linear(2, 1), nn.functional.mse_loss, Slow(0.002), **given)


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """Replace trials so that two workers are best; return the plans that were tried."""
    plans: list[Plan] = []

    def rate(_: DataloadingTrials, plan: Plan) -> TrialOutcome:
        plans.append(plan)
        return TrialOutcome(plan=plan, samples_per_second=100.0 * min(2, (plan.workers or 0) + 0.5))

    monkeypatch.setattr(DataloadingTrials, "__call__", rate)
    return plans


@pytest.mark.slow
def test_the_search_chooses_workers_reports_them_and_caches_the_plan(
    tried: list[Plan], capsys: pytest.CaptureFixture[str]
) -> None:
    first = train(tune_seconds=600.0, compile=False)
    output, count = capsys.readouterr().out, len(tried)
    second = train(tune_seconds=600.0, compile=False)

    assert first.plan.workers == second.plan.workers == 2
    assert "data loading:" in output
    assert "2 workers" in output
    assert 0 < count == len(tried)
    assert first.losses == second.losses


@pytest.mark.slow
def test_workers_that_were_given_are_not_searched(tried: list[Plan]) -> None:
    result = train(tune_seconds=600.0, workers=1, compile=False)

    assert result.plan.workers == 1
    assert tried == []


@pytest.mark.slow
def test_trials_read_the_dataset_itself_with_real_workers(capsys: pytest.CaptureFixture[str]) -> None:
    result = train(tune_seconds=600.0, compile=False)

    output = capsys.readouterr().out
    assert result.plan.workers is not None
    assert "data loading:" in output
    assert "1 workers" in output


def test_a_dataset_that_fails_in_a_trial_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Slow, index: int) -> tuple[Tensor, Tensor]:
        raise OSError("no such picture")

    monkeypatch.setattr(Slow, "__getitem__", broken)

    with pytest.raises(Exception, match=r"sample 0.* cannot be read: OSError: no such picture"):
        train(tune_seconds=600.0)
