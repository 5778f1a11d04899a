"""parallel="auto" chooses a pipeline if nothing else fits, by the traced memory of its stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from falaj.training.runtime.data.sources import open_data
from falaj.training.runtime.errors import InvalidTraining
from falaj.training.runtime.memory.configurations import automatic_layouts
from falaj.training.runtime.memory.estimate import estimate
from falaj.training.runtime.memory.estimator import MemoryEstimate, MemoryEstimator
from falaj.training.runtime.parallel.auto import choose
from falaj.training.runtime.planning.plan import Plan, Precision
from falaj.training.runtime.step.optimizers import OptimizerChoice
from memory_fit import BATCH_SIZE, MODELS, WIDTH, rows, trained

pytestmark = pytest.mark.slow

MIB = 1 << 20
WORKSPACE = 65 * MIB
"""Workspace that is counted for matrix multiplication libraries on a GPU."""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FALAJ_CACHE", str(tmp_path / "cache"))


@pytest.mark.slow
def test_models_that_fit_only_in_stages_are_trained_in_stages(tmp_path: Path) -> None:
    expected = of_model("normed", processes=2, parallel="pipeline")
    memory = round(1.05 * expected.peak_bytes)

    copies, staged, output = trained(
        tmp_path, {"model": "normed", "parallel": "ddp"}, {"model": "normed", "memory": memory}
    )

    assert max(each["peak"] for each in staged) == pytest.approx(expected.peak_bytes, rel=0.1)
    assert copies[0]["peak"] > 1.2 * memory
    assert "parallel: pipeline 2, " in output
    assert "; ddp 2 would need" in output
    assert staged[0]["losses"] == staged[1]["losses"] == pytest.approx(copies[0]["losses"], rel=1e-4)


LAYOUTS: list[dict[str, Any]] = [
    {"parallel": {"fsdp": 2, "tensor": 2}},
    {"parallel": {"fsdp": 2, "pipeline": 2}},
    {"parallel": {"tensor": 2, "pipeline": 2}},
    {"parallel": {"ddp": 2, "pipeline": 2}, "accumulate": 8},
]


@pytest.mark.slow
def test_estimates_of_composed_layouts_equal_the_memory_of_four_processes(tmp_path: Path) -> None:
    expected = [of_model("network", processes=4, **layout).peak_bytes for layout in LAYOUTS]

    *held, _ = trained(tmp_path, *({"processes": 4, **layout} for layout in LAYOUTS))

    for layout, each, real in zip(LAYOUTS, expected, held, strict=True):
        assert max(process["peak"] for process in real) == pytest.approx(each, rel=0.1), layout


def test_a_model_too_large_for_one_gpu_is_split_into_stages() -> None:
    whole = sum(p.nbytes for p in deep().parameters())

    found = choose(estimator(deep(), optimizer="sgd", device="cuda"), 4, WORKSPACE + whole // 2 + 2 * MIB)

    assert found["parallel"] == {"ddp": 1, "tensor": 1, "pipeline": 4}
    assert found["micro_batches"] == 8  # two for each stage


def test_the_fewest_stages_come_first_and_micro_batches_before_any() -> None:
    found = list(automatic_layouts(estimator(deep()), 4))

    assert [layout.summary for layout, _ in found if layout.pipeline > 1][:4] == [
        *("ddp 2 × pipeline 2", "fsdp 2 × pipeline 2", "pipeline 4", "ddp 2 × pipeline 2")
    ]
    first = next(number for number, (layout, _) in enumerate(found) if layout.pipeline > 1)
    assert all(layout.pipeline > 1 for layout, _ in found[first:])
    assert max(count for _, count in found[:first]) == BATCH_SIZE


class Tied(nn.Module):
    """The last layer shares the weight of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = nn.functional.linear(self.middle(self.first(x)), self.first.weight)
        return found


class Chooses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) if x.sum() > 0 else -layer(x)
        return x


