"""`fit` trains, evaluates and stops as documented, and refuses what it cannot do."""

from __future__ import annotations

import math
import random
import shutil
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from falaj.training.runtime.agent.agents import read_metrics
from falaj.training.runtime.checkpointing.sample_ledger import expected_head
from falaj.training.runtime.data.batches import BatchPlan
from falaj.training.runtime.errors import InvalidTraining, LossNotFinite, RaggedBatch
from falaj.training.runtime.evaluation import BestScore
from falaj.training.runtime.fit import FitResult, Plan, fit

mse = nn.functional.mse_loss


def rows(count: int = 40) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(count, 4, generator=torch.Generator().manual_seed(2))
    return inputs, inputs.sum(1, keepdim=True)


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))


def train(data: Any = None, *, model: nn.Module | None = None, loss: Any = mse, **changes: Any) -> FitResult:
    options: dict[str, Any] = {"batch_size": 8, "device": "cpu", **changes}
    if "epochs" not in options:
        options.setdefault("steps", 10)
    return fit(model or make_model(), loss, rows() if data is None else data, **options)


# ------------------------------------------------------------------------------------------- training


def test_fit_gives_the_losses_of_a_plain_loop() -> None:
    model, plan, (inputs, targets) = make_model(), BatchPlan(40, 8, seed=0), rows()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    expected = []
    for step in range(1, 11):
        batch = plan.indices(step)
        loss = mse(model(inputs[batch]), targets[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())

    result = train()

    assert result.losses == expected
    assert result.ledger == expected_head(plan, 10)


def test_fit_reduces_the_loss() -> None:
    result = train(epochs=60, lr=0.01, schedule="cosine", warmup=10, clip=1.0)

    assert (result.step, result.stopped) == (300, "done")
    assert sum(result.losses[-5:]) < 0.05 * sum(result.losses[:5])
    assert result.samples_per_second > 0
    assert 0 < result.goodput <= 1


@pytest.mark.parametrize(
    "optimizer", ["adam", "sgd", "momentum", lambda ps: torch.optim.RMSprop(ps, lr=0.01)]
)
def test_optimizers(optimizer: Any, tmp_path: Path) -> None:
    result = train(epochs=20, lr=0.01, optimizer=optimizer, run=tmp_path)

    assert result.losses[-1] < result.losses[0]


def test_micro_batches_add_up_to_the_batch() -> None:
    whole, parts = (
        train(rows(43), epochs=2),
        train(rows(43), epochs=2, accumulate=3),
    )  # 43: the last one is short

    assert parts.losses == pytest.approx(whole.losses, rel=1e-5)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_stays_near_fp32(precision: str) -> None:
    assert train(precision=precision).losses == pytest.approx(train().losses, rel=0.05)


@pytest.mark.slow
def test_compile_gives_the_same_losses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch._inductor.config as inductor

    if shutil.which("g++") is None:
        pytest.skip("torch.compile: the package g++ is not installed")
    monkeypatch.setattr(inductor, "compile_threads", 1)  # what speeds up large models slows a small one down
    monkeypatch.setattr(inductor, "cpp_cache_precompile_headers", False)
    monkeypatch.setattr(inductor.cpp, "simdlen", 1)

    compiled = train(compile=True, steps=3, model=small_model())

    assert capsys.readouterr().out == ""  # it did not fall back
    assert compiled.losses == pytest.approx(train(steps=3, model=small_model()).losses, rel=1e-4)


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 1), nn.Tanh())


