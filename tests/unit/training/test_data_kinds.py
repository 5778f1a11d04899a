"""Data as users of torch have it: frames, arrays, DataLoaders and dicts. Each trains as the tensors it stands for."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from falaj.training.runtime.checkpointing.certificate import verify_certificate
from falaj.training.runtime.data.batches import BatchPlan
from falaj.training.runtime.data.dataloading import start_method
from falaj.training.runtime.data.sources import open_data
from falaj.training.runtime.errors import CheckpointMismatch, InvalidTraining, SampleUnreadable
from falaj.training.runtime.fit import FitResult, fit
from falaj.training.runtime.memory.estimate import estimate

ROWS = 48
X = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(1))
Y = X.sum(1, keepdim=True)
CLASSES = (X[:, 0] > 0).long()
NAMES = ["a", "b", "c"]
mse, cross_entropy = nn.functional.mse_loss, nn.functional.cross_entropy


def make_model(out: int = 1) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, out))


def train(data: Any, *, loss: Any = mse, model: nn.Module | None = None, **changes: Any) -> FitResult:
    options: dict[str, Any] = {"steps": 8, "device": "cpu", "tune": "off", **changes}
    if not isinstance(data, DataLoader):
        options.setdefault("batch_size", 8)
    return fit(model or make_model(), loss, data, **options)


def frame(**more: Any) -> dict[str, Any]:
    return {**{name: X[:, place].numpy() for place, name in enumerate(NAMES)}, **more}


# ------------------------------------------------------------------------------------------ data frames


def pandas_frame(values: dict[str, Any]) -> Any:
    return pd.DataFrame(values, index=np.arange(ROWS) * 7 + 3)  # not the index of a new frame


KINDS = {"pandas": pandas_frame, "polars": pl.DataFrame, "pyarrow": pa.table}


@pytest.mark.parametrize("kind", KINDS)
def test_a_frame_trains_as_the_tensors_of_its_columns(kind: str) -> None:
    data = KINDS[kind](frame(y=Y[:, 0].numpy()))

    assert train(data, target="y").losses == train((X, Y)).losses


@pytest.mark.parametrize("kind", KINDS)
def test_a_target_of_integers_is_classes(kind: str) -> None:
    data = KINDS[kind](frame(label=CLASSES.numpy().astype("int16")))

    found = train(data, target="label", loss=cross_entropy, model=make_model(2))

    assert found.losses == train((X, CLASSES), loss=cross_entropy, model=make_model(2)).losses


@pytest.mark.parametrize("kind", ["pandas", "polars"])
def test_inputs_and_target_may_be_separate_frames_and_series(kind: str) -> None:
    whole = KINDS[kind](frame(y=Y[:, 0].numpy(), label=CLASSES.numpy()))

    assert train((whole[NAMES], whole["y"])).losses == train((X, Y)).losses
    assert train((whole[NAMES], whole[["y"]])).losses == train((X, Y)).losses
    classes = train((whole[NAMES], whole["label"]), loss=cross_entropy, model=make_model(2))
    assert classes.losses == train((X, CLASSES), loss=cross_entropy, model=make_model(2)).losses


def test_the_index_of_pandas_is_not_an_input() -> None:
    data: Any = pandas_frame(frame())

    assert open_data(data).read(torch.tensor([0]), seed=0).tolist() == X[:1].tolist()


@pytest.mark.parametrize("kind", ["pandas", "polars"])
def test_what_a_frame_cannot_be_trained_on_is_named_with_a_fix(kind: str) -> None:
    hole = X[:, 0].numpy().astype(object)
    hole[5] = None
    data = KINDS[kind](frame(city=["Liwa"] * ROWS, y=Y[:, 0].numpy()))

    with pytest.raises(InvalidTraining) as refusal:
        train(data, target="y")
    with pytest.raises(InvalidTraining, match=r"1 nulls in 48 rows"):
        train(KINDS[kind]({"a": list(hole), "y": Y[:, 0].numpy()}), target="y")

    (fault,) = refusal.value.faults
    assert fault.where == "data['city']"
    assert "codes" in str(fault.fix)


def test_a_pandas_frame_with_equal_names_is_refused() -> None:
    twice: Any = pd.DataFrame(X.numpy(), columns=["a", "a", "b"])

    with pytest.raises(InvalidTraining, match="the data frame cannot be read"):
        train(twice)


def test_a_series_with_a_hole_is_refused() -> None:
    series: Any = pd.Series([1, None] * (ROWS // 2), dtype="Int64", name="label")

    with pytest.raises(InvalidTraining, match="24 nulls in 48 rows"):
        train((X, series), loss=cross_entropy, model=make_model(2))


def test_large_integers_of_a_series_stay_exact() -> None:
    large = 2**53 + np.arange(ROWS)

    for series in (pd.Series(large), pl.Series("ids", large)):
        columns: Any = open_data((X, series))  # type: ignore[arg-type]
        assert columns.columns[1].tolist() == large.tolist()


def test_frames_larger_than_a_piece_keep_their_order() -> None:
    count = 150_000
    data: Any = pl.DataFrame({"a": np.arange(count, dtype="float32"), "y": np.arange(count)})

    inputs, target = open_data(data, target="y").read(torch.arange(count), seed=0)

    assert inputs[:, 0].long().equal(target)
    assert target.equal(torch.arange(count))


# ------------------------------------------------------------------------------------------ NumPy arrays


def test_arrays_train_as_their_tensors() -> None:
    double = X.numpy().astype("float64"), Y.numpy().astype("float64")

    assert train((X.numpy(), Y.numpy())).losses == train(double).losses == train((X, Y)).losses
    assert train(X.numpy(), loss=lambda out: out.square().mean()).step == 8


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint16", "uint32", ">i4"])
def test_an_array_of_classes_may_have_any_type_of_integers(dtype: str) -> None:
    data = X.numpy(), CLASSES.numpy().astype(dtype)

    found = train(data, loss=cross_entropy, model=make_model(2))

    assert found.losses == train((X, CLASSES), loss=cross_entropy, model=make_model(2)).losses


def test_arrays_that_torch_does_not_take_as_they_are_work() -> None:
    reversed_rows, big_endian = X.numpy()[::-1], X.numpy().astype(">f4")
    frozen = X.numpy().copy()
    frozen.flags.writeable = False

    assert train((reversed_rows, Y)).losses == train((X.flip(0), Y)).losses
    assert train((big_endian, Y)).losses == train((frozen, Y)).losses == train((X, Y)).losses


def test_a_memory_mapped_array_is_read_from_its_file(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X.numpy())
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    source: Any = open_data((mapped, Y))

    assert source.mapped
    assert train((mapped, Y)).losses == train((X, Y)).losses


@pytest.mark.parametrize(
    "array", [np.array(["a"] * ROWS), np.array([None] * ROWS), np.zeros(ROWS, "complex64")]
)
def test_an_array_without_numbers_is_refused(array: Any) -> None:
    with pytest.raises(InvalidTraining, match="numbers or booleans"):
        train((array, Y))


@pytest.mark.slow
def test_neither_numpy_nor_pandas_is_imported_without_need() -> None:
    script = (
        "import sys, torch\n"
        "from falaj.training.runtime.fit import fit\n"
        "rows = torch.randn(8, 2)\n"
        "fit(torch.nn.Linear(2, 2), torch.nn.functional.mse_loss, (rows, rows), steps=1, batch_size=4, device='cpu')\n"
        "print({'pandas', 'polars', 'pyarrow'} & sys.modules.keys())\n"
    )

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert done.stdout == "set()\n"


# ------------------------------------------------------------------------------------------- DataLoaders


class Samples(torch.utils.data.Dataset[Any]):
    """A dataset that is read by index."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        return X[index], Y[index]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from zip(X, Y, strict=True)


