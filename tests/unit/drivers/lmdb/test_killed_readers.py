"""A reader that was killed in the middle of a read holds neither pages nor slots of the online store for ever."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pyarrow as pa

from falaj.drivers.lmdb.online import LmdbOnlineStore
from falaj.ports.online import EntityKey, ViewName

VIEW = ViewName("trips/1")
MAP_BYTES = 1 << 20
READS = """
import sys, lmdb
environment = lmdb.open(sys.argv[1], subdir=False, max_readers=512)
transaction = environment.begin()
transaction.get(b"key")
print("reads", flush=True)
sys.stdin.read()
"""


def write(store: LmdbOnlineStore, number: int) -> None:
    rows = pa.record_batch(
        {
            "key": pa.array([b"%d" % key for key in range(100)], pa.binary()),
            "event_time": pa.array([number] * 100, pa.int64()),
            "value": pa.array([bytes([number % 256]) * 1000] * 100, pa.binary()),
        }
    )
    store.write(VIEW, rows)


def kill_a_reader(path: Path) -> None:
    command = [sys.executable, "-c", READS, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == b"reads\n"
        reader.send_signal(signal.SIGKILL)


def test_the_file_does_not_grow_behind_a_killed_reader(tmp_path: Path) -> None:
    path = tmp_path / "online"
    store = LmdbOnlineStore(path, map_bytes=MAP_BYTES)
    write(store, 0)
    kill_a_reader(path)

    for number in range(1, 40):
        write(store, number)

    assert path.stat().st_size == MAP_BYTES
    assert store.read(VIEW, [EntityKey(b"7")]) == [bytes([39]) * 1000]
    store.close()
