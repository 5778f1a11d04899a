"""A plan search leaves the loss, the random generators and the run unchanged, whatever fails in it."""

from __future__ import annotations

import os
import random
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import falaj as fj
from falaj.training.runtime.planning import search, selection, trials
from falaj.training.runtime.planning.plan import Plan
from falaj.training.runtime.planning.trials import TrialOutcome, TrialRunner
from hung_trials import expire_hung_trials, hang_and_expire

pytestmark = pytest.mark.slow

mse = nn.functional.mse_loss
calls, model_here = 0, nn.Linear(4, 1)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FALAJ_CACHE", str(tmp_path / "cache"))


def rows(count: int = 64) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(count, 4, generator=torch.Generator().manual_seed(2))
    return inputs, inputs.sum(1, keepdim=True)


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.3), nn.Linear(16, 1))


def searched(model: nn.Module, loss: Any = mse, **options: Any) -> fj.FitResult:
    given = {"batch_size": 8, "steps": 12, "device": "cpu", "tune_seconds": 1.5, "compile": False, **options}
    return fj.fit(model, loss, rows(), **given)


# -------------------------------------------------------------------------- models that cannot be searched


def groups_of(model: nn.Sequential) -> list[dict[str, Any]]:
    return [{"params": model[0].parameters(), "lr": 1e-4}, {"params": model[2].parameters()}]


def over_a_global(_: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model_here.parameters(), lr=0.1)


