"""parallel="auto" chooses a layout by its memory, equally in all processes, and states the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from falaj.training.runtime.data.sources import open_data
from falaj.training.runtime.errors import InvalidTraining
from falaj.training.runtime.fit import fit
from falaj.training.runtime.memory.estimate import estimate
from falaj.training.runtime.memory.estimator import MemoryEstimator
from falaj.training.runtime.memory.sizes import format_bytes
from falaj.training.runtime.options import FitOptions
from falaj.training.runtime.parallel.auto import choose, decide, rough_bytes
from falaj.training.runtime.parallel.process_group import ProcessGroup
from falaj.training.runtime.planning.plan import Plan
from memory_fit import BATCH_SIZE, network, rows, trained

MIB = 1 << 20


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FALAJ_CACHE", str(tmp_path / "cache"))


@pytest.mark.slow
def test_ddp_fsdp_and_refusals_over_two_processes(tmp_path: Path) -> None:
    expected = {way.layout: way.peak_bytes for way in of_network("auto").ways[:2]}

    copies, shards, refused, output = trained(
        tmp_path, {"parallel": "ddp"}, {"memory": 10 * MIB}, {"memory": MIB}
    )

    assert copies[0]["peak"] == pytest.approx(expected["ddp 2"], rel=0.05)
    assert shards[0]["peak"] == pytest.approx(expected["fsdp 2"], rel=0.15)
    sizes = format_bytes(expected["fsdp 2"]), format_bytes(expected["ddp 2"])
    assert f"parallel: fsdp 2, {sizes[0]} a process of 10 MiB; ddp 2 would need {sizes[1]}" in output
    assert shards[0]["losses"] == shards[1]["losses"] == pytest.approx(copies[0]["losses"], rel=1e-5)
    assert refused[0] == refused[1]
    assert "does not fit" in refused[0]["refused"]
    assert "1 MiB a process" in refused[0]["refused"]


@pytest.mark.parametrize(
    ("memory", "layout", "micro_batches"),
    [
        (64 * MIB, {"ddp": 4, "tensor": 1}, 1),
        (8 * MIB, {"fsdp": 4, "tensor": 1}, 1),
        (int(3.8 * MIB), {"fsdp": 2, "tensor": 2}, 1),
    ],
)
def test_the_first_layout_that_fits_is_chosen(
    memory: int, layout: dict[str, int], micro_batches: int
) -> None:
    found = choose(estimator(), 4, memory)

    assert (found["parallel"], found["micro_batches"]) == (layout, micro_batches)


@pytest.mark.slow
def test_a_large_batch_is_split_into_micro_batches_unless_given() -> None:
    wide, given = estimator(batch_size=65_536), estimator(batch_size=65_536, fixed_micro_batches=True)

    found, refused = choose(wide, 2, 110 * MIB), choose(given, 2, 110 * MIB)

    assert found["parallel"] == {"ddp": 2, "tensor": 1}
    assert found["micro_batches"] in (4, 8, 16)
    assert "in " in found["reason"]
    assert "ddp 2, fp32" in refused["fault"]["given"]
    assert "micro-batches" in refused["fault"]["fix"]


@pytest.mark.slow
def test_a_refusal_names_the_estimate_and_the_nearest_layout_that_fits() -> None:
    fault = choose(estimator(), 2, 4 * MIB)["fault"]

    assert fault["given"].startswith("ddp 2, fp32 (15.2 MiB a process); at the least tensor 2, fp32")
    assert fault["allowed"] == "4 MiB a process"
    assert fault["fix"].startswith("4 processes: ")


def test_small_models_are_not_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryEstimator, "step_memory", lambda *_: pytest.fail("it is small"))
    source = open_data(rows())

    assert rough_bytes(network(), source, BATCH_SIZE) < 100 * MIB
    assert decided(memory=10 << 30) == {"parallel": {"ddp": 2, "tensor": 1}, "micro_batches": 1, "reason": ""}


def test_models_without_an_estimate_are_trained_with_ddp(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no such kernel\nand more")

    monkeypatch.setattr(MemoryEstimator, "step_memory", fail)

    assert decided(memory=MIB) == {
        "parallel": {"ddp": 2, "tensor": 1},
        "micro_batches": 1,
        "reason": "parallel: ddp 2; no estimate (no such kernel)",
    }


def test_one_process_is_not_parallel_whatever_its_memory() -> None:
    result = fit(network(), nn.functional.mse_loss, rows(), batch_size=8, steps=1, tune="off", memory=1)

    assert result.step == 1


def test_memory_must_be_a_positive_integer() -> None:
    with pytest.raises(InvalidTraining, match="memory"):
        fit(network(), nn.functional.mse_loss, rows(), steps=1, memory=0)


def decided(*, memory: int) -> dict[str, Any]:
    options = FitOptions.from_keywords(
        batch_size=BATCH_SIZE, steps=1, device="cpu", tune="off", checkpoint_every=1
    )
    world = ProcessGroup(0, 2, torch.device("cpu"))
    return decide(network(), nn.functional.mse_loss, open_data(rows()), options, Plan(), world, memory)


def estimator(*, batch_size: int = BATCH_SIZE, fixed_micro_batches: bool = False) -> MemoryEstimator:
    data = open_data(tuple(column[:1].expand(batch_size, -1) for column in rows()))
    return MemoryEstimator(
        *(network(), nn.functional.mse_loss, data, "adamw", Plan(), batch_size),
        device="cpu",
        fixed_micro_batches=fixed_micro_batches,
    )


def of_network(parallel: Any) -> Any:
    return estimate(
        network(),
        nn.functional.mse_loss,
        rows(),
        batch_size=BATCH_SIZE,
        processes=2,
        parallel=parallel,
        device="cpu",
    )
