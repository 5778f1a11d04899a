"""A damaged file of the online store gives Damaged, or the right values; it never ends the process that reads it."""

from __future__ import annotations

import os
import random
import shutil
import signal
from pathlib import Path

import pyarrow as pa
import pytest

from falaj.drivers.lmdb.online import LmdbOnlineStore
from falaj.errors import Damaged
from falaj.ports.online import ViewName

TRIPS = ViewName("trips")
PAGE = 4096
KEYS = 2_000
SOUND, DAMAGED, WRONG = 0, 3, 4


def value(number: int) -> bytes:
    return bytes([number % 251]) * (9_000 if number % 100 == 0 else 60)


def rows(first: int, last: int) -> pa.RecordBatch:
    numbers = range(first, last)
    return pa.record_batch(
        {
            "key": [f"{number:06d}".encode() for number in numbers],
            "event_time": pa.array([1] * len(numbers), pa.int64()),
            "value": [value(number) for number in numbers],
        }
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of several levels, with large values and with free pages."""
    path = tmp_path_factory.mktemp("online") / "store"
    store = LmdbOnlineStore(path, map_bytes=1 << 20)
    for first in range(0, KEYS, 500):
        store.write(TRIPS, rows(first, first + 500))
    store.write(TRIPS, rows(0, KEYS // 4))
    store.close()
    return path


def outcome(path: Path) -> int:
    """Open, read and write the file in a child; return its exit status, negative for a signal."""
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            store = LmdbOnlineStore(path)
            for number in range(0, KEYS, 7):
                (found,) = store.read(TRIPS, [f"{number:06d}".encode()])
                if found != value(number):
                    os._exit(WRONG)
            store.check()
            store.write(TRIPS, rows(KEYS, KEYS + 5))
        except Damaged:
            os._exit(DAMAGED)
        except BaseException:
            os._exit(1)
        os._exit(SOUND)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def flipped(whole: Path, copy: Path, place: int, bit: int) -> Path:
    shutil.copyfile(whole, copy)
    with copy.open("r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1 << bit]))
    return copy


def used_pages(whole: Path) -> int:
    store = LmdbOnlineStore(whole)
    pages = int(store._shared.environment.info()["last_pgno"]) + 1
    store.close()
    return pages


def test_the_whole_file_is_sound(whole: Path, tmp_path: Path) -> None:
    shutil.copyfile(whole, tmp_path / "copy")

    assert outcome(tmp_path / "copy") == SOUND


@pytest.mark.parametrize("place", [8, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19])
def test_a_flipped_bit_in_the_head_of_a_page_ends_no_process(whole: Path, tmp_path: Path, place: int) -> None:
    pages = range(2, used_pages(whole), 60)

    found = {outcome(flipped(whole, tmp_path / "copy", page * PAGE + place, bit=place % 8)) for page in pages}

    assert found <= {SOUND, DAMAGED}


@pytest.mark.slow
def test_no_flipped_bit_ends_a_process_or_gives_another_value(whole: Path, tmp_path: Path) -> None:
    chosen, pages = random.Random(7), used_pages(whole)
    found: dict[int, list[tuple[int, int]]] = {}
    for turn in range(120):
        page = chosen.randrange(pages)
        place = page * PAGE + (chosen.randrange(64) if turn % 2 else chosen.randrange(PAGE))
        bit = chosen.randrange(8)
        found.setdefault(outcome(flipped(whole, tmp_path / "copy", place, bit)), []).append((place, bit))

    assert set(found) <= {SOUND, DAMAGED}, {code: places[:10] for code, places in found.items() if code > 3}
