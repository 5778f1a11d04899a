"""The memory of a training is estimated before it starts, without computing or changing anything."""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.utils.checkpoint import checkpoint

import falaj as fj
from falaj.training.runtime.errors import InvalidTraining, NoEstimate
from falaj.training.runtime.memory import tracing
from falaj.training.runtime.memory.dry_run import EstimateDone
from falaj.training.runtime.memory.estimate import estimate
from falaj.training.runtime.memory.estimator import MemoryEstimate
from falaj.training.runtime.memory.sizes import available_memory, format_bytes, machine_memory
from falaj.training.runtime.planning.plan import Plan
from falaj.training.runtime.step.calling import Loss
from falaj.training.runtime.step.optimizers import OptimizerChoice

GIB = 1 << 30
MODELS = Path(__file__).parents[3] / "benchmarks" / "training_models.py"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FALAJ_CACHE", str(tmp_path / "cache"))


def test_parameters_gradients_and_state_are_exact_to_the_byte() -> None:
    found = of_rows(network(), batch_size=64)

    blocks = [64 * 256 * 4, 256 * 4, 256 * 256 * 4, 256 * 4, 256 * 4, 512]  # in blocks of 512 bytes; one bias
    assert found.parameters_bytes == found.gradients_bytes == sum(blocks)
    assert found.state_bytes == 2 * sum(blocks) + 6 * 512  # two moments, and a counter for each tensor


def test_activations_grow_linearly_with_the_batch() -> None:
    few, more, most = (of_rows(network(), batch_size=size).activations_bytes for size in (1000, 2000, 4000))

    assert few < more < most
    assert most - more == pytest.approx(2 * (more - few), rel=0.01)


@pytest.mark.parametrize(("precision", "measured"), [("fp32", 10.61), ("bf16", 8.10)], ids=["fp32", "bf16"])
def test_a_large_model_needs_the_memory_measured_on_an_h200(precision: Any, measured: float) -> None:
    models = load_models()
    with torch.device("meta"):  # nothing of it is allocated
        model = models.GPT()
    tokens = torch.zeros(1, 1024, dtype=torch.int64)
    plan = Plan(precision=precision)

    seen = tracing.trace_step(
        model, models.next_word, "adamw", (tokens, tokens), samples=8, plan=plan, device="cuda"
    )

    assert seen.parameters == pytest.approx(124_439_808 * 4, rel=0.001)
    peak = seen.parameters + seen.buffers + seen.state + seen.activations + seen.early_gradients
    assert (peak + seen.workspace) / GIB == pytest.approx(measured, rel=0.03)


def test_the_arguments_are_not_changed() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)).eval()
    optimizer = optim.AdamW(model.parameters())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    samples = [(torch.ones(8), torch.zeros(8))] * 32  # reading them seeds the random generator
    random_state = torch.get_rng_state(), random.getstate()

    estimate(model, nn.functional.mse_loss, samples, optimizer=optimizer, device="cpu")

    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not any(p.grad is not None for p in model.parameters())
    assert torch.equal(random_state[0], torch.get_rng_state())
    assert random_state[1] == random.getstate()
    assert not model.training
    assert not optimizer.state


def test_an_optimizer_that_has_trained_already_counts_as_a_new_one() -> None:
    model = network()
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(2, 64)).sum().backward()
    optimizer.step()

    found = of_rows(model, optimizer=optimizer)

    assert found.state_bytes == found.parameters_bytes
    assert of_rows(network(), optimizer="sgd").state_bytes == 0
    assert of_rows(network(), optimizer=lambda given: optim.Adam(given, amsgrad=True)).state_bytes == (
        3 * found.parameters_bytes + 6 * 512
    )


def test_frozen_parameters_have_no_gradients() -> None:
    model = network()
    for parameter in list(model.parameters())[:2]:
        parameter.requires_grad_(False)

    found = of_rows(model)

    assert found.parameters_bytes - found.gradients_bytes == 64 * 256 * 4 + 256 * 4


