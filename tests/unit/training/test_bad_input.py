"""Training that is impossible is refused with a reason, or done in another reported way; nothing is lost."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from falaj.training.runtime.agent.agents import read_metrics
from falaj.training.runtime.checkpointing.sample_ledger import expected_head
from falaj.training.runtime.data.batches import BatchPlan
from falaj.training.runtime.errors import (
    CheckpointMismatch,
    InvalidTraining,
    LossNotFinite,
    OutOfMemory,
    RaggedBatch,
)
from falaj.training.runtime.fit import FitResult, fit
from falaj.training.runtime.planning.plan import Plan

mse = nn.functional.mse_loss
SHORT_OF_MEMORY = Path(__file__).with_name("out_of_memory_fit.py")


def rows(count: int = 40) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(count, 4, generator=torch.Generator().manual_seed(2))
    return inputs, inputs.sum(1, keepdim=True)


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))


def train(data: Any = None, *, model: Any = None, loss: Any = mse, **changes: Any) -> FitResult:
    options: dict[str, Any] = {"batch_size": 8, "device": "cpu", "tune": "off", **changes}
    if "epochs" not in options:
        options.setdefault("steps", 10)
    return fit(make_model() if model is None else model, loss, rows() if data is None else data, **options)


class Bounded(nn.Module):
    """Simulates a GPU with little memory: more than `most` rows at once do not fit."""

    def __init__(self, most: int, *, dropout: float = 0.0, begins: int = 0) -> None:
        super().__init__()
        self.net, self.most, self.left = make_model(), most, begins
        self.dropout = nn.Dropout(dropout)

    def forward(self, given: Tensor) -> Tensor:
        self.left -= 1
        if self.left < 0 and len(given) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has …")
        found: Tensor = self.net(self.dropout(given))
        return found


# -------------------------------------------------------------------------------------------- option values

WRONG: dict[str, Any] = {
    "accumulate": 0,
    "batch_size": 0,
    "better": "sideways",
    "callbacks": 3,
    "checkpoint_every": timedelta(0),
    "clip": "much",
    "compile": "hard",
    "device": "abacus",
    "drop_last": "yes",
    "epochs": -1,
    "evaluate_every": 0,
    "exact": "very",
    "lr": -0.1,
    "optimizer": "magic",
    "parallel": "sideways",
    "patience": 0,
    "precision": "fp8",
    "schedule": "magic",
    "seed": -1,
    "steps": "many",
    "tune": "maybe",
    "tune_seconds": "long",
    "warmup": -1,
}


def test_all_wrong_options_are_named_with_their_values_the_allowed_values_and_a_fix() -> None:
    with pytest.raises(InvalidTraining) as refusal:
        train(**WRONG)

    faults = refusal.value.faults
    assert {fault.where for fault in faults} >= WRONG.keys()
    assert [
        fault.where for fault in faults if not (fault.given is not None and fault.allowed and fault.fix)
    ] == []


@pytest.mark.parametrize("name", sorted(WRONG.keys() - {"steps", "epochs", "evaluate_every", "patience"}))
def test_a_single_wrong_option_is_the_only_one_named(name: str) -> None:
    with pytest.raises(InvalidTraining) as refusal:
        train(**{name: WRONG[name]})

    assert [fault.where for fault in refusal.value.faults] == [name]


@pytest.mark.parametrize(
    "value", [[], {}, object(), 1.5, "", math.inf], ids=["list", "dict", "object", "float", "empty", "inf"]
)
@pytest.mark.parametrize("name", sorted(WRONG.keys() - {"callbacks"}))
def test_a_value_of_any_type_is_refused_with_a_message(name: str, value: Any) -> None:
    fine = {("clip", 1.5), ("lr", 1.5), ("tune_seconds", 1.5)}
    if isinstance(value, float) and (name, value) in fine:
        return

    with pytest.raises(InvalidTraining, match=name):
        train(**{"evaluate": rows(), name: value})


@pytest.mark.parametrize("wrong", [{"ddp": 0}, {"ddp": "two"}, {"magic": 2}, {}], ids=str)
def test_an_invalid_layout_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidTraining, match="parallel"):
        train(parallel=wrong)


# ----------------------------------------------------------------------------------------- model and loss


def test_a_model_without_values_is_refused() -> None:
    with torch.device("meta"):
        absent = nn.Linear(4, 1)

    with pytest.raises(InvalidTraining, match=r"on the meta device, without values: weight, bias") as refusal:
        train(model=absent, steps=5000, tune="auto")

    assert "to_empty" in str(refusal.value)


def test_a_lazy_model_is_refused_before_the_plan_search() -> None:
    with pytest.raises(InvalidTraining, match="call the model once on a sample first"):
        train(model=nn.LazyLinear(1), steps=5000, tune="auto")


def test_an_invalid_model_and_an_invalid_loss_are_named_together() -> None:
    with pytest.raises(InvalidTraining) as refusal:
        train(model=len, loss="mse")

    assert [fault.where for fault in refusal.value.faults] == ["model", "loss"]


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda out, _: 1.0, "a float"),
        (lambda out, _: None, "a NoneType"),
        (lambda out, _: out, r"a tensor of shape \[8, 1\]"),
        (lambda out, _: out.detach().mean(), "a value without a gradient"),
    ],
    ids=["number", "nothing", "no scalar", "no gradient"],
)
def test_a_loss_that_cannot_be_trained_on_is_refused(loss: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidTraining, match=words):
        train(loss=loss, run=tmp_path)


def test_unused_parameters_stay_unchanged_through_a_resume(tmp_path: Path) -> None:
    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.spare = make_model(), nn.Linear(3, 3)

        def forward(self, given: Tensor) -> Tensor:
            found: Tensor = self.net(given)
            return found

    model = Spare()
    before = model.spare.weight.detach().clone()

    first = train(model=model, steps=5, run=tmp_path, clip=1.0)
    again = Spare()
    second = train(model=again, run=tmp_path, clip=1.0)

    assert first.losses + second.losses == train(clip=1.0).losses
    assert again.spare.weight.equal(before)


# ------------------------------------------------------------------------------------------------- data


@pytest.mark.parametrize(
    "data",
    [iter(rows()), (row for row in rows()), torch.utils.data.DataLoader([1, 2]).__iter__(), map(len, [])],
    ids=["iterator", "generator", "loader's", "map"],
)
def test_an_iterator_instead_of_a_dataset_is_refused(data: Any) -> None:
    with pytest.raises(InvalidTraining, match="the data cannot be used"):
        train(data)


def test_a_dataset_smaller_than_a_batch_is_refused_with_the_number() -> None:
    with pytest.raises(InvalidTraining, match="at most 5 samples, the size of the dataset") as refusal:
        train(rows(5))

    assert [fault.where for fault in refusal.value.faults] == ["batch_size"]


def test_a_ragged_batch_keeps_existing_checkpoints(tmp_path: Path) -> None:
    odd = int(BatchPlan(40, 8, seed=0).indices(4)[3])
    samples = [(torch.zeros(5 if number == odd else 4), torch.zeros(1)) for number in range(40)]

    with pytest.raises(RaggedBatch, match=f"sample {odd} is"):
        train(samples, run=tmp_path, checkpoint_every=1)

    samples[odd] = (torch.zeros(4), torch.zeros(1))
    assert train(samples, run=tmp_path).resumed_from == 3


# ------------------------------------------------------------------------------------------ not finite


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_leaves_a_resumable_run(bad: float, tmp_path: Path) -> None:
    (inputs, targets), batch = rows(), BatchPlan(40, 8, seed=0).indices(4)
    spoilt = targets.clone()
    spoilt[batch[2]] = bad

    def loss(out: Tensor, target: Tensor) -> Tensor:
        return (out - target).mean()  # keeps the sign of an infinity

    with pytest.raises(LossNotFinite) as stop:
        train((inputs, spoilt), loss=loss, run=tmp_path, checkpoint_every=2)

    words = str(stop.value)
    assert stop.value.step == 4
    assert (
        f"the loss is {-bad} at step 4; the last good checkpoint: of step 2".replace("-nan", "nan") in words
    )
    assert f"batch of step 4\n  given    8 samples: {batch[0]}, {batch[1]}, {batch[2]}" in words
    assert "fix      a smaller lr" in words
    again = train((inputs, targets), loss=loss, run=tmp_path)
    assert again.resumed_from == 2
    assert again.losses == train((inputs, targets), loss=loss).losses[2:]


# ------------------------------------------------------------------------------------------------ memory


def test_out_of_memory_keeps_the_batch_and_reduces_the_micro_batches(tmp_path: Path) -> None:
    short = train(model=Bounded(3), run=tmp_path)

    assert short.losses == pytest.approx(train(model=Bounded(99)).losses, rel=1e-5)
    assert short.ledger == expected_head(BatchPlan(40, 8, seed=0), 10)


def test_reduced_micro_batches_are_reported_and_kept_by_the_next_attempt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With dropout the losses depend on the micro-batches: a resumed run must use the same ones."""

    def bounded() -> Bounded:
        return Bounded(3, dropout=0.4, begins=2)

    straight = train(model=bounded())
    capsys.readouterr()

    first = train(model=bounded(), steps=5, run=tmp_path)
    output = capsys.readouterr()
    second = train(model=Bounded(99, dropout=0.4), run=tmp_path)

    assert first.losses + second.losses == straight.losses
    assert (
        "step 3: out of memory (CUDA out of memory. Tried to allocate 2.00 GiB.); "
        "continuing with 2 micro-batches per global batch" in output.err + output.out
    )
    assert "with 4 micro-batches per global batch" in output.err + output.out


