"""Files of this machine: a process without keys predicts them, and the output has its name only when it is complete."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

import batch_runs
from batch_runs import customers, linear_model, predict_local, scores
from falaj.errors import AlreadyExists, Conflict, Damaged, InvalidInput, NotFound, Unavailable
from falaj.records.control.predictions import PredictionColumns, PredictionProgress
from polling import PATIENCE_S


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.parquet"
    pq.write_table(customers(2000), path)
    return path


def test_a_file_is_predicted_and_nothing_else_is_left(source: Path, tmp_path: Path) -> None:
    seen: list[PredictionProgress] = []

    done = predict_local(source, tmp_path / "out.parquet", report=seen.append)

    made = pq.read_table(tmp_path / "out.parquet")
    assert np.array_equal(made["score"].to_numpy(), scores(customers(2000)))
    assert (done.rows, seen[0].rows, seen[-1].rows, seen[-1].total) == (2000, 0, 2000, 2000)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.parquet", "out.parquet"]
    assert (tmp_path / "out.parquet").stat().st_uid == os.getuid()


def test_an_output_that_is_there_is_replaced_only_if_asked_for(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.parquet"
    output.write_text("mine")

    with pytest.raises(AlreadyExists, match="--overwrite"):
        predict_local(source, output)
    assert output.read_text() == "mine"
    predict_local(source, output, overwrite=True)

    assert pq.read_table(output).num_rows == 2000


def test_the_output_is_outside_of_the_input_and_in_a_folder_that_is_there(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    pq.write_table(customers(5), folder / "rows.parquet")

    with pytest.raises(InvalidInput, match="outside of the input"):
        predict_local(folder, folder / "out.parquet")
    with pytest.raises(InvalidInput, match="outside of the input"):
        predict_local(folder / "rows.parquet", folder / "rows.parquet", overwrite=True)
    with pytest.raises(NotFound, match="no folder"):
        predict_local(folder, tmp_path / "missing" / "out.parquet")
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(InvalidInput, match="outside of the input"):
        predict_local(folder, tmp_path / "link" / "out.parquet")


def test_an_error_leaves_nothing_of_a_run_that_wrote_no_row(tmp_path: Path) -> None:
    source = tmp_path / "in.parquet"
    pq.write_table(customers(5).drop_columns(["age"]), source)

    with pytest.raises(InvalidInput, match="column age"):
        predict_local(source, tmp_path / "out.parquet")

    assert [path.name for path in tmp_path.iterdir()] == ["in.parquet"]


def test_files_that_only_their_owner_may_read_are_predicted(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    pq.write_table(customers(50), folder / "rows.parquet")
    (folder / "rows.parquet").chmod(0o600)

    predict_local(folder, tmp_path / "out.parquet")

    assert pq.read_table(tmp_path / "out.parquet").num_rows == 50


def test_a_model_that_is_not_the_registered_one_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(Damaged, match="wrong hash"):
        batch_runs.predict_files(
            batch_runs.PredictionRun(
                model="churn@1",
                file="model.onnx",
                sha256="0" * 64,
                tensors=batch_runs.SIGNATURE,
                source=str(source),
            ),
            [linear_model()],
            tmp_path / "out.parquet",
            report=batch_runs.nothing,
        )

    assert not (tmp_path / "out.parquet").exists()


def test_a_second_run_to_the_same_output_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "in.parquet"
    pq.write_table(customers(200_000), source)
    started, refused = threading.Event(), threading.Event()

    def hold(far: PredictionProgress) -> None:
        started.set()
        refused.wait(PATIENCE_S)

    first = threading.Thread(
        target=predict_local, args=(source, tmp_path / "out.parquet"), kwargs={"report": hold}
    )
    first.start()
    try:
        assert started.wait(PATIENCE_S)
        with pytest.raises(Conflict, match=r"another run writes out\.parquet"):
            predict_local(source, tmp_path / "out.parquet")
    finally:
        refused.set()
        first.join()

    assert pq.read_table(tmp_path / "out.parquet").num_rows == 200_000


def test_a_process_that_dies_is_told_and_the_next_run_goes_on(tmp_path: Path) -> None:
    source = tmp_path / "in.parquet"
    pq.write_table(customers(3_000_000), source)

    def kill_child(far: PredictionProgress) -> None:
        if far.rows:
            for child in children(os.getpid()):
                os.kill(child, signal.SIGKILL)

    with pytest.raises(Unavailable, match="the same command goes on"):
        predict_local(source, tmp_path / "out.parquet", report=kill_child)
    predict_local(source, tmp_path / "out.parquet")

    assert np.array_equal(pq.read_table(tmp_path / "out.parquet")["id"].to_numpy(), np.arange(3_000_000))


def children(parent: int) -> list[int]:
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(parent)], capture_output=True, text=True).stdout
    return [
        int(word) for word in found.split() if (Path("/proc") / word / "cmdline").exists() and is_ours(word)
    ]


def is_ours(pid: str) -> bool:
    return (
        b"falaj.assembly.prediction" in (Path("/proc") / pid / "cmdline").read_bytes()
        or b"bwrap" in (Path("/proc") / pid / "cmdline").read_bytes()
    )


# ------------------------------------------------------------------------------------------ Delta tables


def test_delta_tables_are_read_and_written(tmp_path: Path) -> None:
    rows = customers(3000)
    write_deltalake(tmp_path / "in", rows.slice(0, 1000))
    write_deltalake(tmp_path / "in", rows.slice(1000), mode="append")

    predict_local(tmp_path / "in", tmp_path / "out")

    made = DeltaTable(tmp_path / "out").to_pyarrow_table().sort_by("id")
    assert np.array_equal(made["id"].to_numpy(), np.arange(3000))
    assert np.array_equal(made["score"].to_numpy(), scores(rows))
    with pytest.raises(AlreadyExists):
        predict_local(tmp_path / "in", tmp_path / "out")


def test_partitions_and_columns_that_were_added_later_are_filled_in(tmp_path: Path) -> None:
    rows = customers(20)
    first = rows.drop_columns(["income"]).append_column("region", pa.array(["a b", "ü"] * 10))
    write_deltalake(tmp_path / "in", first, partition_by=["region"])
    later = rows.append_column("region", pa.array(["c"] * 20))
    write_deltalake(tmp_path / "in", later, mode="append", schema_mode="merge")

    predict_local(tmp_path / "in", tmp_path / "out.parquet")

    made = pq.read_table(tmp_path / "out.parquet")
    by_region = {
        region: made.filter(pc.field("region") == region)["score"].to_numpy() for region in ("a b", "ü", "c")
    }
    assert [len(values) for values in by_region.values()] == [10, 10, 20]
    assert np.isnan(by_region["a b"]).all()
    assert np.array_equal(np.sort(by_region["c"]), np.sort(scores(rows)))


def test_rows_that_were_deleted_from_a_delta_table_are_not_predicted(tmp_path: Path) -> None:
    write_deltalake(tmp_path / "in", customers(100))
    DeltaTable(tmp_path / "in").delete("id >= 10")

    predict_local(tmp_path / "in", tmp_path / "out.parquet")

    assert pq.read_table(tmp_path / "out.parquet")["id"].to_pylist() == list(range(10))


def test_a_delta_log_that_lies_is_refused(tmp_path: Path) -> None:
    write_deltalake(tmp_path / "in", customers(10))
    (entry,) = (tmp_path / "in" / "_delta_log").glob("*.json")
    (name,) = (tmp_path / "in").glob("*.parquet")
    pq.write_table(customers(3), tmp_path / "secret.parquet")
    honest = entry.read_text()

    entry.write_text(honest.replace(name.name, "../secret.parquet"))
    with pytest.raises(InvalidInput):
        predict_local(tmp_path / "in", tmp_path / "out.parquet")
    entry.write_text(honest[: len(honest) // 2])
    with pytest.raises(InvalidInput):
        predict_local(tmp_path / "in", tmp_path / "out.parquet")

    assert not (tmp_path / "out.parquet").exists()


def test_columns_that_delta_does_not_have_are_refused_before_a_row_is_read(
    source: Path, tmp_path: Path
) -> None:
    rows = customers(5).append_column("small", pa.array([1, 2, 3, 4, 5], pa.uint32()))
    pq.write_table(rows, source)

    with pytest.raises(InvalidInput, match="column small"):
        predict_local(source, tmp_path / "out")
    predict_local(source, tmp_path / "out", columns=PredictionColumns(keep=("id",)))

    assert DeltaTable(tmp_path / "out").to_pyarrow_table().num_rows == 5


# ------------------------------------------------------------------------------------------ kills


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "rows"), [("parts", 40_000), ("files", 1_500_000)])
def test_kills_at_any_moment_lose_no_row_and_repeat_none(tmp_path: Path, mode: str, rows: int) -> None:
    given = customers(rows)
    source, output = tmp_path / "in.parquet", tmp_path / ("out.parquet" if mode == "files" else "run")
    pq.write_table(given, source, row_group_size=rows // 7)
    if mode == "parts":
        output.mkdir()
    command = [sys.executable, batch_runs.__file__, mode, str(source), str(output)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    randomness = random.Random(7)
    kills = 0

    while kills < 8:
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            try:
                process.wait(randomness.uniform(0.05, 2.5))
                break
            except subprocess.TimeoutExpired:
                process.kill()
                kills += 1
        if mode == "files" and output.exists():  # killed after its last act
            break
    is_unfinished = process.returncode != 0 and (mode == "parts" or not output.exists())
    subprocess.run(command, env=environment, check=is_unfinished, stdout=subprocess.DEVNULL)

    made = pq.read_table(output if mode == "files" else output / "partial" / "data")
    assert np.array_equal(made["id"].to_numpy(), np.arange(rows))
    assert np.array_equal(made["score"].to_numpy(), scores(given))
