"""The contract of OnlineStore, and of the OnlinePlace that it is opened at."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest

from falaj.drivers.lmdb.place import LmdbFile
from falaj.errors import Damaged
from falaj.ports.online import MAX_VALUE_BYTES, EntityKey, OnlinePlace, OnlineStore, ViewName

TRIPS = ViewName("trips")
MORNING, NOON = 1_000, 2_000


PLACES: dict[str, Callable[[Path], OnlinePlace]] = {
    "lmdb": partial(LmdbFile, map_bytes=1 << 16),
}


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> OnlinePlace:
    return PLACES[request.param](tmp_path / "online" / "features")


@pytest.fixture
def store(place: OnlinePlace) -> Iterator[OnlineStore]:
    with closing(place.open()) as made:
        yield made


def rows(*given: tuple[str, int, bytes]) -> pa.RecordBatch:
    return pa.record_batch(
        {
            "key": pa.array([key.encode() for key, _, _ in given], pa.binary()),
            "event_time": pa.array([time for _, time, _ in given], pa.int64()),
            "value": pa.array([value for _, _, value in given], pa.binary()),
        }
    )


def read(store: OnlineStore, *keys: str, view: ViewName = TRIPS) -> list[bytes | None]:
    return store.read(view, [EntityKey(key.encode()) for key in keys])


def test_values_come_back_in_the_order_of_the_keys(store: OnlineStore) -> None:
    assert store.write(TRIPS, rows(("d1", NOON, b"one"), ("d2", NOON, b""))) == 2

    assert read(store, "d2", "unknown", "d1", "d1") == [b"", None, b"one", b"one"]


def test_late_row_does_not_overwrite_newer(store: OnlineStore) -> None:
    store.write(TRIPS, rows(("d1", NOON, b"9")))

    written = store.write(TRIPS, rows(("d1", MORNING, b"4")))

    assert (written, read(store, "d1")) == (0, [b"9"])


def test_within_one_write_the_newest_event_counts(store: OnlineStore) -> None:
    store.write(TRIPS, rows(("d1", NOON, b"9"), ("d1", MORNING, b"4"), ("d1", -5, b"1")))

    assert read(store, "d1") == [b"9"]


def test_at_equal_event_times_the_later_write_counts(store: OnlineStore) -> None:
    store.write(TRIPS, rows(("d1", NOON, b"first")))
    store.write(TRIPS, rows(("d1", NOON, b"corrected")))

    assert read(store, "d1") == [b"corrected"]


def test_views_do_not_mix(store: OnlineStore) -> None:
    store.write(TRIPS, rows(("d1", NOON, b"trips")))
    store.write(ViewName("fares"), rows(("d1", NOON, b"fares")))

    assert read(store, "d1", view=ViewName("fares")) == [b"fares"]
    assert read(store, "d1") == [b"trips"]


def test_keys_may_be_long(store: OnlineStore) -> None:
    long, longer = "k" * 5000, "k" * 5001
    store.write(TRIPS, rows((long, NOON, b"long"), (longer, NOON, b"longer")))

    assert read(store, long, longer) == [b"long", b"longer"]


def test_empty_reads_and_writes_are_allowed(store: OnlineStore) -> None:
    assert store.write(TRIPS, rows()) == 0
    assert read(store) == []


def test_the_store_grows(store: OnlineStore) -> None:
    many = [(f"d{number}", NOON, bytes(1000)) for number in range(3000)]

    assert store.write(TRIPS, rows(*many)) == 3000
    assert read(store, "d0", "d2999") == [bytes(1000)] * 2


def test_reads_continue_while_the_store_grows(store: OnlineStore) -> None:
    store.write(TRIPS, rows(("d1", NOON, b"here")))
    stop, wrong = threading.Event(), list[object]()

    def keep_reading() -> None:
        while not stop.wait(0.001):
            if (found := read(store, "d1")) != [b"here"]:
                wrong.append(found)

    readers = [threading.Thread(target=keep_reading) for _ in range(2)]
    for reader in readers:
        reader.start()
    try:
        for part in range(5):
            store.write(TRIPS, rows(*((f"e{part}.{n}", NOON, bytes(2000)) for n in range(100))))
    finally:
        stop.set()
        for reader in readers:
            reader.join()

    assert wrong == []


def test_a_second_opener_sees_what_the_first_wrote(store: OnlineStore, place: OnlinePlace) -> None:
    store.write(TRIPS, rows(("d1", NOON, b"one")))

    second = place.open()

    assert read(second, "d1") == [b"one"]
    second.close()
    assert read(store, "d1") == [b"one"]


def test_a_view_that_was_never_written_is_damaged_not_empty(store: OnlineStore) -> None:
    store.write(TRIPS, rows(("d1", NOON, b"one")))
    store.write(ViewName("empty"), rows())

    assert read(store, "d1", view=ViewName("empty")) == [None]
    with pytest.raises(Damaged) as caught:
        read(store, "d1", view=ViewName("lost"))
    assert "doctor --repair" in (caught.value.faults[0].fix or "")


def test_keys_between_others_are_linked(store: OnlineStore) -> None:
    for keys in (["d5", "d1"], ["d3"], ["d0", "d2", "d4", "d6", "d6"], ["d1", "d9"]):
        store.write(TRIPS, rows(*((key, NOON, key.encode()) for key in keys)))

    store.check()
    assert read(store, *(f"d{number}" for number in range(10))) == [
        b"d0", b"d1", b"d2", b"d3", b"d4", b"d5", b"d6", None, None, b"d9",
    ]  # fmt: skip


def test_a_value_may_be_large(store: OnlineStore) -> None:
    large = bytes(MAX_VALUE_BYTES)

    store.write(TRIPS, rows(("d1", NOON, large)))

    assert read(store, "d1") == [large]
    store.check()


def test_a_place_is_sound_before_and_after_it_is_used(place: OnlinePlace) -> None:
    assert place.is_sound()
    with closing(place.open()) as store:
        store.write(TRIPS, rows(("d1", NOON, b"one")))

    assert place.is_sound()


def test_a_file_that_was_overwritten_is_not_sound(place: OnlinePlace) -> None:
    if place.file is None:
        return  # a server holds the values
    with closing(place.open()) as store:
        store.write(TRIPS, rows(("d1", NOON, b"one")))

    place.file.write_bytes(b"something else " * 1000)

    assert not place.is_sound()


def test_a_store_begins_empty_after_the_last_one_was_set_aside(place: OnlinePlace) -> None:
    assert place.set_aside("unused") is None
    with closing(place.open()) as store:
        store.write(TRIPS, rows(("d1", NOON, b"one")))

    kept = place.set_aside("before")

    with closing(place.open()) as store:
        with pytest.raises(Damaged):
            read(store, "d1")
        store.write(TRIPS, rows(("d1", MORNING, b"older")))
        assert read(store, "d1") == [b"older"]
    assert kept is None or kept.endswith(".before")