def test_a_failed_compilation_is_reported_and_training_continues(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from torch._dynamo.exc import TorchDynamoException

    def broken(_: nn.Module) -> Any:
        def fail(*_: Any) -> Any:
            raise TorchDynamoException("no compiler here")

        return fail

    monkeypatch.setattr(torch, "compile", broken)

    assert train(compile=True).losses == train().losses
    assert "torch.compile failed (no compiler here); continuing without it" in capsys.readouterr().out


def test_micro_batches_done_before_a_failed_compilation_count_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch._dynamo.exc import TorchDynamoException

    def breaking(measure: Any) -> Any:
        calls = count(1)

        def run(*given: Any) -> Any:
            if next(calls) == 4:
                raise TorchDynamoException("no compiler for this shape")
            return measure(*given)

        return run

    monkeypatch.setattr(torch, "compile", breaking)

    for options in ({}, {"exact": True}):
        given = {"accumulate": 4, "steps": 3, **options}
        assert train(compile=True, **given).losses == train(**given).losses


def test_a_learning_rate_that_is_a_tensor_follows_the_schedule() -> None:
    def losses(rate: float | Tensor) -> list[float]:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        return train(model=model, optimizer=optimizer, schedule="linear").losses

    assert losses(torch.tensor(0.125)) == losses(0.125)


def test_a_plan_with_a_graph_is_trained_without_one_on_a_cpu() -> None:
    assert train(tune=Plan(graph=True)).losses == train(tune="off").losses


def test_a_given_plan_keeps_the_micro_batches_of_an_exact_run() -> None:
    exact = train(exact=True, tune="off")

    assert train(exact=True, tune=Plan()).losses == exact.losses
    assert exact.plan.micro_batches > 1


def test_shared_parameters_stay_shared(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.decode = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.decode.weight = self.encode.weight

        def forward(self, rows: Tensor) -> Tensor:
            return self.decode(self.encode(rows))

    first = train(rows()[0], model=Tied(), steps=5, run=tmp_path)
    model = Tied()
    second = train(rows()[0], model=model, run=tmp_path)

    assert second.resumed_from == first.step == 5
    assert model.decode.weight is model.encode.weight


def test_datasets_and_tensors_give_the_same() -> None:
    inputs, targets = rows()
    by_rows = list(zip(inputs, targets, strict=True))

    assert train(by_rows).losses == train().losses
    assert train(torch.utils.data.TensorDataset(inputs, targets)).losses == train().losses


def test_a_dict_is_given_whole_to_the_model_and_the_loss() -> None:
    class ByName(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_model()

        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            return self.net(batch["x"])

    inputs, targets = rows()
    columns = {"x": inputs, "y": targets}

    result = train(columns, model=ByName(), loss=lambda out, batch: mse(out, batch["y"]), accumulate=2)

    assert result.losses == train(accumulate=2).losses


def test_augmentation_is_seeded_by_the_step() -> None:
    class Noisy:
        def __len__(self) -> int:
            return 40

        def __getitem__(self, index: int) -> tuple[Tensor, float]:
            return torch.randn(4), random.random()

    def loss(out: Tensor, target: Tensor) -> Tensor:
        return mse(out.squeeze(1).double(), target)

    first = train(Noisy(), loss=loss)
    torch.manual_seed(9)
    random.seed(9)

    assert train(Noisy(), loss=loss).losses == first.losses


# ----------------------------------------------------------------------------------------- evaluation


def test_evaluation_on_data_keeps_the_best(tmp_path: Path) -> None:
    result = train(epochs=3, evaluate=rows(15), run=tmp_path)

    scores = {metric.step: metric.value for metric in read_metrics(tmp_path) if metric.name == "evaluation"}
    assert list(scores) == [5, 10, 15]
    assert result.best == min(
        (BestScore(step, score) for step, score in scores.items()), key=lambda best: best.score
    )


def test_early_stopping_ends_the_run_for_good(tmp_path: Path) -> None:
    scores = iter([0.1, 0.9, 0.5, math.nan, 1.0])
    options: dict[str, Any] = {"better": "higher", "patience": 2, "evaluate_every": 2, "run": tmp_path}

    stopped = train(evaluate=lambda model: next(scores), **options)
    again = train(evaluate=lambda model: next(scores), **options)

    assert (stopped.stopped, stopped.step, stopped.best) == ("patience", 8, BestScore(4, 0.9))
    assert (again.stopped, again.step, again.losses) == ("patience", 8, [])


def test_evaluation_sees_the_model_in_evaluation_mode_and_leaves_it_training() -> None:
    modes = []
    model = make_model()

    train(model=model, evaluate=lambda model: modes.append(model.training) or 1.0, evaluate_every=5)

    assert modes == [False, False]
    assert model.training


# --------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_before_the_update(bad: float, tmp_path: Path) -> None:
    inputs, targets = rows()
    inputs[BatchPlan(40, 8, seed=0).indices(4)[2]] = bad
    model = make_model()

    with pytest.raises(LossNotFinite) as stop:
        train((inputs, targets), model=model, run=tmp_path, checkpoint_every=2)

    first = ", ".join(map(str, BatchPlan(40, 8, seed=0).indices(4).tolist()))
    assert stop.value.step == 4
    assert "at step 4; the last good checkpoint: of step 2" in str(stop.value)
    assert f"8 samples: {first}" in str(stop.value)
    assert all(p.isfinite().all() for p in model.parameters())
    assert [metric.step for metric in read_metrics(tmp_path)] == [1, 2, 3]


def test_a_gradient_that_is_not_finite_does_not_reach_a_checkpoint(tmp_path: Path) -> None:
    def loss(out: Tensor, _: Tensor) -> Tensor:
        return torch.sqrt((out - out.detach()).abs()).mean()  # 0, with an infinite slope

    with pytest.raises(LossNotFinite, match=r"parameters are not finite after step 1; .* of step 0"):
        train(loss=loss, run=tmp_path, checkpoint_every=1)

    assert [path.stem for path in (tmp_path / "checkpoints").iterdir()] == ["step-0000000000"]


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"precision": "fp8"}, "precision"),
        ({"steps": None}, "steps"),
        ({"epochs": 1, "steps": 1}, "steps"),
        ({"steps": 0}, "steps"),
        ({"batch_size": 0}, "batch_size"),
        ({"accumulate": 9}, "accumulate"),
        ({"seed": -1}, "seed"),
        ({"lr": math.nan}, "lr"),
        ({"clip": 0.0}, "clip"),
        ({"patience": 1}, "patience"),
        ({"checkpoint_every": 0}, "checkpoint_every"),
        ({"optimizer": "magic"}, "optimizer"),
        ({"schedule": "magic"}, "schedule"),
        ({"device": "abacus"}, "device"),
        ({"batch_size": 41}, "batch_size"),
    ],
    ids=str,
)
def test_wrong_options_are_named(options: dict[str, Any], where: str) -> None:
    with pytest.raises(InvalidTraining) as refusal:
        train(**options)

    assert [fault.where for fault in refusal.value.faults] == [where]


