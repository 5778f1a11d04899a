"""Models that are hard to trace get an estimate, or none with a reason; never a wrong cached one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import falaj as fj
from falaj.training.runtime.errors import InvalidTraining, NoEstimate
from falaj.training.runtime.memory.dry_run import EstimateDone
from falaj.training.runtime.memory.estimate import estimate
from falaj.training.runtime.memory.estimator import MemoryEstimate, MemoryEstimator

WIDTH, SAMPLES = 64, 512


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FALAJ_CACHE", str(tmp_path / "cache"))


class Around(nn.Module):
    """Applies the given function between two layers."""

    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.act = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1), act

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.act(self.first(x)))
        return found


class Square(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 2 * gradient * x


class ByNumpy(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.from_numpy(np.tanh(x.detach().numpy()))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


def by_numpy(x: Tensor) -> Tensor:
    found: Tensor = ByNumpy.apply(x)  # type: ignore[no-untyped-call]
    return found


def squared(x: Tensor) -> Tensor:
    found: Tensor = Square.apply(x)  # type: ignore[no-untyped-call]
    return found


def again(x: Tensor) -> Tensor:
    found: Tensor = checkpoint(torch.tanh, x, use_reentrant=False)
    return found


def spoken(x: Tensor) -> Tensor:
    print("here")
    return x


def counted(x: Tensor) -> Tensor:
    return x if x.sum().item() < 1e9 else -x


def turned(x: Tensor) -> Tensor:
    return torch.fft.ifft(torch.fft.fft(x)).real


@pytest.mark.parametrize(
    ("act", "method"),
    [
        (squared, "traced"),
        (again, "traced"),
        (spoken, "traced"),
        (turned, "traced"),
        (counted, "sampled"),
        (by_numpy, "sampled"),
    ],
)
def test_operations_that_are_hard_to_trace_are_counted(act: Callable[[Tensor], Tensor], method: str) -> None:
    plain, found = of(Around(torch.relu)), of(Around(act))

    assert found.method == method
    assert found.parameters_bytes == plain.parameters_bytes
    assert 0.7 < found.peak_bytes / plain.peak_bytes < 4
    assert 0.7 < found.activations_bytes / plain.activations_bytes < 4


def test_a_precision_in_which_it_cannot_compute_is_left_out() -> None:
    found = of(Around(by_numpy))

    assert {way.precision for way in found.ways} == {"fp32"}
    with pytest.raises(NoEstimate, match="BFloat16"):
        of(Around(by_numpy), precision="bf16")


def test_the_cached_estimate_of_one_function_is_not_used_for_another() -> None:
    kept, lost = of(Around(torch.sigmoid)), of(Around(lambda x: x.detach() * 0 + 1))

    assert lost.activations_bytes < kept.activations_bytes


def test_the_cached_estimate_of_an_unfrozen_model_is_not_used_for_a_frozen_one() -> None:
    free, frozen = Around(torch.relu), Around(torch.relu)
    frozen.first.requires_grad_(False)

    assert of(frozen).gradients_bytes < of(free).gradients_bytes


def test_a_model_that_holds_a_tensor_of_its_own_is_traced() -> None:
    model = Around(torch.relu)
    model.mask = torch.ones(WIDTH)

    assert of(model).method == "traced"


def test_complex_numbers_and_sparse_tables_are_traced() -> None:
    class Turns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, 1, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            return (x.to(torch.complex64) @ self.weight).abs()

    words = nn.Sequential(nn.EmbeddingBag(1000, 8, sparse=True), nn.Linear(8, 1))
    data = torch.zeros(SAMPLES, 4, dtype=torch.int64), torch.zeros(SAMPLES, 1)

    assert of(Turns()).parameters_bytes == WIDTH * 8
    found = estimate(words, functional.mse_loss, data, optimizer="sgd", device="cuda", processes=2)
    assert found.method == "traced"
    assert not any("fsdp" in way.layout for way in found.ways)


def test_the_samples_of_a_nested_dict_batch_are_counted() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, 1)

        def forward(self, x: dict[str, Tensor]) -> Tensor:
            found: Tensor = self.layer(x["used"])
            return found

    samples = [({"used": torch.zeros(WIDTH), "more": torch.zeros(4096)}, torch.zeros(1))] * 32

    found = estimate(Named(), functional.mse_loss, samples, batch_size=32, device="cpu")

    assert found.activations_bytes > 32 * 4096 * 4


def test_parameters_without_a_shape_are_refused() -> None:
    with pytest.raises(InvalidTraining, match="lazy parameters"):
        of(nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 1)))


def test_a_frozen_and_an_empty_model_have_no_estimate() -> None:
    for model in (Around(torch.relu).requires_grad_(False), nn.Flatten()):
        with pytest.raises(NoEstimate):
            of(model)


def test_an_internal_error_is_reported_and_the_job_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "asked.json"
    file.write_text(json.dumps({"processes": 1, "device": "cpu"}))
    monkeypatch.setenv("FALAJ_ESTIMATE", str(file))

    def fail(*_: object) -> None:
        raise KeyError("something new")

    monkeypatch.setattr(MemoryEstimator, "estimate", fail)
    data = torch.zeros(8, WIDTH), torch.zeros(8, 1)

    with pytest.raises(EstimateDone):
        fj.fit(nn.Linear(WIDTH, 1), functional.mse_loss, data, steps=1, batch_size=8)

    assert "something new" in json.loads(file.read_text())["failed"]


def of(model: nn.Module, **options: Any) -> MemoryEstimate:
    data = torch.randn(SAMPLES, WIDTH), torch.zeros(SAMPLES, 1)
    return estimate(model, functional.mse_loss, data, batch_size=SAMPLES, device="cpu", **options)
