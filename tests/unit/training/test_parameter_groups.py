"""Changed values in an optimizer's parameter groups are restored when the run resumes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

from falaj.training.runtime.fit import FitResult, fit
from falaj.training.runtime.step.parameter_groups import ParameterGroupState


class Changer:
    """Makes the optimizer, and changes an option of it after the third step."""

    def __init__(self, name: str, value: Any, **options: Any) -> None:
        self._name, self._value, self._options = name, value, options
        self.optimizer: optim.Optimizer | None = None

    def make(self, parameters: Any) -> optim.Optimizer:
        self.optimizer = optim.AdamW(parameters, foreach=False, **{"lr": 0.1, **self._options})
        return self.optimizer

    def on_step(self, step: int, loss: float) -> None:
        assert self.optimizer is not None
        if step == 3:
            for group in self.optimizer.param_groups:
                group[self._name] = self._value


def train(changer: Changer, *, steps: int = 8, run: Path | None = None) -> FitResult:
    torch.manual_seed(0)
    rows = torch.randn(40, 4, generator=torch.Generator().manual_seed(2))
    data, model = (rows, rows.sum(1, keepdim=True)), nn.Linear(4, 1)
    options: dict[str, Any] = {"batch_size": 8, "device": "cpu", "tune": "off", "run": run}
    options |= {"optimizer": changer.make, "callbacks": [changer]}
    return fit(model, nn.functional.mse_loss, data, steps=steps, **options)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Changer("betas", (0.5, 0.9)),
        lambda: Changer("betas", [0.5, 0.9], betas=[0.9, 0.999]),
        lambda: Changer("lr", torch.tensor(1e-3)),
        lambda: Changer("lr", torch.tensor(1e-3), lr=torch.tensor(0.1)),
        lambda: Changer("lr", torch.tensor([1e-3]), lr=torch.tensor([0.1])),
        lambda: Changer("lr", 1e-3, lr=torch.tensor(0.1)),
        lambda: Changer("weight_decay", 0.5),
        lambda: Changer("maximize", True),
    ],
    ids=["pair", "list", "lr to tensor", "lr tensor", "lr of one", "lr to number", "decay", "flag"],
)
def test_a_resumed_run_keeps_changed_options(tmp_path: Path, make: Callable[[], Changer]) -> None:
    straight = train(make())

    first = train(make(), steps=5, run=tmp_path)
    second = train(make(), run=tmp_path)

    assert second.resumed_from == 5
    assert first.losses + second.losses == straight.losses
    third = train(make(), steps=12, run=tmp_path)
    assert third.losses == train(make(), steps=12).losses[8:]


@pytest.mark.parametrize("kept", [0.5, {"tensor": 0.5, "dtype": "float32"}], ids=["number", "tensor"])
def test_a_tensor_option_is_filled_in_place(kept: Any) -> None:
    held = torch.tensor(0.1)
    optimizer = optim.AdamW(nn.Linear(4, 1).parameters(), lr=held, foreach=False)
    state = ParameterGroupState(optimizer, has_schedule=False)

    state.put([{"lr": kept}])

    assert optimizer.param_groups[0]["lr"] is held
    assert held.item() == 0.5
    assert state.changed() == [{"lr": {"tensor": 0.5, "dtype": "float32"}}]


def test_unchanged_options_come_from_the_current_code(tmp_path: Path) -> None:
    train(Changer("weight_decay", 0.01, lr=torch.tensor(0.1)), steps=5, run=tmp_path)
    later = Changer("weight_decay", 0.01, lr=torch.tensor(0.25), betas=(0.8, 0.9))

    train(later, run=tmp_path)

    assert later.optimizer is not None
    group = later.optimizer.param_groups[0]
    assert (group["lr"].item(), group["betas"]) == (0.25, (0.8, 0.9))
