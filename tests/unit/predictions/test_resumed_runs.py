"""Runs that stop: a later one goes on behind the last row that counts, and mixes nothing."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pyarrow as pa
import pytest

from batch_runs import BatchRunner, Stopped, customers, linear_model, scores, stop_after
from falaj.errors import Conflict, Damaged, InvalidInput, Unavailable
from falaj.records.control.predictions import PredictionProgress

pytestmark = pytest.mark.usefixtures("small_parts")


@pytest.mark.parametrize("rows", [1, 1000, 5000, 9999])
def test_a_stopped_run_goes_on_where_it_stopped(batch: BatchRunner, rows: int) -> None:
    given = customers(10_000)
    source = batch.write(given, row_group_size=3000)
    seen: list[PredictionProgress] = []

    with pytest.raises(Stopped):
        batch(source, report=stop_after(rows))
    done = batch(source, report=seen.append)

    made = batch.predicted()
    assert done.resumed >= rows
    assert seen[0].rows == seen[-1].resumed == done.resumed
    assert np.array_equal(made["id"].to_numpy(), np.arange(10_000))
    assert np.array_equal(made["score"].to_numpy(), scores(given))


def test_what_a_killed_run_wrote_without_counting_it_is_cut_off(batch: BatchRunner) -> None:
    source = batch.write(customers(10_000))
    with pytest.raises(Stopped):
        batch(source, report=stop_after(4000))
    with (batch.partial / "data").open("ab") as data, (batch.partial / "journal").open("ab") as journal:
        data.write(b"half a row group")
        journal.write(b'0badcafe {"rows": 1000, "bytes": [4, 5')

    done = batch(source)

    assert done.resumed == 4000
    assert np.array_equal(batch.predicted()["id"].to_numpy(), np.arange(10_000))


def test_a_journal_without_its_rows_is_damaged(batch: BatchRunner) -> None:
    source = batch.write(customers(10_000))
    with pytest.raises(Stopped):
        batch(source, report=stop_after(4000))
    (batch.partial / "data").write_bytes(b"PAR1")

    with pytest.raises(Damaged, match="--restart"):
        batch(source)
    done = batch(source, restart=True)

    assert (done.resumed, batch.predicted().num_rows) == (0, 10_000)


def test_another_version_does_not_go_on_with_the_rows_of_the_first(batch: BatchRunner) -> None:
    source = batch.write(customers(10_000))
    with pytest.raises(Stopped):
        batch(source, report=stop_after(4000))

    with pytest.raises(Conflict, match=r"churn@1 stopped after row 4000.*churn@2.*--restart"):
        batch(source, model="churn@2", content=linear_model(rows="n"))
    batch(source, model="churn@2", content=linear_model(rows="n"), restart=True)

    assert batch.predicted().num_rows == 10_000


def test_other_columns_and_other_rows_are_not_mixed_in(batch: BatchRunner) -> None:
    source = batch.write(customers(10_000))
    with pytest.raises(Stopped):
        batch(source, report=stop_after(4000))

    with pytest.raises(Conflict, match="other columns"):
        batch(source, keep=["id", "age"])
    batch.write(customers(10_000, first=1))
    with pytest.raises(Conflict, match=r"in\.parquet has changed"):
        batch(source)


def test_files_that_were_not_read_yet_may_change(batch: BatchRunner) -> None:
    folder = batch.folder / "in"
    batch.write(customers(4000), "in/0.parquet")
    bad = customers(4000, first=4000)
    bad = bad.set_column(2, "age", pa.array([1e300] * 4000))
    batch.write(customers(10).set_column(2, "age", pa.array([1.0] * 10)), "in/1.parquet")
    batch.write(bad, "in/1.parquet")
    first = customers(4000).set_column(2, "age", customers(4000)["age"].cast(pa.float64()))
    batch.write(first, "in/0.parquet")

    with pytest.raises(InvalidInput, match=r"1\.parquet, row group 0, column age"):
        batch(folder)
    good = customers(4000, first=4000)
    batch.write(good.set_column(2, "age", good["age"].cast(pa.float64())), "in/1.parquet")
    done = batch(folder)

    assert done.resumed == 4000
    assert np.array_equal(batch.predicted()["score"].to_numpy(), scores(customers(8000)))


def test_a_file_that_changes_while_it_is_read_ends_the_run(batch: BatchRunner) -> None:
    source = batch.write(customers(10_000))

    def replace(far: PredictionProgress) -> None:
        if far.rows == 0:
            batch.write(customers(10_000, first=5))

    with pytest.raises(Conflict, match="has changed while it was read"):
        batch(source, report=replace)


def test_two_runs_do_not_write_the_same_output(batch: BatchRunner) -> None:
    source = batch.write(customers(10_000))

    def again(far: PredictionProgress) -> None:
        if far.rows == 1000:
            with pytest.raises(Conflict, match="another run writes"):
                batch(source)

    done = batch(source, report=again)

    assert done.rows == batch.predicted().num_rows == 10_000


@contextmanager
def file_limit(size: int) -> Iterator[None]:
    """Let no file grow beyond `size` bytes, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size", [100, 5_000, 20_000, 33_333, 60_000])
def test_a_full_disk_stops_the_run_and_room_lets_it_go_on(batch: BatchRunner, size: int) -> None:
    given = customers(10_000)
    source = batch.write(given)

    with file_limit(size), pytest.raises(Unavailable, match=r"after row \d+: the disk is full") as full:
        batch(source)
    counted = int(full.value.message.partition("after row ")[2].partition(":")[0])
    done = batch(source)

    assert done.resumed == counted
    assert np.array_equal(batch.predicted()["score"].to_numpy(), scores(given))