@pytest.mark.parametrize("where", ["closure", "global"])
def test_an_optimizer_over_the_model_that_it_sees_is_tried_over_the_copy(
    where: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model: nn.Module = make_model() if where == "closure" else nn.Linear(4, 1)
    monkeypatch.setitem(globals(), "model_here", model)
    optimizer = (lambda _: torch.optim.AdamW(groups_of(model))) if where == "closure" else over_a_global  # type: ignore[arg-type]

    result = searched(model, optimizer=optimizer)

    output = capsys.readouterr().out
    assert result.step == 12
    assert "chosen" in output
    assert "InvalidTraining" not in output
    assert model_here is model


class Locked(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 1)
        self.lock = threading.Lock()


def with_a_history() -> nn.Module:
    layer = nn.Linear(4, 1)
    layer.seen = layer.weight * 2  # old weight_norm leaves a tensor that is not a leaf, and cannot be copied
    return layer


class Elsewhere:
    """Makes an optimizer over parameters that no trial could copy."""

    parameters: list[nn.Parameter]

    def __call__(self, _: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(Elsewhere.parameters, lr=0.1)


@pytest.mark.parametrize("steps", [{"tune_seconds": 5.0}, {"tune_seconds": None, "steps": 2000}], ids=str)
@pytest.mark.parametrize(
    "make", [Locked, with_a_history, lambda: nn.Linear(4, 1)], ids=["lock", "view", "opt"]
)
def test_a_run_continues_with_the_plain_plan_when_the_search_is_impossible(
    make: Any, steps: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    model = make()
    Elsewhere.parameters = list(model.parameters())
    optimizer: Any = Elsewhere() if type(model) is nn.Linear and not hasattr(model, "seen") else "adamw"

    result = searched(model, optimizer=optimizer, **steps)

    assert result.plan == Plan(batch_size=result.plan.batch_size)
    assert result.step == steps.get("steps", 12)
    assert "plan search skipped: " in capsys.readouterr().out


# ------------------------------------------------------------------------------------------- the loss


class Running(nn.Module):
    """Divides by a running mean, as many losses do."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(1.0))
        self.calls = 0

    def forward(self, out: Tensor, target: Tensor) -> Tensor:
        loss = mse(out, target)
        self.calls += 1
        self.mean.mul_(0.9).add_(0.1 * loss.detach())
        return loss / self.mean


def counting() -> Any:
    count, mean = 0, torch.tensor(1.0)

    def loss(out: Tensor, target: Tensor, seen: list[int] = []) -> Tensor:  # noqa: B006 - what is tested
        nonlocal count
        count += 1
        seen.append(count)
        mean.mul_(0.9).add_(0.1)
        loss.last = count  # type: ignore[attr-defined]
        return mse(out, target) * count / mean

    loss.last = 0  # type: ignore[attr-defined]
    return loss


def counting_globally(out: Tensor, target: Tensor) -> Tensor:
    count()
    return mse(out, target) * calls


def count() -> None:
    global calls
    calls += 1


@pytest.mark.parametrize(
    "make",
    [
        Running,
        lambda: Running().forward,
        lambda: partial(Running()),
        counting,
        lambda: counting_globally,
    ],
    ids=["module", "method", "partial", "closure", "global"],
)
def test_a_stateful_loss_is_not_affected_by_the_search(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "calls", 0)
    straight = searched(make_model(), make(), tune="off", tune_seconds=None).losses
    monkeypatch.setitem(globals(), "calls", 0)
    monkeypatch.setattr(selection, "CPU_MARGIN", 1e9)  # whatever is found, the plain plan is chosen

    found = searched(make_model(), make())

    assert found.losses == straight


def test_the_model_that_a_loss_sees_is_that_of_the_trial() -> None:
    model = make_model()

    def decayed(out: Tensor, target: Tensor) -> Tensor:
        return mse(out, target) + 0.1 * sum(each.square().sum() for each in model.parameters())

    untouched: list[bool] = []

    class Look:
        def on_start(self, step: int, total: int) -> None:
            untouched.extend(each.grad is None for each in model.parameters())

    searched(model, decayed, callbacks=[Look()])

    assert untouched == [True] * 4


# ------------------------------------------------------------------------------------- random numbers


def drawn() -> list[float]:
    return [float(torch.rand(())), random.random(), float(numpy.random.rand())]


def test_random_state_is_restored_after_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    def first_draws(**options: Any) -> tuple[list[float], list[float]]:
        model = make_model()
        torch.manual_seed(1)
        random.seed(1)
        numpy.random.seed(1)
        step = fj.step(model, mse, device="cpu", compile=False, **options)
        return [float(step(rows())) for _ in range(3)], drawn()

    monkeypatch.setattr(selection, "CPU_MARGIN", 1e9)

    assert first_draws(tune_seconds=1.5) == first_draws(tune="off")


# --------------------------------------------------------------------------------------------- crashes


class Picky(nn.Module):
    """Fails under one of the candidates only."""

    def __init__(self, do: Any) -> None:
        super().__init__()
        self.layer, self.do = nn.Linear(4, 1), do

    def forward(self, given: Tensor) -> Tensor:
        if torch.is_autocast_enabled("cpu"):
            self.do()
        found: Tensor = self.layer(given)
        return found


def hang() -> None:
    hang_and_expire()


@pytest.mark.parametrize(("do", "why"), [(os.abort, "crashed (SIGABRT)"), (hang, "did not end within")])
def test_a_candidate_that_crashes_or_hangs_on_a_cpu_is_discarded(
    do: Any,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    expire_hung_trials(monkeypatch, tmp_path)
    monkeypatch.setattr(selection, "fast_half_precision", lambda _: "bf16")
    monkeypatch.setattr(trials, "TIMED_S", 0.01)

    result = searched(Picky(do), tune_seconds=240.0, steps=5)

    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("bf16")]
    assert why in line
    assert result.step == 5


def test_a_kept_plan_is_used_without_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    def at_once(_: TrialRunner, plan: Plan) -> TrialOutcome:
        return TrialOutcome(plan=plan, samples_per_second=200.0 if plan.fused else 100.0)

    monkeypatch.setattr(TrialRunner, "try_out", at_once)
    first = searched(make_model(), tune_seconds=30.0)
    monkeypatch.setattr(search, "TrialProcess", None)

    assert searched(make_model(), tune_seconds=30.0).plan == first.plan
    assert first.plan.fused
