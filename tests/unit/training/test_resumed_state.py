"""State and random numbers of a model or a loss beside its parameters are restored when a run resumes."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from falaj.training.runtime.errors import InvalidTraining
from falaj.training.runtime.fit import fit

ROWS = torch.randn(64, 4, generator=torch.Generator().manual_seed(2))
mse = nn.functional.mse_loss


class Drawing(nn.Module):
    """Skips its second layer at random, by a generator that is not torch's."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 1)
        self._draw = draw

    def forward(self, rows: Tensor) -> Tensor:
        found = self.first(rows).tanh()
        if self._draw() < 0.5:
            found = self.second(found).tanh()
        out: Tensor = self.last(found)
        return out


class Centred(nn.Module):
    """A loss with a running mean of the targets."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(1))

    def forward(self, out: Tensor, target: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(0.1 * target.mean())
        return mse(out, target - self.mean)


def train(model: nn.Module, loss: Any, **options: Any) -> list[float]:
    target = ROWS.sum(1, keepdim=True) + 3.0
    given = {"batch_size": 8, "steps": 12, "tune": "off", "device": "cpu", "accumulate": 2, **options}
    return fit(model, loss, (ROWS, target), **given).losses


@pytest.mark.parametrize("draw", [random.random, np.random.random], ids=["python", "numpy"])
def test_random_numbers_of_a_model_depend_on_the_step_only(tmp_path: Path, draw: Callable[[], float]) -> None:
    straight = train(Drawing(draw), mse)

    train(Drawing(draw), mse, run=tmp_path, steps=5)
    random.seed(99)
    np.random.seed(99)
    rest = train(Drawing(draw), mse, run=tmp_path)

    assert rest == straight[5:]


def test_the_state_of_a_loss_is_in_the_checkpoint(tmp_path: Path) -> None:
    torch.manual_seed(0)
    weights = nn.Linear(4, 1).state_dict()

    def model() -> nn.Module:
        made = nn.Linear(4, 1)
        made.load_state_dict(weights)
        return made

    straight = train(model(), Centred())
    train(model(), Centred(), run=tmp_path, steps=5)

    assert train(model(), Centred(), run=tmp_path) == straight[5:]


def test_a_loss_with_untrained_parameters_is_refused() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, out: Tensor, target: Tensor) -> Tensor:
            return mse(out, target) * self.weight.sum()

    with pytest.raises(InvalidTraining) as refused:
        train(nn.Linear(4, 1), Weighted())

    assert "parameters to be trained: weight" in str(refused.value)
    assert "requires_grad_(False)" in str(refused.value)