def test_all_wrong_options_are_named_at_once() -> None:
    with pytest.raises(InvalidTraining) as refusal:
        train(precision="fp8", lr=-1.0, batch_size=0)

    assert {fault.where for fault in refusal.value.faults} == {"precision", "lr", "batch_size"}


@pytest.mark.parametrize(
    "data",
    [
        (torch.zeros(0, 4), torch.zeros(0, 1)),
        (torch.zeros(9, 4), torch.zeros(8, 1)),
        (torch.zeros(9, 4),),
        [],
        iter([1, 2]),
        {},
        {"x": "words"},
    ],
    ids=["empty", "lengths", "no target", "no samples", "iterator", "no columns", "no tensor"],
)
def test_data_that_cannot_be_used_is_refused(data: Any) -> None:
    with pytest.raises(InvalidTraining, match="the data cannot be used"):
        train(data)


def test_a_ragged_batch_names_the_sample() -> None:
    samples = [(torch.zeros(4), torch.zeros(1))] * 39 + [(torch.zeros(5), torch.zeros(1))]

    with pytest.raises(RaggedBatch, match=r"sample 39 is \(\[5\], \[1\]\)|sample 39 is"):
        train(samples, epochs=1)


def test_a_model_without_parameters_is_refused() -> None:
    frozen = make_model().requires_grad_(False)

    with pytest.raises(InvalidTraining, match="no parameters"):
        train(model=nn.ReLU())
    with pytest.raises(InvalidTraining, match="all parameters are frozen"):
        train(model=frozen)


def test_a_loss_that_is_no_scalar_is_refused() -> None:
    with pytest.raises(InvalidTraining, match=r"a tensor of shape \[8, 1\]"):
        train(loss=lambda out, target: out - target)
    with pytest.raises(InvalidTraining, match="without a gradient"):
        train(loss=lambda out, target: target.mean())


# ---------------------------------------------------------------------------------------------- modes


def with_norm() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 1))


@pytest.mark.parametrize("evaluate", [lambda _: 0.5, rows(8)], ids=["function", "data"])
def test_modules_in_evaluation_mode_stay_there_through_an_evaluation(evaluate: Any) -> None:
    model = with_norm()
    norm: Any = model[1].eval()
    mean = norm.running_mean.clone()

    train(model=model, evaluate=evaluate, evaluate_every=3)

    assert [module.training for module in model] == [True, False, True, True]
    assert norm.running_mean.equal(mean)


def test_a_model_that_is_all_in_evaluation_mode_is_trained_in_training_mode() -> None:
    model = with_norm().eval()

    result = train(model=model)

    assert result.losses == train(model=with_norm()).losses
    assert all(module.training for module in model.modules())


def test_a_model_that_overrides_train_is_switched_back_by_its_own_method() -> None:
    """For example, one that folds weights together to evaluate."""

    class Folding(nn.Linear):
        is_folded = False

        def train(self, mode: bool = True) -> Any:
            self.is_folded = not mode
            return super().train(mode)

        def forward(self, given: Tensor) -> Tensor:
            assert self.is_folded != self.training
            return super().forward(given)

    train(
        model=nn.Sequential(Folding(4, 4), nn.Dropout(), nn.Linear(4, 1)), evaluate=rows(8), evaluate_every=3
    )