class Chooses(nn.Module):
    """Branches on its values, which fake tensors do not have."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.norm(self.layer(x if x.sum().item() > 0 else -x))
        return found


def test_a_data_dependent_model_is_traced_on_samples() -> None:
    model = Chooses()
    before = {name: value.clone() for name, value in model.state_dict().items()}

    few, more = (of_rows(model, width=8, batch_size=size) for size in (64, 128))

    assert few.method == more.method == "sampled"
    assert few.state_bytes == 2 * few.parameters_bytes + 4 * 512
    assert more.peak_bytes - few.peak_bytes >= 64 * 8 * 4 * 3
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_model_that_cannot_run_has_no_estimate() -> None:
    with pytest.raises(NoEstimate, match=r"cannot be estimated: on fake tensors .*; on samples .*shapes"):
        of_rows(nn.Linear(7, 1))


def test_bf16_needs_less_memory_and_micro_batches_even_less() -> None:
    whole, half, pieces = (
        of_rows(network(), batch_size=4096, **options).peak_bytes
        for options in ({}, {"precision": "bf16"}, {"accumulate": 8})
    )

    assert pieces < half < whole


@pytest.mark.slow
def test_fsdp_needs_less_than_ddp_and_ddp_more_than_one_process() -> None:
    deep = nn.Sequential(nn.Linear(64, 512), *(nn.Sequential(nn.Linear(512, 512)) for _ in range(12)))
    alone = of_rows(deep, batch_size=64, accumulate=4)

    found = of_rows(deep, batch_size=256, processes=4)

    copies, shards = (way.peak_bytes for way in found.ways[:2])
    assert shards < alone.peak_bytes < copies
    twice = found.parameters_bytes + found.state_bytes + 2 * found.gradients_bytes  # including flat copies
    assert copies == pytest.approx(twice, rel=0.01)


def test_estimates_are_cached_until_an_input_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    first = of_rows(network())
    monkeypatch.setattr(tracing, "trace_step", lambda *_, **__: pytest.fail("it is known"))

    assert of_rows(network()) == first
    with pytest.raises(pytest.fail.Exception):
        of_rows(network(), batch_size=33)
    with pytest.raises(pytest.fail.Exception):
        of_rows(network(), loss=nn.functional.l1_loss)


class Remembers(nn.Module):
    """Keeps the activations of its layers, or computes them again; its repr does not tell which."""

    def __init__(self, *, again: bool) -> None:
        super().__init__()
        self.again = again
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.again else layer(x)
        return x


@pytest.mark.slow
def test_recomputed_activations_need_no_memory() -> None:
    kept, again = (
        of_rows(Remembers(again=each), batch_size=2048).activations_bytes for each in (False, True)
    )

    assert again < 0.6 * kept


def test_sparse_gradients_count_as_whole_ones() -> None:
    words = nn.Sequential(nn.EmbeddingBag(10_000, 8, sparse=True), nn.Linear(8, 1))
    data = torch.zeros(32, 4, dtype=torch.int64), torch.zeros(32, 1)

    found = estimate(
        words, nn.functional.mse_loss, data, optimizer=lambda given: optim.SGD(given, lr=0.1), device="cpu"
    )

    assert found.method == "traced"
    assert found.peak_bytes == 2 * found.parameters_bytes


def test_the_alternatives_begin_with_the_requested_one() -> None:
    found = of_rows(network(), batch_size=64, processes=2, parallel="fsdp", accumulate=4)

    assert (found.ways[0].layout, found.ways[0].micro_batches, found.ways[0].as_asked) == ("fsdp 2", 4, True)
    assert not any(way.as_asked for way in found.ways[1:])
    assert {way.processes for way in found.ways} == {2, 4, 8, 16, 32}
    assert {way.precision for way in found.ways} == {"fp32", "bf16"}
    assert len({way.summary + str(way.processes) for way in found.ways}) == len(found.ways)
    assert next(found.fitting(found.peak_bytes)) == found.ways[0]


def test_a_batch_that_is_larger_than_the_data_is_refused() -> None:
    with pytest.raises(InvalidTraining, match="smaller than one batch"):
        estimate(network(), nn.functional.mse_loss, (torch.zeros(8, 64), torch.zeros(8, 1)))


def test_all_faults_are_named_at_once() -> None:
    data = torch.zeros(8, 64), torch.zeros(8, 1)

    with pytest.raises(InvalidTraining) as refused:
        estimate(network(), nn.functional.mse_loss, data, batch_size=0, processes=0, device="tpu")

    assert [fault.where for fault in refused.value.faults] == ["device", "processes", "batch_size"]


def test_the_memory_of_a_process_is_its_share_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")

    assert available_memory(torch.device("cpu")) == pytest.approx(0.92 * machine_memory() / 4, rel=0.001)
    assert [format_bytes(size) for size in (900, 3 << 10, 512 << 20, 11 * GIB // 1)] == [
        *("900 bytes", "3 KiB", "512 MiB", "11 GiB"),
    ]


def test_an_estimate_run_of_a_script_writes_its_estimate_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "asked.json"
    file.write_text(json.dumps({"processes": 4, "device": "cuda"}))
    monkeypatch.setenv("FALAJ_ESTIMATE", str(file))
    data = torch.zeros(64, 64), torch.zeros(64, 1)

    with pytest.raises(EstimateDone) as end:
        fj.fit(network(), nn.functional.mse_loss, data, batch_size=64, steps=1, precision="bf16")

    answer = json.loads(file.read_text())["estimate"]
    assert end.value.code == 0
    assert (answer["device"], answer["batch_size"], answer["data_bytes"]) == ("cuda", 64, 64 * 65 * 4)
    assert (answer["ways"][0]["layout"], answer["ways"][0]["precision"]) == ("ddp 4", "bf16")


def test_an_estimate_run_of_a_script_writes_why_it_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "asked.json"
    file.write_text(json.dumps({"processes": 1, "device": "cpu"}))
    monkeypatch.setenv("FALAJ_ESTIMATE", str(file))

    with pytest.raises(EstimateDone):
        fj.fit(
            nn.Linear(7, 1),
            nn.functional.mse_loss,
            (torch.zeros(8, 64), torch.zeros(8, 1)),
            steps=1,
            batch_size=8,
        )

    assert "cannot be estimated" in json.loads(file.read_text())["failed"]


def test_estimate_is_a_public_name() -> None:
    assert fj.estimate is estimate


def of_rows(
    model: nn.Module,
    *,
    width: int = 64,
    batch_size: int = 32,
    optimizer: OptimizerChoice = "adamw",
    loss: Loss = nn.functional.mse_loss,
    **options: Any,
) -> MemoryEstimate:
    """Estimate on rows of `width` numbers, as many as a batch needs."""
    data = torch.randn(batch_size, width), torch.zeros(batch_size, 1)
    return estimate(
        model,
        loss,
        data,
        batch_size=batch_size,
        optimizer=optimizer,
        device="cpu",
        **options,
    )


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))


def load_models() -> Any:
    """Return the models of the training benchmark."""
    if MODELS.stem not in sys.modules:
        found = importlib.util.spec_from_file_location(MODELS.stem, MODELS)
        assert found is not None
        assert found.loader is not None
        sys.modules[MODELS.stem] = importlib.util.module_from_spec(found)
        found.loader.exec_module(sys.modules[MODELS.stem])
    return sys.modules[MODELS.stem]
