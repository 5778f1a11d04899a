"""Results of user functions and options of the wrong type are refused with a fix."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from falaj.training.runtime.agent.agents import FolderAgent
from falaj.training.runtime.errors import CheckpointMismatch, InvalidTraining
from falaj.training.runtime.fit import FitResult, fit
from falaj.training.runtime.planning.nvml import is_cuda_available


def rows() -> tuple[Tensor, Tensor]:
    inputs = torch.randn(40, 4, generator=torch.Generator().manual_seed(2))
    return inputs, inputs.sum(1, keepdim=True)


def train(loss: Any = nn.functional.mse_loss, **changes: Any) -> FitResult:
    torch.manual_seed(0)
    options: dict[str, Any] = {"batch_size": 8, "steps": 4, "device": "cpu", "tune": "off", **changes}
    model = options.pop("model", None) or nn.Linear(4, 1)
    return fit(model, loss, rows(), **options)


@pytest.mark.parametrize(
    ("where", "given"),
    [
        ("run", 5),
        ("run", ""),
        ("run", type("Half", (), {"log": print, "say": print})()),
        ("pipeline_cuts", 5),
        ("pipeline_cuts", [5]),
        ("pipeline_cuts", "4"),
        ("tensor_plan", 5),
        ("tensor_plan", {"0": "diagonal"}),
        ("tensor_plan", {0: "row"}),
        ("memory", "much"),
        ("optimizer", lambda parameters: 5),
        ("schedule", lambda: 1.0),
        ("schedule", lambda step: "x"),
        ("schedule", lambda step: None),
        ("schedule", lambda step: float("nan")),
        ("evaluate", 5),
        ("evaluate", lambda model: None),
        ("evaluate", lambda model: "0.5"),
        ("evaluate", lambda model: [1.0]),
        ("evaluate", lambda model: torch.ones(2)),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_wrong_option_is_named_with_its_value_the_allowed_values_and_a_fix(where: str, given: Any) -> None:
    options = {"evaluate_every": 2} if where == "evaluate" else {}

    with pytest.raises(InvalidTraining) as refusal:
        train(**options, **{where: given})

    assert [fault.where for fault in refusal.value.faults] == [where]
    assert_complete(refusal.value)


def test_a_memory_limit_below_the_parameters_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    train(memory=39)
    assert (
        "memory=39 cannot be kept: the parameters and their gradients alone take 40 bytes"
        in capsys.readouterr().out
    )

    train(memory=40)
    assert "cannot be kept" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "loss",
    [
        lambda out, _: out.mean() * 1j,
        lambda out, _: out,
        lambda out, _: 1.0,
        lambda out, _: out.detach().mean(),
    ],
    ids=["complex", "vector", "number", "no gradient"],
)
def test_a_loss_that_cannot_be_trained_on_is_refused_with_a_working_one(loss: Any) -> None:
    with pytest.raises(InvalidTraining) as refusal:
        train(loss)

    assert_complete(refusal.value)


def test_an_invalid_callback_is_refused_with_a_working_one() -> None:
    with pytest.raises(InvalidTraining) as refusal:
        train(callbacks=[5])

    assert_complete(refusal.value)


@pytest.mark.skipif(is_cuda_available(), reason="there is a GPU here")
def test_a_missing_gpu_is_reported_with_the_available_ones() -> None:
    with pytest.raises(InvalidTraining) as refusal:
        train(device="cuda")

    assert_complete(refusal.value)


@pytest.mark.parametrize(
    "change",
    [{"seed": 1}, {"batch_size": 4}, {"model": nn.Linear(4, 2)}, {"optimizer": "sgd"}],
    ids=["seed", "batch size", "model", "optimizer"],
)
def test_a_checkpoint_mismatch_is_reported_with_two_fixes(tmp_path: Path, change: dict[str, Any]) -> None:
    train(run=tmp_path)

    with pytest.raises(CheckpointMismatch) as refusal:
        train(run=tmp_path, steps=6, **change)

    fixes = [fault.fix for fault in refusal.value.faults if fault.fix]
    assert len(fixes) == 1
    assert fixes[0].endswith('; or another run="…" to start again')


def test_valid_options_are_accepted(tmp_path: Path) -> None:
    numbers: list[Any] = [lambda _: 1, lambda _: torch.tensor(0.5), lambda _: True]
    for evaluate in numbers:
        assert train(evaluate=evaluate, evaluate_every=2).best is not None
    assert train(schedule=lambda step, *, slope=0.9: slope**step).step == 4
    assert train(schedule=lambda step: torch.tensor(0.5)).losses == train(schedule=lambda step: 0.5).losses
    assert train(memory=2**30, tensor_plan={"0": "column"}, pipeline_cuts=("0",)).step == 4
    agent = FolderAgent(tmp_path)
    assert train(run=agent).step == 4
    agent.close()
    assert train(run=str(tmp_path)).resumed_from == 4


def test_an_empty_run_name_leaves_no_files_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    with pytest.raises(InvalidTraining, match="run"):
        train(run="")

    assert os.listdir() == []


def assert_complete(refusal: InvalidTraining) -> None:
    for fault in refusal.faults:
        assert fault.given is not None
        assert fault.allowed
        assert fault.fix