def test_memory_too_small_for_one_sample_is_reported(tmp_path: Path) -> None:
    with pytest.raises(OutOfMemory) as failure:
        train(model=Bounded(0, begins=4), run=tmp_path, checkpoint_every=2)

    assert failure.value.code == "training.memory"
    assert "out of memory at step 5" in str(failure.value)
    assert "in 8 micro-batches" in str(failure.value)
    assert isinstance(failure.value.__cause__, torch.OutOfMemoryError)
    assert train(run=tmp_path / "other").step == 10
    assert {metric.step for metric in read_metrics(tmp_path)} >= {1, 2}


def test_a_model_that_needs_several_samples_is_not_reduced_to_single_sample_micro_batches() -> None:
    class Normed(Bounded):
        def __init__(self) -> None:
            super().__init__(1)
            self.norm = nn.BatchNorm1d(4)

        def forward(self, given: Tensor) -> Tensor:
            return super().forward(self.norm(given))

    with pytest.raises(OutOfMemory, match="out of memory at step 1"):
        train(model=Normed())


def test_an_exact_run_does_not_change_its_micro_batches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(OutOfMemory, match="accumulate=16"):
        train(model=Bounded(1), exact=True, batch_size=16)


def test_an_optimizer_step_without_memory_is_not_repeated() -> None:
    class Full(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory")

    model = make_model()

    with pytest.raises(OutOfMemory, match="out of memory at step 1"):
        train(model=model, optimizer=Full(model.parameters(), lr=0.1))


@pytest.mark.slow
@pytest.mark.parametrize("most", [3, 8])
def test_memory_that_runs_out_during_the_search_ends_no_run(
    most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FALAJ_CACHE", str(tmp_path))

    result = train(model=Bounded(most), tune="auto", tune_seconds=1.0, compile=False)

    assert result.losses == pytest.approx(train().losses, rel=2e-2)
    assert ("out of memory" in capsys.readouterr().out) == (most < 8)


@pytest.mark.slow
def test_a_model_too_large_to_copy_is_trained_without_a_plan_search(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Single(Bounded):
        def __deepcopy__(self, memo: Any) -> Any:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes")

    result = train(model=Single(99), steps=2000, batch_size=4, tune="auto")

    assert result.plan == Plan()
    assert "plan search skipped: no memory for a copy of the model" in capsys.readouterr().out


@pytest.mark.slow
def test_a_real_cpu_memory_shortage_is_recovered_or_reported() -> None:
    """In a separate process, with an address space that is too small for the batch."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(
        [sys.executable, str(SHORT_OF_MEMORY)], env=environment, capture_output=True, text=True, check=False
    )

    assert ran.returncode == 0, ran.stderr
    report = json.loads(ran.stdout.splitlines()[-1])
    assert report["short"] == pytest.approx(report["plenty"], rel=1e-4)
    assert report["pieces"] > 1
    assert "can't allocate memory" in ran.stdout
    assert "micro-batches per global batch" in ran.stdout
    assert report["hopeless"].startswith("OutOfMemory: out of memory at step 1")


# ------------------------------------------------------------------------------------------- checkpoints


def test_another_seed_is_refused_and_another_model_too(tmp_path: Path) -> None:
    train(run=tmp_path)

    with pytest.raises(CheckpointMismatch, match="seed"):
        train(run=tmp_path, seed=1)
    with pytest.raises(CheckpointMismatch, match="another model"):
        train(run=tmp_path, model=nn.Linear(4, 1))
    assert train(run=tmp_path, steps=12).resumed_from == 10  # the attempt lost nothing


@pytest.mark.parametrize("damage", ["cut", "altered", "emptied"])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path: Path, damage: str) -> None:
    straight = train(run=tmp_path, checkpoint_every=4)
    files = [path for path in (tmp_path / "checkpoints").rglob("*") if path.is_file()]
    newest = max(
        (path for path in files if "10" in str(path.relative_to(tmp_path))), key=lambda p: p.stat().st_size
    )
    data = newest.read_bytes()
    half = len(data) // 2
    altered = data[:half] + bytes([data[half] ^ 1]) + data[half + 1 :]
    newest.write_bytes({"cut": data[:half], "altered": altered, "emptied": b""}[damage])

    again = train(run=tmp_path, checkpoint_every=4)

    assert again.resumed_from == 8
    assert again.losses == straight.losses[8:]


# --------------------------------------------------------------------------------- rank and world size


@pytest.mark.parametrize(
    "place",
    [
        {"WORLD_SIZE": "2"},
        {"WORLD_SIZE": "two"},
        {"WORLD_SIZE": "2", "RANK": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
        {"WORLD_SIZE": "0"},
    ],
    ids=["no rank", "no number", "rank beyond", "nobody"],
)
def test_an_invalid_rank_or_world_size_is_refused(
    place: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in place.items():
        monkeypatch.setenv(name, value)

    with pytest.raises(InvalidTraining, match="torchrun"):
        train()


def test_memory_that_runs_out_in_an_evaluation_makes_its_batches_smaller() -> None:
    short = train(model=Bounded(3), evaluate=rows(13), evaluate_every=5)
    plenty = train(model=Bounded(99), evaluate=rows(13), evaluate_every=5)

    assert short.best is not None
    assert plenty.best is not None
    assert short.best.score == pytest.approx(plenty.best.score, rel=1e-5)
