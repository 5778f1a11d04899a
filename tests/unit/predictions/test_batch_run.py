"""A batch prediction in this process: every row once and in order, whatever its columns are."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from onnx import TensorProto, helper

from batch_runs import NAMES, BatchRunner, customers, linear_model, scores, serialized
from falaj.drivers.deltalake.table_folders import DeltaFolders
from falaj.errors import InvalidInput, NotFound
from falaj.records.registry import TensorSpec
from falaj.serving.runtime.batch_prediction.input_tables import open_input, read_parts


@pytest.mark.parametrize("rows", [0, 1, 4096, 4097, 122_881, 131_073, 1_000_000])
def test_every_row_is_predicted_once_and_in_order(batch: BatchRunner, rows: int) -> None:
    given = customers(rows)
    source = batch.write(given, row_group_size=100_000)

    done = batch(source)

    made = batch.predicted()
    assert (done.rows, made.num_rows, made.column_names) == (rows, rows, ["id", "score"])
    assert np.array_equal(made["id"].to_numpy(), np.arange(rows))
    assert np.array_equal(made["score"].to_numpy(), scores(given))


@pytest.mark.usefixtures("small_parts")
def test_files_of_a_folder_are_one_table_in_the_order_of_their_names(batch: BatchRunner) -> None:
    for number, size in enumerate([1, 999, 2501, 7, 1500]):
        first = sum([1, 999, 2501, 7, 1500][:number])
        batch.write(customers(size, first=first), f"in/part-{number}.parquet", row_group_size=300)
    batch.write(customers(5), "in/_hidden/old.parquet")

    batch(batch.folder / "in")

    assert np.array_equal(batch.predicted()["id"].to_numpy(), np.arange(5008))
    assert pq.read_metadata(batch.partial / "data").num_row_groups == 6


def test_columns_are_found_by_their_exact_names_in_any_order(batch: BatchRunner) -> None:
    rows = customers(10).append_column("Age", pa.array([7.0] * 10))

    batch(batch.write(rows.select(["Age", "calls", "age", "id", "income"])))

    made = batch.predicted()
    assert np.array_equal(made["score"].to_numpy(), scores(customers(10)))
    assert made.column_names == ["Age", "id", "score"]


@pytest.mark.parametrize(
    "kind",
    [
        pa.int64(),
        pa.uint8(),
        pa.float64(),
        pa.float16(),
        pa.decimal128(20, 4),
        pa.dictionary(pa.int32(), pa.float64()),
    ],
)
def test_numbers_of_any_type_become_those_of_the_model(batch: BatchRunner, kind: Any) -> None:
    rows = customers(50)
    plain = rows["age"].to_pylist()
    column = (
        pa.array([Decimal(int(value)) for value in plain], kind)
        if pa.types.is_decimal(kind)
        else pa.array(plain).dictionary_encode()
        if pa.types.is_dictionary(kind)
        else pa.array(plain).cast(kind)
    )

    batch(batch.write(rows.set_column(2, "age", column)))

    assert np.array_equal(batch.predicted()["score"].to_numpy(), scores(rows))


def test_a_missing_number_is_nan(batch: BatchRunner) -> None:
    rows = customers(5).set_column(2, "age", pa.array([1.0, None, 3.0, None, 5.0]))

    batch(batch.write(rows))

    assert np.isnan(batch.predicted()["score"].to_numpy()).tolist() == [False, True, False, True, False]


def test_kept_columns_are_written_as_they_are(batch: BatchRunner) -> None:
    noon = datetime(2026, 6, 1, 12, tzinfo=UTC)
    kept = pa.table(
        {
            "name": pa.array(["a", None, "ü"], pa.large_string()),
            "kind": pa.array(["x", "y", "x"]).dictionary_encode(),
            "price": pa.array([Decimal("1.50"), None, Decimal("-2.25")]),
            "at": pa.array([noon] * 3, pa.timestamp("us", tz="UTC")),
            "tags": pa.array([["p", "q"], [], None]),
            "place": pa.array([{"x": 1, "y": None}, {"x": 2, "y": "b"}, None]),
            "a.b": pa.array([1, 2, 3]),
            "a": pa.array([4, 5, 6]),
        }
    )
    rows = customers(3)
    for name in kept.column_names:
        rows = rows.append_column(name, kept[name])

    batch(batch.write(rows), keep=kept.column_names)

    made = batch.predicted()
    assert made.column_names == [*kept.column_names, "score"]
    assert [made[name].to_pylist() for name in kept.column_names] == [
        kept[name].to_pylist() for name in kept.column_names
    ]


def test_all_columns_are_kept_if_asked_for_and_predictions_get_a_prefix(batch: BatchRunner) -> None:
    rows = customers(3).append_column("score", pa.array([1, 2, 3]))
    source = batch.write(rows)

    with pytest.raises(InvalidInput, match="--prefix"):
        batch(source)
    batch(source, keep=["*"], prefix="predicted_")

    assert batch.predicted().column_names == ["calls", "id", "age", "income", "score", "predicted_score"]


def test_a_column_of_lists_is_a_tensor_and_several_inputs_are_columns(batch: BatchRunner) -> None:
    graph = helper.make_graph(
        [
            helper.make_node("ReduceSum", ["vector"], ["total"], keepdims=0, noop_with_empty_axes=0),
            helper.make_node("Mul", ["vector", "factor"], ["scaled"]),
            helper.make_node("Identity", ["word"], ["same"]),
        ][1:],
        "several",
        [
            helper.make_tensor_value_info("vector", TensorProto.FLOAT, ["n", 4]),
            helper.make_tensor_value_info("factor", TensorProto.FLOAT, ["n", 1]),
            helper.make_tensor_value_info("word", TensorProto.STRING, ["n"]),
        ],
        [
            helper.make_tensor_value_info("scaled", TensorProto.FLOAT, ["n", 4]),
            helper.make_tensor_value_info("same", TensorProto.STRING, ["n"]),
        ],
    )
    vectors = np.arange(20, dtype=np.float32).reshape(5, 4)
    rows = pa.table(
        {
            "word": ["a", "b", "ü", "", "e"],
            "factor": [1, 2, 3, 4, 5],
            "vector": pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), 4),
        }
    )

    batch(batch.write(rows), content=serialized(graph), tensors=())

    made = batch.predicted()
    assert np.array_equal(np.array(made["scaled"].to_pylist()), vectors * np.arange(1, 6)[:, None])
    assert made["same"].to_pylist() == ["a", "b", "ü", "", "e"]


def test_a_model_of_a_fixed_number_of_rows_gets_that_many(batch: BatchRunner) -> None:
    given = customers(1003)

    batch(batch.write(given), content=linear_model(rows=16))

    assert np.array_equal(batch.predicted()["score"].to_numpy(), scores(given))


def test_a_model_that_mixes_the_rows_of_a_call_gets_each_alone(batch: BatchRunner) -> None:
    graph = helper.make_graph(
        [
            helper.make_node("ReduceMean", ["X"], ["mean"], axes=[0], keepdims=1),
            helper.make_node("Sub", ["X", "mean"], ["centred"]),
        ],
        "mixing",
        [helper.make_tensor_value_info("X", TensorProto.FLOAT, ["n", 3])],
        [helper.make_tensor_value_info("centred", TensorProto.FLOAT, ["n", 3])],
    )

    batch(batch.write(customers(40)), content=serialized(graph))

    assert batch.predicted()["centred"].to_pylist() == [[0.0, 0.0, 0.0]] * 40


def test_rows_with_long_texts_are_read_in_small_parts(batch: BatchRunner) -> None:
    rows = customers(300).append_column("letter", pa.array([f"{n}" * 200_000 for n in range(300)]))

    batch(batch.write(rows, row_group_size=100))

    made = pq.read_metadata(batch.partial / "data")
    assert max(made.row_group(n).num_rows for n in range(made.num_row_groups)) <= 300
    assert made.num_row_groups > 1
    assert batch.predicted()["letter"].equals(rows["letter"])


def test_features_can_be_named_where_the_version_does_not(batch: BatchRunner) -> None:
    source = batch.write(customers(9))

    with pytest.raises(InvalidInput, match="--features"):
        batch(source, tensors=())
    batch(source, tensors=(), features=NAMES)

    assert np.array_equal(batch.predicted()["score"].to_numpy(), scores(customers(9)))


# ------------------------------------------------------------------------------------------ bad input


def test_columns_that_do_not_fit_are_all_named(batch: BatchRunner) -> None:
    rows = customers(5).drop_columns(["age"]).append_column("AGE", pa.array([1.0] * 5))
    rows = rows.set_column(rows.column_names.index("income"), "income", pa.array(["much"] * 5))

    with pytest.raises(InvalidInput) as missing:
        batch(batch.write(rows))
    with pytest.raises(InvalidInput) as typed:
        batch(batch.write(rows.append_column("age", pa.array([1.0] * 5))))

    (fault,) = missing.value.faults
    assert (fault.where, fault.given, fault.fix) == (
        "column age",
        "missing",
        "names are exact: there is AGE",
    )
    (fault,) = typed.value.faults
    assert (fault.where, fault.given) == ("column income", "string")
    assert not (batch.partial / "data").exists() or (batch.partial / "data").stat().st_size <= 4


def test_a_column_that_is_there_twice_is_refused(batch: BatchRunner) -> None:
    rows = pa.Table.from_arrays(
        [pa.array([1.0]), pa.array([2.0]), pa.array([3.0]), pa.array([4.0])],
        names=["age", "age", "income", "calls"],
    )

    with pytest.raises(InvalidInput, match="2 columns of that name"):
        batch(batch.write(rows))


@pytest.mark.parametrize(("value", "given"), [(1e300, "1e+300"), (-1e39, "-1e+39")])
def test_a_number_that_the_model_cannot_hold_is_named_with_its_row_group(
    batch: BatchRunner, value: float, given: str
) -> None:
    ages = np.ones(10_000)
    ages[7777] = value

    with pytest.raises(InvalidInput) as refused:
        batch(batch.write(customers(10_000).set_column(2, "age", pa.array(ages)), row_group_size=1000))

    (fault,) = refused.value.faults
    assert (fault.where, fault.given) == (
        "in.parquet, row group 7, column age",
        f"{given} (row 7777 of the input)",
    )


def test_whole_numbers_that_the_model_takes_must_be_whole_and_there(batch: BatchRunner) -> None:
    graph = helper.make_graph(
        [helper.make_node("Neg", ["count"], ["negative"])],
        "whole",
        [helper.make_tensor_value_info("count", TensorProto.INT32, ["n"])],
        [helper.make_tensor_value_info("negative", TensorProto.INT32, ["n"])],
    )
    tensors = (TensorSpec(name="count", dtype="int32", shape=(-1,)),)

    def run(values: list[float | None]) -> Any:
        batch(
            batch.write(pa.table({"count": values})), content=serialized(graph), tensors=tensors, restart=True
        )
        return batch.predicted()["negative"].to_pylist()

    assert run([1.0, 2.0]) == [-1, -2]
    with pytest.raises(InvalidInput, match="row group 0, column count"):
        run([1.0, 2.5])
    with pytest.raises(InvalidInput, match="null"):
        run([1.0, None])
    with pytest.raises(InvalidInput, match="column count"):
        run([2.0**40])


@pytest.mark.usefixtures("small_parts")
def test_a_file_whose_schema_drifts_is_named_and_the_run_goes_on_once_it_is_repaired(
    batch: BatchRunner,
) -> None:
    folder = batch.folder / "in"
    for number in range(3):
        batch.write(customers(2000, first=2000 * number), f"in/{number}.parquet")
    drifted = customers(2000, first=6000)
    drifted = drifted.set_column(2, "age", drifted["age"].cast(pa.string()))
    batch.write(drifted, "in/3.parquet")

    with pytest.raises(InvalidInput) as refused:
        batch(folder)
    batch.write(customers(2000, first=6000), "in/3.parquet")
    batch(folder)

    (fault,) = refused.value.faults
    assert (fault.where, fault.given) == ("3.parquet, column age", "string")
    assert "float, as in 0.parquet" in str(fault.allowed)
    assert np.array_equal(batch.predicted()["id"].to_numpy(), np.arange(8000))


def test_a_file_that_is_cut_off_is_refused(batch: BatchRunner) -> None:
    source = batch.write(customers(10_000))
    whole = source.read_bytes()

    source.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InvalidInput, match=r"in\.parquet"):
        batch(source)
    source.write_bytes(b"")
    with pytest.raises(InvalidInput, match=r"in\.parquet"):
        batch(source)
    with pytest.raises(NotFound):
        batch(batch.folder / "nothing.parquet")


@pytest.mark.usefixtures("small_parts")
def test_pages_that_lie_are_refused_with_their_row_group_and_what_was_before_counts(
    batch: BatchRunner,
) -> None:
    source = batch.write(customers(20_000), row_group_size=2000, compression="none", use_dictionary=False)
    content = bytearray(source.read_bytes())
    place = pq.read_metadata(source).row_group(6).column(0).data_page_offset
    content[place : place + 24] = b"\xff" * 24
    source.write_bytes(content)

    with pytest.raises(InvalidInput) as refused:
        batch(source)

    assert "in.parquet, row group" in refused.value.faults[0].where


def test_rows_that_were_predicted_leave_the_memory(tmp_path: Path) -> None:
    path, group_rows = tmp_path / "in.parquet", 1 << 16
    row_group = pa.table(
        {f"f{number}": np.random.default_rng(number).normal(size=group_rows) for number in range(8)}
    )
    with pq.ParquetWriter(path, row_group.schema) as writer:
        for _ in range(24):
            writer.write_table(row_group)
    table = open_input(path, DeltaFolders())

    held = [
        pa.total_allocated_bytes()
        for _ in read_parts(table, row_group.schema.names, start=0, part_rows=group_rows)
    ]

    assert max(held[12:]) < max(held[:12]) + row_group.nbytes
