"""Trials of plans on a real model: in this process, and in child processes that crash, hang and diverge."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from falaj.training.runtime.agent.agents import FolderAgent
from falaj.training.runtime.data.sources import open_data
from falaj.training.runtime.errors import InvalidTraining, OutOfMemory
from falaj.training.runtime.fit import FitResult, fit
from falaj.training.runtime.options import FitOptions
from falaj.training.runtime.parallel.process_group import ProcessGroup
from falaj.training.runtime.planning import selection, trial_process
from falaj.training.runtime.planning.plan import Plan
from falaj.training.runtime.planning.search import RehearsedTrials, SubprocessTrials
from falaj.training.runtime.planning.trials import TrialOutcome, TrialRunner
from hung_trials import expire_hung_trials, hang_and_expire

mse = nn.functional.mse_loss


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FALAJ_CACHE", str(tmp_path / "cache"))


def rows(count: int = 256) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(count, 4, generator=torch.Generator().manual_seed(2))
    return inputs, inputs.sum(1, keepdim=True)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))


def settings(**compute: Any) -> FitOptions:
    return FitOptions.from_keywords(
        batch_size=8, steps=10, device="cpu", tune="off", checkpoint_every=10, **compute
    )


def harness(loss: Any = mse, model: nn.Module | None = None) -> TrialRunner:
    return TrialRunner(model or make_model(), loss, open_data(rows()), settings(), torch.device("cpu"))


def in_bf16() -> bool:
    return torch.is_autocast_enabled("cpu")


# ----------------------------------------------------------------------------------------- one trial


@pytest.mark.slow
def test_a_trial_measures_and_leaves_the_model_alone() -> None:
    model = make_model()
    before = [p.detach().clone() for p in model.parameters()]

    outcome = harness(model=model).try_out(Plan(precision="bf16", fused=True))

    assert outcome.rejection is None
    assert outcome.samples_per_second > 0
    assert outcome.errors is not None
    assert 0 < outcome.errors.gradient < 0.1
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.slow
def test_an_optimizer_that_the_caller_made_is_tried_as_a_copy() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    own = settings()
    own = replace(own, optimization=replace(own.optimization, optimizer=optimizer))
    before = [p.detach().clone() for p in model.parameters()]

    outcome = TrialRunner(model, mse, open_data(rows()), own, torch.device("cpu")).try_out(Plan())

    assert outcome.rejection is None
    assert not optimizer.state
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


@pytest.mark.slow
def test_a_candidate_that_computes_something_else_is_discarded() -> None:
    def wrong(out: Tensor, target: Tensor) -> Tensor:
        return mse(out, target) * (3 if in_bf16() else 1)

    outcome = harness(wrong).try_out(Plan(precision="bf16"))

    assert outcome.rejection is not None
    assert "differs from fp32" in outcome.rejection


def test_a_candidate_whose_gradients_alone_differ_is_discarded() -> None:
    def wrong(out: Tensor, target: Tensor) -> Tensor:
        found = mse(out, target)
        return found + (found * 2 - (found * 2).detach() if in_bf16() else 0)

    outcome = harness(wrong).try_out(Plan(precision="bf16"))

    assert "gradients differ from fp32" in str(outcome.rejection)


def test_a_candidate_that_is_not_finite_is_discarded() -> None:
    def bad(out: Tensor, target: Tensor) -> Tensor:
        return mse(out, target) * (float("nan") if in_bf16() else 1)

    assert harness(bad).try_out(Plan(precision="bf16")).rejection is not None


def test_a_candidate_that_fails_is_discarded_with_the_reason() -> None:
    def fails(out: Tensor, target: Tensor) -> Tensor:
        if in_bf16():
            raise ValueError("no such kernel")
        return mse(out, target)

    assert harness(fails).try_out(Plan(precision="bf16")).rejection == "ValueError: no such kernel"


def test_a_candidate_that_runs_out_of_memory_is_discarded() -> None:
    def large(out: Tensor, target: Tensor) -> Tensor:
        if in_bf16():
            raise torch.OutOfMemoryError("no room")
        return mse(out, target)

    assert "out of memory" in str(harness(large).try_out(Plan(precision="bf16")).rejection)


def test_a_failed_compilation_discards_the_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.exc import TorchDynamoException

    def broken(_: Any) -> Any:
        def fail(*_: Any) -> Any:
            raise TorchDynamoException("no compiler here")

        return fail

    monkeypatch.setattr(torch, "compile", broken)

    assert "no compiler here" in str(harness().try_out(Plan(compile="default")).rejection)


# ----------------------------------------------------------------------------------------- in a child


def in_child(loss: Any, *plans: Plan) -> list[TrialOutcome]:
    trials = SubprocessTrials(harness(loss), alive=lambda: True)
    try:
        return [trials(plan, 60.0) for plan in plans]
    finally:
        trials.end()


@pytest.mark.slow
@pytest.mark.forks_autograd
def test_a_candidate_that_crashes_costs_only_itself() -> None:
    def deadly(out: Tensor, target: Tensor) -> Tensor:
        if in_bf16():
            os.kill(os.getpid(), signal.SIGSEGV)
        return mse(out, target)

    first, crashed, after = in_child(deadly, Plan(), Plan(precision="bf16"), Plan(fused=True))

    assert (first.rejection, after.rejection) == (None, None)
    assert crashed.rejection == "crashed (SIGSEGV)"
    assert after.samples_per_second > 0


@pytest.mark.forks_autograd
def test_a_candidate_that_hangs_is_ended_when_its_time_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expire_hung_trials(monkeypatch, tmp_path)

    def hangs(out: Tensor, target: Tensor) -> Tensor:
        if in_bf16():
            hang_and_expire()
        return mse(out, target)

    hung, after = in_child(hangs, Plan(precision="bf16"), Plan())

    assert hung.rejection == "did not end within 60 s"
    assert after.rejection is None


@pytest.mark.slow
def test_plans_are_tried_without_a_rehearsal_where_children_cannot_train(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trial_process, "_readiness", lambda _: "no threads for gradients after a fork")
    trials = RehearsedTrials(harness(), plain=Plan(), alive=lambda: True)

    outcome = trials(Plan(precision="bf16"), 60)

    assert outcome.rejection is None


@pytest.mark.slow
@pytest.mark.forks_autograd
def test_the_trial_process_measures_the_same_as_this_one() -> None:
    torch.set_num_threads(1)
    (there,) = in_child(mse, Plan(precision="bf16"))
    here = harness().try_out(Plan(precision="bf16"))

    assert there.errors == here.errors


# ------------------------------------------------------------------------------------------- in fit


def short_fit(**options: Any) -> FitResult:
    given = {"batch_size": 8, "steps": 12, "device": "cpu", "tune_seconds": 1.0, **options}
    return fit(make_model(), mse, rows(), **given)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """Replace trials so that only fused updates are fast; return the plans that were tried."""
    tried: list[Plan] = []

    def try_out(_: TrialRunner, plan: Plan) -> TrialOutcome:
        tried.append(plan)
        return TrialOutcome(plan=plan, samples_per_second=200.0 if plan.fused else 100.0)

    monkeypatch.setattr(TrialRunner, "try_out", try_out)
    return tried


def test_the_search_is_reported_logged_as_parameters_and_skipped_next_time(
    tmp_path: Path, found: list[Plan], capsys: pytest.CaptureFixture[str]
) -> None:
    first = short_fit(run=tmp_path / "one", tune_seconds=100.0)
    count, words = len(found), capsys.readouterr().err
    second = short_fit(run=tmp_path / "two", tune_seconds=100.0)

    assert first.plan.fused
    assert second.plan == first.plan
    assert "chosen" in words
    assert count > 1
    assert len(found) == count
    assert "from the cache" in capsys.readouterr().err
    assert '"plan": "fp32, fused"' in (tmp_path / "two" / "params.json").read_text()


def test_tune_off_searches_nothing(found: list[Plan]) -> None:
    assert short_fit(tune="off").plan == Plan()
    assert found == []


@pytest.mark.slow
def test_a_short_run_is_not_searched(found: list[Plan]) -> None:
    assert short_fit(tune_seconds=None, steps=99).plan == Plan()
    assert short_fit(tune_seconds=None, steps=2100).plan == Plan()  # many steps, but short ones
    assert found == []


def test_given_options_are_kept(found: list[Plan]) -> None:
    result = short_fit(precision="bf16", compile=False, accumulate=2, tune_seconds=100.0)

    assert (result.plan.precision, result.plan.compile, result.plan.micro_batches) == ("bf16", "off", 2)
    assert {plan.precision for plan in found} == {"bf16"}


def test_a_plan_can_be_given(found: list[Plan]) -> None:
    plan = Plan(precision="bf16", fused=True, threads=1, micro_batches=2)
    threads = torch.get_num_threads()

    result = short_fit(tune=plan, tune_seconds=None)

    assert result.plan == plan
    assert found == []
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(
    "options", [{"tune": "always"}, {"tune_seconds": 0.0}, {"compile": "often"}], ids=str
)
def test_wrong_options_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidTraining) as refusal:
        short_fit(**options)

    assert [fault.where for fault in refusal.value.faults] == list(options)


def test_the_search_may_choose_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("falaj.training.runtime.planning.candidates.MIN_EPOCH_STEPS", 2)

    def try_out(_: TrialRunner, plan: Plan) -> TrialOutcome:
        return TrialOutcome(plan=plan, samples_per_second=100.0 * (plan.batch_size or 32))

    monkeypatch.setattr(TrialRunner, "try_out", try_out)

    result = short_fit(batch_size="auto", tune_seconds=100.0, epochs=2, steps=None)

    assert result.plan.batch_size == 128
    assert result.step == 4


def test_without_a_search_the_batch_is_the_usual_one() -> None:
    assert short_fit(batch_size="auto", tune="off", epochs=1, steps=None).step == 8


def test_a_resumed_run_keeps_its_plan_and_batch(tmp_path: Path, found: list[Plan]) -> None:
    straight = short_fit(tune=Plan(precision="bf16", fused=True, batch_size=64), batch_size="auto")
    kept = {"run": tmp_path, "batch_size": "auto"}
    first = short_fit(tune=Plan(precision="bf16", fused=True, batch_size=64), steps=5, **kept)

    second = short_fit(**kept)

    assert found == []
    assert second.resumed_from == 5
    assert (second.plan.precision, second.plan.fused, second.plan.batch_size) == ("bf16", True, 64)
    assert first.losses + second.losses == straight.losses


def test_gpu_only_options_are_dropped_when_the_run_resumes_on_a_cpu(tmp_path: Path) -> None:
    short_fit(tune=Plan(graph=True, fused=True), steps=5, run=tmp_path)
    agent = FolderAgent(tmp_path)

    here = selection.checkpointed_plan(agent, ProcessGroup())
    elsewhere = selection.checkpointed_plan(agent, ProcessGroup(device=torch.device("meta")))
    agent.close()

    assert here == Plan(graph=True, fused=True, batch_size=8)
    assert elsewhere == Plan(fused=True, batch_size=8)


def test_out_of_memory_in_training_halves_the_micro_batches(capsys: pytest.CaptureFixture[str]) -> None:
    def large(out: Tensor, target: Tensor) -> Tensor:
        if len(out) > 2:
            raise torch.OutOfMemoryError("no room for it")
        return mse(out, target)

    result = fit(make_model(), large, rows(), batch_size=8, steps=4, device="cpu")

    output = capsys.readouterr().out
    assert "step 1: out of memory (no room for it); continuing with 2 micro-batches" in output
    assert "continuing with 4 micro-batches" in output
    expected = fit(make_model(), mse, rows(), batch_size=8, steps=4, device="cpu", accumulate=4)
    assert result.losses == expected.losses


def test_memory_too_small_for_one_sample_is_an_error() -> None:
    def large(out: Tensor, target: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("no room")

    with pytest.raises(OutOfMemory):
        fit(make_model(), large, rows(), batch_size=4, steps=1, device="cpu")


def test_channels_last_resumes_from_a_checkpoint(tmp_path: Path) -> None:
    images, target = torch.randn(64, 3, 8, 8), torch.randn(64, 1)
    plan = Plan(layout="channels_last", fused=True)

    def train(steps: int, run: Path | None) -> FitResult:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8, 1),
        )
        return fit(model, mse, (images, target), batch_size=8, steps=steps, device="cpu", tune=plan, run=run)

    straight = train(8, None)
    first = train(4, tmp_path)
    second = train(8, tmp_path)

    assert first.losses + second.losses == straight.losses