@pytest.mark.parametrize(
    "make", [Tied, Chooses, lambda: nn.Linear(WIDTH, 1)], ids=["tied", "chooses", "one layer"]
)
def test_models_that_cannot_be_staged_never_are(make: Any) -> None:
    assert not any(layout.pipeline > 1 for layout, _ in automatic_layouts(estimator(make()), 4))
    with pytest.raises(InvalidTraining, match="cannot be cut into the stages"):
        estimate(
            make(),
            nn.functional.mse_loss,
            rows(),
            parallel="pipeline",
            processes=2,
            device="cpu",
            batch_size=8,
        )


def test_layers_that_cannot_be_split_have_no_tensor_parallel_estimate() -> None:
    with pytest.raises(InvalidTraining, match="nothing to cut"):
        of_model("normed", processes=2, parallel="tensor")


def test_a_model_with_a_scalar_parameter_is_never_sharded() -> None:
    layouts = {layout.summary for layout, _ in automatic_layouts(estimator(MODELS["normed"]()), 2)}

    assert layouts == {"ddp 2", "pipeline 2"}


def test_sparse_gradients_and_types_that_differ_are_never_sharded() -> None:
    sparse = nn.Sequential(nn.Embedding(8, 8, sparse=True), nn.Linear(8, 1))
    mixed = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, dtype=torch.float64))

    assert not estimator(sparse).can_shard()
    assert not estimator(mixed).can_shard()
    mixed[1].requires_grad_(False)
    assert estimator(mixed).can_shard()


def test_a_given_optimizer_allows_only_ddp() -> None:
    model = MODELS["network"]()

    found = automatic_layouts(estimator(model, optimizer=optim.AdamW(model.parameters())), 2)

    assert {layout.summary for layout, _ in found} == {"ddp 2"}


def test_fp16_with_loss_scaling_is_not_staged() -> None:
    assert not any(
        layout.pipeline > 1 for layout, _ in automatic_layouts(estimator(deep(), precision="fp16"), 2)
    )


def test_an_exact_run_is_never_sharded_or_staged() -> None:
    found = estimator(deep(), exact=True).estimate("auto", 2)

    assert {way.layout for way in found.ways if way.as_asked} == {"ddp 2"}


def test_a_pipeline_has_two_micro_batches_a_stage_unless_they_were_given() -> None:
    by_itself = of_model("network", processes=2, parallel="pipeline")
    given = of_model("network", processes=2, parallel="pipeline", accumulate=1)

    assert (by_itself.ways[0].micro_batches, given.ways[0].micro_batches) == (4, 1)


def test_stages_are_split_where_the_caller_says() -> None:
    even, uneven = (
        of_model("network", processes=2, parallel="pipeline", optimizer="sgd", pipeline_cuts=cuts).peak_bytes
        for cuts in (None, ["0.1"])
    )

    assert uneven > even


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        found: Tensor = self.last(self.first(x))
        return found


def test_looking_for_stages_does_not_change_the_model() -> None:
    model = Counts()

    assert any(layout.pipeline == 2 for layout, _ in automatic_layouts(estimator(model), 2))
    assert model.calls == 0


def deep() -> nn.Module:
    """16 MiB, in blocks that are not split."""
    blocks = [
        nn.Sequential(nn.Linear(WIDTH, 2048), nn.LayerNorm(2048), nn.Linear(2048, WIDTH)) for _ in range(8)
    ]
    return nn.Sequential(nn.Sequential(*blocks), nn.Linear(WIDTH, 1))


def estimator(
    model: nn.Module,
    *,
    optimizer: OptimizerChoice = "adamw",
    precision: Precision = "fp32",
    device: str = "cpu",
    exact: bool = False,
) -> MemoryEstimator:
    plan = Plan(precision=precision)
    given = (model, nn.functional.mse_loss, open_data(rows()), optimizer, plan, BATCH_SIZE)
    return MemoryEstimator(*given, device=device, exact=exact)


def of_model(name: str, **options: Any) -> MemoryEstimate:
    return estimate(
        MODELS[name](), nn.functional.mse_loss, rows(), batch_size=BATCH_SIZE, device="cpu", **options
    )