@pytest.mark.parametrize("dataset", [TensorDataset(X, Y), Samples()], ids=["tensors", "dataset"])
def test_a_loader_gives_its_dataset_batch_size_and_drop_last(dataset: Any) -> None:
    loader = DataLoader(dataset, batch_size=10, shuffle=True, drop_last=True)

    found = train(loader, steps=None, epochs=2)

    expected = train((X, Y), steps=None, epochs=2, batch_size=10, drop_last=True)
    assert found.losses == expected.losses
    assert found.step == 8


def test_options_of_fit_have_priority_over_those_of_the_loader() -> None:
    loader = DataLoader(Samples(), batch_size=10, shuffle=True)

    assert train(loader, batch_size=8).losses == train((X, Y)).losses


def test_a_loader_that_does_not_shuffle_keeps_the_order_of_its_samples() -> None:
    seen: list[Tensor] = []

    def loss(out: Tensor, target: Tensor) -> Tensor:
        seen.append(target)
        return mse(out, target)

    train(DataLoader(Samples(), batch_size=16), loss=loss, steps=None, epochs=2)

    assert torch.cat(seen).equal(torch.cat([Y, Y]))


def test_a_subset_sampler_gives_its_samples_only() -> None:
    part = list(range(0, ROWS, 2))
    loader = DataLoader(Samples(), batch_size=8, sampler=SubsetRandomSampler(part))

    assert train(loader).losses == train((X[part], Y[part])).losses


