"""Workspace memory of GPU operations, counted without a GPU and compared with measurements on an H200."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from falaj.training.runtime.memory.allocations import AllocationTracker, partial_sum_bytes
from falaj.training.runtime.memory.gpu_autocast import GpuAutocast
from falaj.training.runtime.memory.tracing import device_autocast

MIB = 1 << 20
ROWS, CLASSES = 4096, 1024
UNIT = ROWS * CLASSES * 4
"""The bytes of the scores in fp32."""


@pytest.mark.parametrize(("rows", "measured"), [(1024, 2), (16_384, 32), (262_144, 132)])
def test_row_sums_need_the_measured_memory(rows: int, measured: int) -> None:
    assert taken_beside(lambda: torch.empty(rows, 256), lambda x: x.sum(0)) == measured * MIB


@pytest.mark.parametrize(
    "add_up",
    [
        lambda x: x.sum(dim=-2),
        lambda x: x.sum((0,), keepdim=True),
        lambda x: x.view(128, 128, 256).sum((1, 0)),
        lambda x: torch.sum(x, dim=0),
    ],
)
def test_row_sums_are_recognized_in_every_notation(add_up: Callable[[Tensor], Tensor]) -> None:
    assert taken_beside(lambda: torch.empty(16_384, 256), add_up) == 32 * MIB


@pytest.mark.parametrize(
    ("shape", "add_up"),
    [
        ((16_384, 256), lambda x: x.sum(1)),
        ((16_384, 256), lambda x: x.sum()),
        ((16_384, 256), lambda x: x.sum((0, 1))),
        ((64, 256, 256), lambda x: x.sum(1)),
        ((128, 256), lambda x: x.sum(0)),
        ((16_384, 8), lambda x: x.sum(0)),
        ((0, 256), lambda x: x.sum(0)),
        ((), lambda x: x.sum(0)),
        ((), lambda x: x.sum((-1,))),
        ((16_384, 256), lambda x: x.sum(())),
    ],
)
def test_other_sums_need_no_workspace(shape: tuple[int, ...], add_up: Callable[[Tensor], Tensor]) -> None:
    assert taken_beside(lambda: torch.empty(shape), add_up) == 0


def test_sums_of_wider_types_need_more_memory() -> None:
    assert taken_beside(lambda: torch.empty(16_384, 256, dtype=torch.float64), lambda x: x.sum(0)) == 64 * MIB
    assert partial_sum_bytes(16_384, 256) == 32 * MIB


def test_cross_entropy_needs_the_measured_memory() -> None:
    kept, peak = taken(lambda scores: functional.cross_entropy(scores, torch.zeros(ROWS, dtype=torch.int64)))

    assert kept == pytest.approx(1.5, abs=0.01)
    assert peak == pytest.approx(2.5, abs=0.01)


def test_softmax_and_norms_need_the_measured_memory() -> None:
    assert taken(lambda scores: functional.softmax(scores, -1))[0] == pytest.approx(1, abs=0.01)
    assert highest(lambda scores: functional.softmax(scores, -1)) == pytest.approx(2, abs=0.01)
    assert taken(lambda scores: functional.layer_norm(scores, (CLASSES,)))[0] == pytest.approx(2, abs=0.01)


def test_half_precision_sums_need_no_copy() -> None:
    assert highest(lambda scores: scores.sum(1)) < 0.01


def classes(*shape: int) -> Tensor:
    return torch.randint(5, shape)


def halves(*shape: int) -> Tensor:
    return torch.randn(*shape).bfloat16().requires_grad_()


LOSSES: dict[str, Callable[[], Tensor]] = {
    "by name": lambda: functional.cross_entropy(input=halves(8, 5), target=classes(8)),
    "weights": lambda: functional.cross_entropy(halves(8, 5), classes(8), torch.rand(5)),
    "weights in halves": lambda: functional.cross_entropy(
        halves(8, 5), classes(8), weight=torch.rand(5).bfloat16()
    ),
    "ignored": lambda: functional.cross_entropy(halves(8, 5), classes(8).clamp(1), ignore_index=0),
    "each": lambda: functional.cross_entropy(halves(8, 5), classes(8), reduction="none").mean(),
    "old names": lambda: functional.cross_entropy(halves(8, 5), classes(8), None, False),
    "smoothed": lambda: functional.cross_entropy(halves(8, 5), classes(8), label_smoothing=0.1),
    "smoothed, each": lambda: functional.cross_entropy(
        halves(2, 5, 4), classes(2, 4), reduction="none", label_smoothing=0.1
    ).mean(),
    "smoothed, by place": lambda: functional.cross_entropy(
        halves(8, 5), classes(8), torch.rand(5), None, 1, None, "sum", 0.1
    ),
    "shares": lambda: functional.cross_entropy(halves(8, 5), torch.rand(8, 5).softmax(1)),
    "shares in halves": lambda: functional.cross_entropy(
        halves(8, 5), torch.rand(8, 5).bfloat16(), label_smoothing=0.1
    ),
    "one sample": lambda: functional.cross_entropy(halves(5), torch.tensor(2)),
    "one sample, smoothed": lambda: functional.cross_entropy(halves(5), torch.tensor(2), label_smoothing=0.1),
    "pictures": lambda: functional.cross_entropy(halves(2, 5, 4, 4), classes(2, 4, 4), torch.rand(5)),
    "module": lambda: nn.CrossEntropyLoss(torch.rand(5), ignore_index=1, label_smoothing=0.1)(
        halves(2, 5, 4, 4), classes(2, 4, 4)
    ),
    "bytes": lambda: functional.cross_entropy(halves(8, 5), classes(8).byte()),
    "in full": lambda: functional.cross_entropy(halves(8, 5).float(), classes(8)),
    "by hand": lambda: functional.nll_loss(functional.log_softmax(input=halves(8, 5), dim=-1), classes(8)),
    "typed": lambda: functional.log_softmax(halves(8, 5), -1, dtype=torch.bfloat16).sum(),
    "norm in halves": lambda: nn.GroupNorm(2, 8).bfloat16()(halves(4, 8)).sum(),
    "layer in halves": lambda: functional.layer_norm(
        halves(4, 8), (8,), weight=torch.ones(8).bfloat16(), bias=torch.ones(8).bfloat16()
    ).sum(),
    "into a place": lambda: torch.exp(torch.randn(4).bfloat16(), out=halves(4).detach()).sum(),
    "single number": lambda: halves(4).sum().sum(0),
    "sum, typed": lambda: halves(4, 4).sum(0, keepdim=True, dtype=torch.float64).sum(),
    "distances": lambda: torch.cdist(x1=halves(4, 8), x2=torch.randn(4, 8)).sum(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_every_runnable_operation_can_be_counted(name: str) -> None:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autocast("cpu", torch.bfloat16):
            trained = LOSSES[name]()
        torch.manual_seed(0)
        with AllocationTracker(gpu=True, copies=True), torch.autocast("cpu", torch.bfloat16), GpuAutocast():
            counted = LOSSES[name]()

    assert counted.shape == trained.shape
    assert float(counted.detach()) == pytest.approx(float(trained.detach()), rel=0.1, abs=0.02)
    if trained.requires_grad:
        counted.backward()  # type: ignore[no-untyped-call]


def taken_beside(make: Callable[[], Tensor], act: Callable[[Tensor], Tensor]) -> int:
    """Return the bytes that a GPU needs for an operation beside its inputs and outputs."""
    with FakeTensorMode(), AllocationTracker(gpu=True) as tracker:
        given = make()
        tracker.reset_peak()
        found = act(given)
        assert found.device.type == "cpu"
        return tracker.peak - tracker.current


def taken(act: Callable[[Tensor], Tensor]) -> tuple[float, float]:
    """Return what is kept after the forward pass, and the peak of the backward pass, beside bf16 scores; in units."""
    with FakeTensorMode(), AllocationTracker(gpu=True) as tracker:
        scores = torch.empty(ROWS, CLASSES, dtype=torch.bfloat16, requires_grad=True)
        start = tracker.current
        with device_autocast("bf16", gpu=True):
            found = act(scores)
        kept = tracker.current - start
        tracker.reset_peak()
        (found if found.dim() == 0 else found.sum()).backward()  # type: ignore[no-untyped-call]
        return kept / UNIT, (tracker.peak - start) / UNIT


def highest(act: Callable[[Tensor], Tensor]) -> float:
    """Return the peak of the forward pass, in units."""
    with FakeTensorMode(), AllocationTracker(gpu=True) as tracker, device_autocast("bf16", gpu=True):
        scores = torch.empty(ROWS, CLASSES, dtype=torch.bfloat16, requires_grad=True)
        start = tracker.current
        tracker.reset_peak()
        found = act(scores)
        assert found.dtype == torch.float32
        return (tracker.peak - start) / UNIT
