"""Ingestion killed by SIGKILL: pinned rows stay unchanged, and the next ingestion continues."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

import falaj as fj

MOMENT = pa.timestamp("us", "UTC")
ROWS = 50_000

CHILD = """
import sys, time
import pyarrow as pa
import deltalake
import falaj as fj
import falaj.drivers.deltalake.tables as driver

real = deltalake.write_deltalake

def slowly(rows):
    for number, batch in enumerate(rows.to_batches(max_chunksize=1000)):
        yield batch
        if number == 20:
            stop()

def stop():
    print("now", flush=True)
    time.sleep(600)

def within(table, rows, **options):
    reader = pa.RecordBatchReader.from_batches(rows.schema, slowly(rows))
    return real(table, reader, target_file_size=100_000, **options)

def behind(table, rows, **options):
    real(table, rows, **options)
    stop()

def published(*args, **options):
    real_add(*args, **options)
    stop()

if sys.argv[1] == "quarantine":
    from falaj.features import store
    real_add, store.add_quarantined = store.add_quarantined, published
elif sys.argv[1] == "again":
    from falaj.features import store
    real_add, store.change_quarantined = store.change_quarantined, published
elif sys.argv[1] == "merging":
    driver.MERGED_FILES = 1
    deltalake.DeltaTable.create_checkpoint = lambda table: stop()
else:
    driver.write_deltalake = {"within": within, "behind": behind}[sys.argv[1]]
with fj.open(sys.argv[2]) as platform:
    if sys.argv[1] == "again":
        platform.features.ingest_quarantined("trips-1")
    else:
        platform.ingest("trips", sys.argv[3])
"""


def trips(start: int) -> pa.Table:
    numbers = list(range(start, start + ROWS))
    return pa.table(
        {"driver": numbers, "event_time": pa.array(numbers, MOMENT), "km": [float(n) for n in numbers]}
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "before"), [("within", 0), ("within", 1), ("behind", 0), ("behind", 1), ("merging", 2)]
)
def test_a_killed_ingestion_leaves_pinned_versions_readable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, before: int
) -> None:
    monkeypatch.setenv("FALAJ_CONFIG_DIR", str(tmp_path / "config"))
    home, file = tmp_path / "home", tmp_path / "more.arrow"
    with fj.open(home) as platform:
        platform.apply(
            [
                fj.Entity(name="driver", key="driver", type="integer"),
                fj.FeatureView(
                    name="trips", entities=("driver",), columns=(fj.Feature(name="km", type="float"),)
                ),
            ]
        )
        for number in range(before):
            platform.ingest("trips", trips(number * ROWS))
        pinned = platform.features.show("trips")
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, trips(10 * ROWS).schema) as writer:
        writer.write_table(trips(10 * ROWS))

    _kill_when_it_says([sys.executable, "-c", CHILD, where, str(home), str(file)])

    with fj.open(home) as platform:
        assert platform.features.show("trips") == pinned
        if before:
            assert platform.features.scan("trips").read_all().num_rows == before * ROWS
        done = platform.ingest("trips", file)
        rows = platform.features.scan("trips").read_all()
        assert done.rows == rows.num_rows == (before + 1) * ROWS
        assert sorted(rows["__arrival"].to_pylist()) == list(range(rows.num_rows))


@pytest.mark.slow
def test_a_killed_quarantine_leaves_everything_or_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process is killed within the transaction that publishes valid and invalid rows."""
    monkeypatch.setenv("FALAJ_CONFIG_DIR", str(tmp_path / "config"))
    home, file = tmp_path / "home", tmp_path / "rows.csv"
    file.write_text(
        "driver,event_time,km\n1,2024-06-01,1\n2,2024-06-01,-5\n3,2024-06-01,-50\n4,2024-06-01,4\n"
    )
    strict, wider = (fj.Feature(name="km", type="float", min=least) for least in (0, -10))
    view = fj.FeatureView(
        name="trips",
        entities=("driver",),
        columns=(strict,),
        invalid_rows="quarantine",
        max_invalid_share=0.5,
    )
    with fj.open(home) as platform:
        platform.apply([fj.Entity(name="driver", key="driver", type="integer"), view])

    _kill_when_it_says([sys.executable, "-c", CHILD, "quarantine", str(home), str(file)])
    with fj.open(home) as platform:
        assert platform.features.show("trips").rows == 0
        assert platform.features.quarantined_batches("trips").items == ()
        done = platform.ingest("trips", file)
        platform.apply([view.model_copy(update={"columns": (wider,)})])
    assert (done.added, done.quarantined) == (2, 2)

    _kill_when_it_says([sys.executable, "-c", CHILD, "again", str(home), str(file)])
    with fj.open(home) as platform:
        (batch,) = platform.features.quarantined_batches("trips").items
        assert (batch.rows, batch.ingested, platform.features.show("trips").rows) == (2, 0, 2)
        assert [row.row for row in platform.features.quarantined_rows("trips-1").items] == [2, 3]
        again = platform.features.ingest_quarantined("trips-1")
        assert (again.added, again.quarantined, again.rows) == (1, 1, 3)
        assert platform.features.scan("trips").read_all()["km"].to_pylist() == [1.0, 4.0, -5.0]


def _kill_when_it_says(command: list[str]) -> None:
    child = subprocess.Popen(command, stdout=subprocess.PIPE, env=dict(os.environ), text=True)
    assert child.stdout is not None
    with child:
        line = child.stdout.readline()
        os.kill(child.pid, signal.SIGKILL)
    assert line == "now\n"