def test_a_distributed_sampler_leaves_the_division_to_fit() -> None:
    sampler: Any = DistributedSampler(Samples(), num_replicas=2, rank=1)

    assert train(DataLoader(Samples(), batch_size=8, sampler=sampler)).losses == train((X, Y)).losses


def pad(samples: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    inputs = nn.utils.rnn.pad_sequence([each[0] for each in samples], batch_first=True)
    return {"x": inputs, "y": torch.stack([each[1] for each in samples])}


class Ragged(Samples):
    def __getitem__(self, index: int) -> Any:
        return X[index, : 1 + index % 3], Y[index]


class Padded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.net(x.sum(1, keepdim=True))
        return found


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_the_collate_function_of_a_loader_makes_the_batches(workers: int) -> None:
    loader = DataLoader(Ragged(), batch_size=8, shuffle=True, collate_fn=pad, num_workers=workers)

    found = train(loader, model=Padded(), target="y")

    sums = torch.stack([X[index, : 1 + index % 3].sum() for index in range(ROWS)]).unsqueeze(1)
    assert found.losses == pytest.approx(train((sums, Y), model=Padded()).losses)
    assert found.plan.workers == workers


def test_the_dataset_of_a_loader_may_be_any_sequence_of_samples() -> None:
    samples: Any = tuple(zip(X, Y, strict=True))
    double: Any = DataLoader(
        X.numpy(), batch_size=8, collate_fn=lambda rows: 2 * torch.stack([torch.as_tensor(r) for r in rows])
    )

    assert train(DataLoader(samples, batch_size=8, shuffle=True)).losses == train((X, Y)).losses
    assert open_data(double).read(torch.tensor([1]), seed=0).equal(2 * X[1:2])


def test_a_collate_function_that_fails_names_a_sample() -> None:
    def broken(samples: list[Any]) -> Any:
        raise KeyError("width")

    with pytest.raises(SampleUnreadable, match="of step 1 cannot be read: KeyError: 'width'"):
        train(DataLoader(Samples(), batch_size=8, collate_fn=broken))


@pytest.mark.slow
def test_the_workers_of_a_loader_are_initialized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_method, "reason_not_to_fork", lambda: None)

    def initialize(number: int) -> None:
        (tmp_path / str(number)).touch()

    loader = DataLoader(Samples(), batch_size=8, num_workers=2, worker_init_fn=initialize, prefetch_factor=3)
    found = train(loader)

    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]
    assert (found.plan.workers, found.plan.prefetch) == (2, 3)


WEIGHTED = WeightedRandomSampler([1.0] * ROWS, ROWS)
TWICE = RandomSampler(Samples(), replacement=True)


@pytest.mark.parametrize(
    ("loader", "where", "words"),
    [
        (DataLoader(Stream(), batch_size=8), "data.dataset", "Stream, a stream"),
        (DataLoader(Samples(), batch_size=None), "data.batch_sampler", "batch_size=None"),
        (DataLoader(Samples(), batch_size=8, sampler=WEIGHTED), "data.sampler", "WeightedRandomSampler"),
        (DataLoader(Samples(), batch_size=8, sampler=TWICE), "data.sampler", "replacement=True"),
    ],
    ids=["stream", "no batches", "weights", "replacement"],
)
def test_a_loader_that_cannot_be_addressed_by_step_is_refused(loader: Any, where: str, words: str) -> None:
    with pytest.raises(InvalidTraining) as refusal:
        train(loader)

    (fault,) = refusal.value.faults
    assert fault.where == where
    assert words in str(fault.given)
    assert "fj.step" in str(fault.fix)


def test_a_batch_sampler_of_the_callers_own_is_refused() -> None:
    class Halves(BatchSampler):
        pass

    loader = DataLoader(Samples(), batch_sampler=Halves(SequentialSampler(Samples()), 8, False))

    with pytest.raises(InvalidTraining, match="Halves"):
        train(loader)


