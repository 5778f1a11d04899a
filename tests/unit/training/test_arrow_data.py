"""Arrow tables and Parquet files as training data: the resulting tensors, and refusals."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as datasets
import pyarrow.feather as feather
import pyarrow.parquet as parquet
import pytest
import torch
from torch import Tensor, nn

from falaj.control.jobs.staging import write_input
from falaj.governance import objects
from falaj.records.features import ColumnType, Entity, Feature, FeatureView
from falaj.training.runtime.agent.job import job
from falaj.training.runtime.data.arrow import tables
from falaj.training.runtime.data.sources import SampleSource, TensorSource, open_data
from falaj.training.runtime.errors import InvalidTraining, TrainingFault
from falaj.training.runtime.fit import FitResult, fit
from platforms import OwnPlatform

ROWS = 40
X = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(1))


def table(**more: Any) -> pa.Table:
    columns = {"a": X[:, 0].tolist(), "b": X[:, 1].tolist(), "c": X[:, 2].tolist(), "y": X.sum(1).tolist()}
    return pa.table({**{name: pa.array(values, pa.float32()) for name, values in columns.items()}, **more})


def whole(source: SampleSource) -> Any:
    return source.read(torch.arange(len(source)), seed=0)


def faults(data: Any, **options: Any) -> dict[str, TrainingFault]:
    with pytest.raises(InvalidTraining) as refusal:
        open_data(data, **options)
    return {fault.where: fault for fault in refusal.value.faults}


def train(data: Any, **options: Any) -> FitResult:
    torch.manual_seed(0)
    return fit(nn.Linear(3, 1), nn.functional.mse_loss, data, steps=12, batch_size=8, device="cpu", **options)


def straight() -> list[float]:
    return train((X, torch.tensor(table()["y"].to_pylist())[:, None])).losses


# ---------------------------------------------------------------------------------------- input types


def forms(folder: Path) -> dict[str, Any]:
    rows = table()
    parquet.write_table(rows, folder / "rows.parquet", row_group_size=7)
    many = folder / "many"
    (many / "deeper").mkdir(parents=True)
    parquet.write_table(rows.slice(0, 13), many / "a.parquet")
    parquet.write_table(rows.slice(13), many / "deeper" / "b.parquet", compression="zstd")
    (many / "_SUCCESS").touch()
    (many / ".hidden.parquet").write_bytes(b"not a table")
    feather.write_feather(rows, folder / "rows.arrow", compression="uncompressed")
    return {
        "table": rows,
        "chunked": pa.concat_tables([rows.slice(0, 3), rows.slice(3, 0), rows.slice(3)]),
        "batch": rows.to_batches()[0],
        "reader": rows.to_reader(max_chunksize=9),
        "dataset": datasets.dataset(rows),
        "file": folder / "rows.parquet",
        "text": str(folder / "rows.parquet"),
        "folder": many,
        "arrow": folder / "rows.arrow",
    }


@pytest.mark.parametrize(
    "form", ["table", "chunked", "batch", "reader", "dataset", "file", "text", "folder", "arrow"]
)
def test_every_input_type_trains_like_its_tensors(tmp_path: Path, form: str) -> None:
    assert train(forms(tmp_path)[form], target="y").losses == straight()


def test_a_table_that_exceeds_the_memory_is_mapped_from_a_file_and_trains_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "available_memory_bytes", lambda: 100)
    source = open_data(forms(tmp_path)["folder"], target="y")

    assert isinstance(source, TensorSource)
    assert source.mapped
    assert train(source).losses == straight()
    assert train(source, accumulate=2, workers=0).losses != []


def test_a_table_that_fits_neither_memory_nor_disk_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "available_memory_bytes", lambda: 0)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))

    (fault,) = faults(table(), target="y").values()

    assert "missing" in str(fault.given)
    assert "TMPDIR" in str(fault.fix)


def test_evaluation_on_a_table_has_the_same_columns(tmp_path: Path) -> None:
    parquet.write_table(table(), tmp_path / "held.parquet")

    result = train(
        table(), target="y", inputs=["a", "b", "c"], evaluate=tmp_path / "held.parquet", evaluate_every=4
    )

    assert result.best is not None
    assert result.best.score > 0


def test_a_job_trains_on_its_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parquet.write_table(table(), tmp_path / "churn.parquet")
    monkeypatch.setenv("FALAJ_INPUTS", str(tmp_path))

    assert train(job.inputs["churn"], target="y").losses == straight()


def test_a_job_trains_on_a_training_set_of_the_platform(
    light_platform: OwnPlatform, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Feature(name="calls", type=ColumnType.FLOAT)
    view = FeatureView(name="usage", entities=("customer",), columns=(calls,))
    customer = Entity(name="customer", key="customer", type=ColumnType.INTEGER)
    features = light_platform.features
    features.apply(entities=(customer,), views=(view,))
    keys = {"customer": list(range(ROWS)), "event_time": [datetime(2026, 1, 1, tzinfo=UTC)] * ROWS}
    features.ingest("usage", data=put(light_platform, "usage", pa.table({**keys, "calls": X[:, 0].tolist()})))
    labels = pa.table({**keys, "churned": [number % 2 == 0 for number in range(ROWS)]})
    made = features.training_set("churn", spine=put(light_platform, "labels", labels), views=("usage",))
    monkeypatch.setenv("FALAJ_INPUTS", str(tmp_path))
    with light_platform.database.read() as tx:
        found = objects.by_id(tx, made.id)
    assert found is not None
    write_input(light_platform.parts.services, found, tmp_path, "churn")

    inputs, target = whole(open_data(job.inputs["churn"], target="churned"))

    assert torch.allclose(inputs, X[:, :1])
    assert target[:3].tolist() == [[1.0], [0.0], [1.0]]


def put(platform: OwnPlatform, name: str, rows: pa.Table) -> str:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_table(rows)
    return str(platform.put(name, sink.getvalue().to_pybytes()).id)


# -------------------------------------------------------------------------------------------- columns


def test_inputs_become_one_matrix_in_the_order_of_the_table() -> None:
    pairs = pa.array([[i, i + 0.5] for i in range(ROWS)], pa.list_(pa.float64(), 2))
    rows = table(
        flag=pa.array([i % 2 == 0 for i in range(ROWS)]), pair=pairs, n=pa.array(range(ROWS), pa.uint16())
    )

    inputs, target = whole(open_data(rows, target="y"))

    assert inputs.dtype == torch.float32
    assert inputs.shape == (ROWS, 7)
    assert torch.equal(inputs[:, :3], X)
    assert inputs[5, 3:].tolist() == [0.0, 5.0, 5.5, 5.0]
    assert target.shape == (ROWS, 1)


def test_a_slice_is_read_from_its_own_rows() -> None:
    pairs = pa.array([[i, -i] for i in range(ROWS)], pa.list_(pa.int32(), 2))
    rows = table(pair=pairs, flag=pa.array([i % 3 == 0 for i in range(ROWS)])).slice(5, 11)

    inputs, _ = whole(open_data(rows, target="y"))

    assert torch.equal(inputs[:, :3], X[5:16])
    assert inputs[:, 3].tolist() == [float(i) for i in range(5, 16)]
    assert inputs[:, 5].tolist() == [float(i % 3 == 0) for i in range(5, 16)]


@pytest.mark.parametrize(
    ("values", "dtype", "shape"),
    [
        (pa.array([i % 5 for i in range(ROWS)], pa.int8()), torch.int64, (ROWS,)),
        (pa.array([i % 2 == 0 for i in range(ROWS)]), torch.float32, (ROWS, 1)),
        (pa.array([i / 2 for i in range(ROWS)], pa.float64()), torch.float32, (ROWS, 1)),
        (pa.array([[i, i] for i in range(ROWS)], pa.list_(pa.int64(), 2)), torch.float32, (ROWS, 2)),
    ],
    ids=["classes", "yes or no", "an amount", "several"],
)
def test_the_target_fits_the_losses_of_torch(values: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    inputs, target = whole(open_data(table(label=values), inputs=["a", "c"], target="label"))

    assert (target.dtype, tuple(target.shape)) == (dtype, shape)
    assert torch.equal(inputs, X[:, [0, 2]])


def test_several_targets_are_a_matrix_and_none_gives_the_table_alone() -> None:
    _, targets = whole(open_data(table(), target=["y", "a"]))
    alone = whole(open_data(table().select(["a", "b", "c"])))

    assert targets.shape == (ROWS, 2)
    assert torch.equal(alone, X)


def test_a_list_column_of_integers_becomes_an_integer_tensor() -> None:
    tokens = pa.table({"text": pa.array([[1, 2, 3]] * 5, pa.list_(pa.int32(), 3)), "label": [0, 1, 0, 1, 1]})

    inputs, target = whole(open_data(tokens, target="label"))

    assert (inputs.dtype, inputs.shape) == (torch.int64, (5, 3))
    assert target.tolist() == [0, 1, 0, 1, 1]


def test_the_features_of_a_training_set_are_the_inputs() -> None:
    rows = pa.table(
        {
            "customer": pa.array(["x"] * ROWS),
            "event_time": pa.array([datetime(2026, 1, 1, tzinfo=UTC)] * ROWS, pa.timestamp("us")),
            "churned": pa.array([True] * ROWS),
            "usage__calls": X[:, 0].tolist(),
            "usage__hours": X[:, 1].tolist(),
        }
    )

    inputs, target = whole(open_data(rows, target="churned"))

    assert torch.allclose(inputs, X[:, :2])
    assert target.shape == (ROWS, 1)


# -------------------------------------------------------------------------------------------- refusals


def test_non_numeric_columns_are_all_named_with_a_fix() -> None:
    rows = table(
        name=pa.array(["x"] * ROWS),
        when=pa.array([datetime(2026, 1, 1, tzinfo=UTC)] * ROWS, pa.timestamp("us")),
        parts=pa.array([[1]] * ROWS),
        place=pa.array([{"x": 1}] * ROWS),
    )

    found = faults(rows, target="y")

    assert list(found) == ["data['name']", "data['when']", "data['parts']", "data['place']"]
    assert [fault.given for fault in found.values()][:2] == ["string", "timestamp[us]"]
    assert "dictionary_encode" in str(found["data['name']"].fix)
    assert "cast" in str(found["data['when']"].fix)
    assert "one size" in str(found["data['parts']"].fix)


def test_nulls_are_counted_for_every_column(tmp_path: Path) -> None:
    gaps = table(
        d=pa.array([None, 1.0] * (ROWS // 2)), e=pa.array([[1.0, None]] * ROWS, pa.list_(pa.float32(), 2))
    )
    parquet.write_table(gaps, tmp_path / "gaps.parquet")

    for data in (gaps, tmp_path / "gaps.parquet"):
        found = faults(data, target="y")
        assert {where: fault.given for where, fault in found.items()} == {
            "data['d']": "20 nulls in 40 rows",
            "data['e']": "40 nulls in 40 rows",
        }
        assert "fill_null" in str(found["data['d']"].fix)


def test_missing_columns_are_named() -> None:
    found = faults(table(), target="label", inputs=["a", "z"])

    assert found["data.target"].given == "label"
    assert found["data.inputs"].given == "z"
    assert "a, b, c, y" in str(found["data.inputs"].allowed)
    assert (
        faults(table(), target="y", inputs=["y"])["data.inputs"].allowed == "a column that is not the target"
    )
    assert faults(table().select(["y"]), target="y")["data.inputs"].given == "no column"


def test_a_number_that_does_not_fit_is_refused() -> None:
    large = pa.table({"id": pa.array([1 << 63], pa.uint64()), "y": [1.0]})

    with pytest.raises(InvalidTraining, match="id"):
        open_data(large, target="y")


def test_missing_mismatched_and_unreadable_files_are_refused(tmp_path: Path) -> None:
    assert "not there" in str(faults(tmp_path / "nothing")["data"].given)
    assert "holds none" in str(faults(tmp_path)["data"].given)
    parquet.write_table(table(), tmp_path / "a.parquet")
    parquet.write_table(table().select(["a", "y"]), tmp_path / "b.parquet")
    assert "b.parquet: a, y" in str(faults(tmp_path, target="y")["data"].given)
    (tmp_path / "b.parquet").write_bytes(b"PAR1 and no more")
    assert "files of Parquet" in str(faults(tmp_path, target="y")["data"].allowed)
    assert faults(table().slice(0, 0), target="y")["data"].given == "no rows"


@pytest.mark.parametrize("data", [(X, X), [(X[0], X[0])]], ids=["tensors", "dataset"])
def test_names_of_columns_are_for_tables_only(data: Any) -> None:
    assert "with target='y'" in str(faults(data, target="y")["data"].given)


@pytest.mark.slow
def test_arrow_is_not_imported_without_need() -> None:
    script = (
        "import sys, torch\n"
        "from falaj.training.runtime.fit import fit\n"
        "x = torch.randn(8, 2)\n"
        "fit(torch.nn.Linear(2, 1), torch.nn.functional.mse_loss, (x, x[:, :1]), steps=1, batch_size=4, device='cpu')\n"
        "print('pyarrow' in sys.modules)\n"
    )

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert done.stdout.split()[-1] == "False"


def test_rows_are_independent_tensors() -> None:
    rows = table()
    source = open_data(rows, target="y")
    first: Tensor = whole(source)[0]
    first.zero_()

    assert torch.equal(whole(source)[0], X)
