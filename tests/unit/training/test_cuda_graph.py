"""CUDA graph steps up to the capture: which batches are replayed, and when the graph is abandoned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from falaj.training.runtime.data.batches import BatchPlan
from falaj.training.runtime.data.dataloading.loaders import InlineLoader
from falaj.training.runtime.data.sources import DatasetSource
from falaj.training.runtime.parallel.process_group import ProcessGroup
from falaj.training.runtime.parallel.strategies import SingleProcessStrategy
from falaj.training.runtime.planning.plan import Plan
from falaj.training.runtime.step.cuda_graph import CudaGraphStep
from falaj.training.runtime.step.engine import StepEngine
from falaj.training.runtime.step.micro_batches import MicroBatchReader
from falaj.training.runtime.step.rng import StepRng
from falaj.training.runtime.step.step import Step

CPU = torch.device("cpu")
BATCHES = BatchPlan(32, 8, seed=1)


class Samples:
    """Rows that are read one by one; those of the second batch may be narrower."""

    def __init__(self, *, narrow: int = 4) -> None:
        self._rows = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
        self._second = set(BATCHES.indices(2).tolist()) if narrow < 4 else set()
        self._narrow = narrow

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row = self._rows[index]
        return row[: self._narrow] if index in self._second else row, row.sum().reshape(1)


class Mean(nn.Module):
    """Accepts rows of any width."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, rows: Tensor) -> Tensor:
        return self.scale * rows.mean(1, keepdim=True)


class Replacing(Mean):
    """Replaces its buffer in each step, or in the first one only."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, rows: Tensor) -> Tensor:
        if self.times:
            self.times, self.seen = self.times - 1, self.seen + rows.mean()
        return super().forward(rows) + self.seen


def make_engine(
    data: Samples, messages: list[str], *, graphed: bool = True, model: nn.Module | None = None
) -> StepEngine:
    model, world = model or Mean(), ProcessGroup()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = Step(
        model,
        nn.functional.mse_loss,
        optimizer,
        device=CPU,
        rng=StepRng(1, CPU),
        strategy=SingleProcessStrategy(model, world),
    )
    source = DatasetSource(data)
    reader = MicroBatchReader(source, seed=1, count=1)
    graph = CudaGraphStep(step, source, batch_size=8) if graphed else None
    return StepEngine(
        reader,
        InlineLoader(reader),
        step,
        plan=Plan(),
        graph=graph,
        world=world,
        can_split=True,
        notify=messages.append,
    )


def losses(engine: StepEngine, steps: range) -> list[float]:
    found: list[float] = []
    for number in steps:
        engine.run_step(number, BATCHES.indices(number), lambda loss: found.append(loss.item()))
    return found


@pytest.fixture(autouse=True)
def without_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace CUDA streams, which are all that the steps before the capture need."""

    def on_the_spot(_: CudaGraphStep, work: Any) -> Tensor:
        found: Tensor = work()
        return found

    monkeypatch.setattr(torch.cuda, "Stream", lambda _: None)
    monkeypatch.setattr(CudaGraphStep, "_aside", on_the_spot)


def test_steps_before_the_capture_are_those_of_the_plain_loop() -> None:
    messages: list[str] = []

    assert losses(make_engine(Samples(), messages), range(1, 4)) == losses(
        make_engine(Samples(), [], graphed=False), range(1, 4)
    )
    assert messages == []


@pytest.mark.parametrize("narrow", [1, 3])
def test_a_batch_of_another_shape_does_not_use_the_graph(narrow: int) -> None:
    messages: list[str] = []
    data = Samples(narrow=narrow)

    assert losses(make_engine(data, messages), range(1, 4)) == losses(
        make_engine(data, [], graphed=False), range(1, 4)
    )
    assert "continuing without it" in messages[0]


def test_a_graph_is_dropped_when_batches_are_split_into_micro_batches() -> None:
    engine, plain = make_engine(Samples(), []), make_engine(Samples(), [], graphed=False)
    for each in (engine, plain):
        each.set_micro_batches(2)

    assert losses(engine, range(1, 4)) == losses(plain, range(1, 4))


def test_a_buffer_that_forward_replaces_is_not_lost_in_a_graph() -> None:
    messages: list[str] = []
    plain = make_engine(Samples(), [], graphed=False, model=Replacing(9))

    found = losses(make_engine(Samples(), messages, model=Replacing(9)), range(1, 7))

    assert found == losses(plain, range(1, 7))
    assert messages == [
        "step 4: cannot be captured as a CUDA graph (forward replaces the buffer seen, instead of changing it in "
        "place); continuing without it"
    ]


def test_a_buffer_that_is_made_in_the_first_step_may_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[int] = []
    monkeypatch.setattr(
        CudaGraphStep, "_capture", lambda _, number: captured.append(number) or torch.zeros(())
    )

    losses(make_engine(Samples(), [], model=Replacing(1)), range(1, 5))

    assert captured == [4]