# ---------------------------------------------------------------------------------- all of it together


def kinds() -> dict[str, Any]:
    values = frame(y=Y[:, 0].numpy())
    return {
        "pandas": pandas_frame(values),
        "polars": pl.DataFrame(values),
        "arrays": (X.numpy(), Y.numpy()),
        "loader": DataLoader(Samples(), batch_size=8, shuffle=True),
        "dict": {"x": X, "y": Y},
        "dict samples": [{"x": x, "y": y} for x, y in zip(X, Y, strict=True)],
    }


def named(kind: str) -> dict[str, Any]:
    return {} if kind in ("arrays", "loader") else {"target": "y"}


@pytest.mark.parametrize("kind", kinds())
def test_every_kind_resumes_exactly_and_has_a_certificate(kind: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"run": tmp_path, "exact": True, **named(kind)}

    train(kinds()[kind], steps=5, **options)
    found = train(kinds()[kind], steps=12, **options)

    straight = train((X, Y), steps=12, exact=True)
    assert found.resumed_from == 5
    assert found.losses == straight.losses[5:]
    assert found.ledger == straight.ledger
    assert verify_certificate(tmp_path / "certificate.json", samples=ROWS, batch_size=8).exact


@pytest.mark.parametrize("kind", kinds())
def test_every_kind_can_be_evaluated_on(kind: str) -> None:
    found = train((X, Y), evaluate=kinds()[kind], evaluate_every=4) if not named(kind) else None
    if found is None:
        table = pa.table(frame(y=Y[:, 0].numpy()))
        found = train(table, evaluate=kinds()[kind], evaluate_every=4, **named(kind))

    assert found.best == train((X, Y), evaluate=(X, Y), evaluate_every=4).best


@pytest.mark.parametrize("kind", kinds())
def test_the_memory_of_every_kind_is_estimated(kind: str) -> None:
    found = estimate(make_model(), mse, kinds()[kind], device="cuda", batch_size=8, **named(kind))

    expected = estimate(make_model(), mse, (X, Y), device="cuda", batch_size=8)
    assert found.activations_bytes == expected.activations_bytes


def test_an_estimate_takes_the_batch_size_of_a_loader() -> None:
    small, large = (
        estimate(make_model(), mse, DataLoader(Samples(), batch_size=size), device="cpu") for size in (4, 48)
    )

    assert small.activations_bytes < large.activations_bytes


@pytest.mark.parametrize("kind", ["pandas", "arrays", "loader", "dict samples"])
def test_every_kind_is_split_and_computed_in_bf16(kind: str) -> None:
    found = train(kinds()[kind], precision="bf16", accumulate=2, clip=1.0, **named(kind))

    assert found.losses == train((X, Y), precision="bf16", accumulate=2, clip=1.0).losses


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["polars", "loader", "dict samples"])
def test_the_plan_of_every_kind_is_searched(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FALAJ_CACHE", str(tmp_path))

    found = train(kinds()[kind], tune="auto", tune_seconds=2.0, compile=False, steps=200, **named(kind))

    assert found.step == 200
    assert list((tmp_path / "plans").iterdir())


def test_a_run_does_not_resume_in_another_order(tmp_path: Path) -> None:
    train((X, Y), steps=4, run=tmp_path)

    with pytest.raises(CheckpointMismatch, match="shuffle"):
        train((X, Y), run=tmp_path, shuffle=False)


def test_an_unshuffled_run_resumes_and_is_certified(tmp_path: Path) -> None:
    train((X, Y), steps=5, run=tmp_path, shuffle=False, exact=True)
    found = train((X, Y), steps=9, run=tmp_path, shuffle=False, exact=True)

    assert found.losses == train((X, Y), steps=9, shuffle=False, exact=True).losses[5:]
    assert verify_certificate(tmp_path / "certificate.json").exact


def test_without_shuffling_every_epoch_is_in_order() -> None:
    plan = BatchPlan(10, 4, seed=3, shuffle=False)

    assert torch.cat([plan.indices(step) for step in range(1, 7)]).tolist() == [*range(10), *range(10)]


def test_a_subset_of_a_dataset_is_a_dataset() -> None:
    part = list(range(24))

    assert train(Subset(Samples(), part)).losses == train((X[:24], Y[:24])).losses
