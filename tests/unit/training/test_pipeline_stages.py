"""The stages of a model together compute what it computes, and each holds only its own layers."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from falaj.training.runtime.errors import InvalidTraining
from falaj.training.runtime.options import FitOptions
from falaj.training.runtime.parallel.pipeline.partition import balanced_starts, partition_model
from falaj.training.runtime.parallel.pipeline.serialization import assemble, describe, empty_tensors
from falaj.training.runtime.parallel.pipeline.stage import StageRunner, extract_stage
from falaj.training.runtime.parallel.pipeline.step import schedule_1f1b
from parallel_models import FEATURES, make_model

CPU = torch.device("cpu")


class Changing(nn.Module):
    """Behaves differently in evaluation mode, or at each call."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.a, self.b, self.how = nn.Linear(4, 4), nn.Linear(4, 4), how

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        if self.how == "noise":
            x = x + torch.randn(4)
        elif self.how == "chance":
            x = x * random.random()
        elif self.training:
            x = x.relu()
        found: Tensor = self.b(x)
        return found


class Counting(nn.Module):
    """Counts its steps in a buffer, between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        found: Tensor = self.b(self.a(x) * self.count)
        return found


class Optional(nn.Module):
    """Accepts an optional second input."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        found: Tensor = self.b(self.a(x))
        return found if mask is None else found * mask


def parts_of(model: nn.Module, count: int, cuts: list[str] | None = None) -> list[nn.Module]:
    stages = partition_model(model, count=count, cuts=cuts)
    found = []
    for number in range(count):
        own = copy.deepcopy(model)
        found.append(extract_stage(own, partition_model(own, count=count, cuts=cuts), number, device=CPU))
        assert all(tensor.is_meta for tensor in own.state_dict().values())
    assert len(stages.places) == count
    return found


def through(parts: list[nn.Module], *inputs: Tensor) -> Any:
    values: Any = ()
    for part in parts:
        values = part(inputs, values)
    return values


def held(part: nn.Module) -> set[str]:
    return {name for name, tensor in part.state_dict().items() if not tensor.is_meta}


@pytest.mark.parametrize("kind", ["layers", "blocks"])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_the_stages_give_the_results_of_the_model(kind: str, count: int) -> None:
    model = make_model(kind, dropout=0.3, unused=kind == "blocks")
    x = torch.randn(5, FEATURES)

    parts = parts_of(model, count)

    for mode in (True, False):
        model.train(mode)
        expected = model(torch.manual_seed(1) and x)
        for part in parts:
            part.train(mode)
        assert torch.equal(through(parts, torch.manual_seed(1) and x), expected)


def test_each_tensor_has_memory_in_one_stage() -> None:
    model = make_model("blocks", unused=True)

    parts = parts_of(model, 3)

    names = [name for part in parts for name in held(part)]
    assert sorted(names) == sorted(model.state_dict())
    assert {"unused.weight", "shift"} <= held(parts[0])


def test_a_buffer_is_changed_when_a_stage_runs_and_not_before() -> None:
    model = Counting()
    x = torch.randn(2, 4)

    parts = parts_of(model, 2)

    assert float(model.count) == 0.0
    for _ in range(2):
        assert torch.equal(through(parts, x), model(x))


def test_stages_have_about_equally_many_parameters() -> None:
    sizes = [1, 9, 9, 9, 9, 1]

    assert balanced_starts(sizes, [1, 2, 3, 4, 5], count=2) == [3]
    assert balanced_starts(sizes, [1, 2, 3, 4, 5], count=3) == [2, 4]
    assert balanced_starts(sizes, [3], count=3) is None


def test_the_user_may_set_the_cuts() -> None:
    parts = parts_of(make_model("layers"), 2, ["1.2"])

    assert {name.split(".")[0] for name in held(parts[1])} == {"1", "2", "3"}
    assert {name[:3] for name in held(parts[1]) if name.startswith("1")} == {"1.2"}


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (make_model("tied"), "read.weight, which is used in more than one stage"),
        (make_model("branches"), "whose forward cannot be traced"),
        (make_model("branches", a_step=1), "is not deterministic"),
        (Changing("mode"), "is not deterministic"),
        (Changing("chance"), "is not deterministic"),
        (Changing("noise"), "makes a tensor that does not come from its inputs"),
        (nn.Sequential(nn.Linear(4, 4), nn.ReLU()), "1 layers with parameters (0)"),
        (
            nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)),
            "stage 0 (0) has nothing to train",
        ),
    ],
)
def test_models_that_cannot_be_split_are_refused_with_the_reason(model: nn.Module, words: str) -> None:
    was_training = model.training

    with pytest.raises(InvalidTraining) as refusal:
        partition_model(model, count=2, cuts=None)

    assert words in str(refusal.value)
    assert "allowed" in str(refusal.value)
    assert model.training == was_training


@pytest.mark.parametrize("cuts", [["9"], ["1.1", "1.2"], ["0"], []])
def test_cuts_that_do_not_exist_are_refused(cuts: list[str]) -> None:
    with pytest.raises(InvalidTraining, match="pipeline_cuts"):
        partition_model(make_model("layers"), count=2, cuts=cuts)


def test_an_input_with_a_default_is_refused() -> None:
    first, _ = parts_of(Optional(), 2)

    assert isinstance(first.forward, StageRunner)
    with pytest.raises(InvalidTraining, match="keep it"):
        first((torch.ones(2, 4), torch.ones(2, 4)), ())


def test_values_are_flattened_and_restored() -> None:
    value = [torch.ones(2, requires_grad=True), (3, None, {"a": torch.tensor([True])}), torch.float32, CPU]
    tensors: list[Tensor] = []

    described = describe(value, tensors)
    buffers = empty_tensors(described, CPU)
    again = assemble(described, iter(tensors), CPU)

    assert [(t.dtype, t.shape, t.requires_grad) for t in buffers] == [
        (torch.float32, (2,), True),
        (torch.bool, (1,), False),
    ]
    assert again[0] is value[0]
    assert again[1:] == [(3, None, {"a": tensors[1]}), torch.float32, CPU]


@pytest.mark.parametrize(("parts", "later_stages"), [(1, 3), (4, 0), (4, 1), (8, 3)])
def test_in_flight_micro_batches_are_bounded_by_the_remaining_stages(parts: int, later_stages: int) -> None:
    done = list(schedule_1f1b(parts, later_stages=later_stages))

    for kind in ("forward", "backward"):
        assert [number for turn, number in done if turn == kind] == list(range(parts))
    under_way = 0
    for turn, _ in done:
        under_way += 1 if turn == "forward" else -1
        assert 0 <= under_way <= later_stages + 1


@pytest.mark.parametrize(
    ("parallel", "accumulate", "batch_size", "expected"),
    [
        ("pipeline", None, 64, 8),
        ("pipeline", 3, 64, 3),
        ("pipeline", None, 5, 5),
        ({"ddp": 2, "pipeline": 2}, None, 64, 8),
        ("ddp", None, 64, 1),
    ],
)
def test_a_pipeline_has_two_micro_batches_a_stage(
    parallel: Any, accumulate: int | None, batch_size: int, expected: int
) -> None:
    options = FitOptions.from_keywords(
        batch_size=batch_size,
        steps=1,
        optimizer="sgd",
        lr=0.1,
        accumulate=accumulate,
        device="cpu",
        tune="off",
        checkpoint_every=1,
        parallel=parallel,
    )

    assert options.micro_batches_over(4) == expected
