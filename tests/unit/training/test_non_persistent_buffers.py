"""Non-persistent buffers are saved where training changes them, and come from the code where it does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import falaj as fj
from falaj.training.runtime.custom_loop import TrainingStep
from falaj.training.runtime.loop import FitResult
from falaj.training.runtime.step.non_persistent_buffers import NonPersistentBuffers

ROWS = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
TARGET = ROWS.sum(1, keepdim=True)


class Counting(nn.Module):
    """Uses counters in its buffers: changed in place, replaced, and growing from an empty tensor."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.line = nn.Linear(4, 1)
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()), persistent=False)
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(4), persistent=False)
        self.seen: Tensor | None
        self.register_buffer("seen", None, persistent=False)
        self.scale: Tensor
        self.register_buffer("scale", torch.tensor(scale), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
            self.seen = (
                x.mean(0, keepdim=True) if self.seen is None else torch.cat([self.seen, x.mean(0)[None]])
            )
        more = 0.0 if self.seen is None else self.seen.sum()
        found: Tensor = self.line(x - self.mean) * self.scale * (1 + 0.1 * self.calls) + more
        return found


def train(model: nn.Module, steps: int, run: Path | None = None) -> FitResult:
    options: dict[str, Any] = {"batch_size": 8, "seed": 3, "device": "cpu", "tune": "off", "run": run}
    return fj.fit(model, nn.functional.mse_loss, (ROWS, TARGET), steps=steps, **options)


def test_a_resumed_run_is_exactly_equal(tmp_path: Path) -> None:
    straight, resumed = Counting(), Counting()
    losses = train(straight, 9).losses

    train(Counting(), 4, tmp_path)
    result = train(resumed, 9, tmp_path)

    assert result.resumed_from == 4
    assert result.losses == losses[4:]
    assert all(torch.equal(a, b) for a, b in zip(straight.buffers(), resumed.buffers(), strict=True))
    assert resumed.seen is not None
    assert len(resumed.seen) == 9


def test_restored_buffers_are_saved_again(tmp_path: Path) -> None:
    losses = train(Counting(), 9).losses

    for steps in (2, 5):
        train(Counting(), steps, tmp_path)

    assert train(Counting(), 9, tmp_path).losses == losses[5:]


def test_unchanged_buffers_come_from_the_code(tmp_path: Path) -> None:
    train(Counting(), 4, tmp_path)
    model = Counting(scale=0.5)

    train(model, 6, tmp_path)

    assert model.scale.item() == 0.5
    assert model.calls.item() == 6


def test_a_checkpoint_without_such_buffers_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as before:
        before.setattr(NonPersistentBuffers, "changed", lambda _: {})
        train(Counting(), 4, tmp_path)
    model = Counting()

    result = train(model, 6, tmp_path)

    assert result.resumed_from == 4
    assert model.calls.item() == 2


def test_a_custom_loop_keeps_them_too() -> None:
    def steps() -> TrainingStep:
        return fj.step(Counting(), nn.functional.mse_loss, device="cpu", tune="off", seed=1)

    straight, first, second = steps(), steps(), steps()
    batch = ROWS, TARGET
    losses = [straight(batch).item() for _ in range(4)]

    for _ in range(2):
        first(batch)
    second.load_state_dict(first.state_dict())

    assert [second(batch).item() for _ in range(2)] == losses[2:]
