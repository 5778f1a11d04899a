"""Damage of the LMDB file: no value is lost or changed in silence."""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import pyarrow as pa
import pytest

from falaj.drivers.lmdb.online import LmdbOnlineStore
from falaj.errors import Damaged
from falaj.ports.online import EntityKey, ViewName

TRIPS = ViewName("trips/1")
KEYS = [f"driver {number}" for number in range(300)]


def rows(keys: list[str]) -> pa.RecordBatch:
    return pa.record_batch(
        {
            "key": pa.array([key.encode() for key in keys], pa.binary()),
            "event_time": pa.array([1] * len(keys), pa.int64()),
            "value": pa.array([value(key) for key in keys], pa.binary()),
        }
    )


def value(key: str) -> bytes:
    return key.encode() * 5


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file with values, closed and without the empty space at its end."""
    made = tmp_path / "online"
    in_child(lambda: written(made))
    size = with_environment(made, lambda found: (found.info()["last_pgno"] + 1) * found.stat()["psize"])
    os.truncate(made, size)
    return made


def written(file: Path) -> str:
    store = LmdbOnlineStore(file)
    store.write(TRIPS, rows(KEYS))
    store.write(TRIPS, rows(KEYS[::3]))
    store.close()
    return "done"


def outcome(file: Path) -> str:
    """What a reader of all keys sees."""
    try:
        store = LmdbOnlineStore(file)
    except Damaged:
        return "damaged"
    seen = {read_one(store, key) for key in KEYS}
    return min(seen, key=["wrong", "lost", "damaged", "right"].index)


def read_one(store: LmdbOnlineStore, key: str) -> str:
    try:
        (found,) = store.read(TRIPS, [EntityKey(key.encode())])
    except Damaged:
        return "damaged"
    if found is None:
        return "lost"
    return "right" if found == value(key) else "wrong"


def in_child(work: Callable[[], str]) -> str:
    """Do `work` in a process of its own, in which LMDB may open the file anew."""
    out, into = os.pipe()
    child = os.fork()
    if not child:
        os.write(into, work().encode())
        os._exit(0)
    os.close(into)
    with open(out, "rb") as answer:
        said = answer.read().decode()
    os.waitpid(child, 0)
    return said


def with_environment(file: Path, work: Callable[[Any], Any]) -> Any:
    with lmdb.open(str(file), subdir=False) as environment:
        return work(environment)


@pytest.mark.slow
def test_flipped_bits_are_right_or_damaged_but_never_lost_or_wrong(file: Path, tmp_path: Path) -> None:
    chance, sound, seen = random.Random(3), file.read_bytes(), Counter[str]()
    page, records = 4096, 200  # the records of a page lie at its end
    harmed = tmp_path / "harmed"

    for _ in range(120):
        content = bytearray(sound)
        position = chance.randrange(len(sound) // page) * page + chance.randrange(records, page)
        content[position] ^= 1 << chance.randrange(8)
        harmed.write_bytes(content)
        seen[in_child(lambda: outcome(harmed))] += 1

    assert seen["wrong"] == seen["lost"] == 0
    assert seen["damaged"] > 10
    assert seen["right"] + seen["damaged"] == 120


def test_a_key_that_was_renamed_by_a_flipped_bit_is_damaged(file: Path) -> None:
    content = file.read_bytes()
    assert b"driver 299" in content

    file.write_bytes(content.replace(b"trips/1\0driver 299", b"trips/1\0driver 29y"))

    assert in_child(lambda: read_one(LmdbOnlineStore(file), "driver 299")) == "damaged"


@pytest.mark.parametrize("size", [0.5, 0.9])
def test_a_cut_file_is_damaged(file: Path, size: float) -> None:
    os.truncate(file, int(file.stat().st_size * size) // 4096 * 4096)

    assert in_child(lambda: outcome(file)) == "damaged"


def test_a_file_that_was_replaced_by_a_new_one_is_damaged(file: Path) -> None:
    file.unlink()

    assert in_child(lambda: outcome(file)) == "damaged"


def test_everything_is_checked_on_request(file: Path) -> None:
    sound = file.read_bytes()
    assert in_child(lambda: checked(file)) == "sound"

    shutil.copy(file, file.with_name("harmed"))
    file.with_name("harmed").write_bytes(sound.replace(value(KEYS[7]), value(KEYS[8])))

    assert in_child(lambda: checked(file.with_name("harmed"))) == "damaged"


def checked(file: Path) -> str:
    try:
        LmdbOnlineStore(file).check()
    except Damaged:
        return "damaged"
    return "sound"


def test_a_returned_write_is_flushed(tmp_path: Path) -> None:
    store, flushed = LmdbOnlineStore(tmp_path / "online"), list[bool]()
    real = store._shared.environment

    class Watched:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def sync(self, force: bool) -> None:
            flushed.append(force)
            real.sync(force)

    store._shared.environment = Watched()
    store.write(TRIPS, rows(KEYS))

    assert flushed == [True]
    store._shared.environment = real
    store.close()
