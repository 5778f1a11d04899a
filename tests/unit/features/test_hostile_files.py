"""Uploaded files that lie give an error: no memory of the platform, no crash, and no memory beyond the budget."""

from __future__ import annotations

import resource
import struct
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from falaj.errors import InvalidInput, TooLarge
from falaj.governance import arrow_ipc
from falaj.ports.parsers import ByteSource
from falaj.records.features import ColumnType, Entity, Feature, FeatureView
from hostile_rows import LYING, arrow_file, arrow_stream, bomb, parquet_file, rows
from interfaces import ServedPlatform, serve

TRIPS = FeatureView(
    name="trips",
    entities=("driver",),
    columns=(Feature(name="km", type=ColumnType.FLOAT), Feature(name="car", type=ColumnType.TEXT)),
)
MANY = "SELECT driver, event_time, km, repeat('x', 1000) AS car FROM source, range(1000000)"
DEFINED = (
    Entity(name="driver", key="driver", type=ColumnType.INTEGER),
    TRIPS,
    TRIPS.model_copy(update={"name": "many", "sql": MANY}),
)
MEMORY_BYTES = 512 << 20
MANY_ROWS = 1 << 27
NOTHING = pa.nulls(MANY_ROWS)
WEIGHTLESS = {
    "nulls": pa.table({"driver": NOTHING, "event_time": NOTHING}),
    "a struct": pa.table({"driver": NOTHING, "s": pa.StructArray.from_arrays([NOTHING], ["n"])}),
    "a list": pa.table({"l": pa.LargeListArray.from_arrays(pa.array([0, MANY_ROWS], pa.int64()), NOTHING)}),
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedPlatform]:
    with serve(tmp_path_factory.mktemp("hostile"), toml='[features]\nmemory = "512MiB"\n') as made:
        made.platform.apply(DEFINED)
        yield made


def ingest(served: ServedPlatform, data: bytes, *, view: str = "trips") -> None:
    blob = served.platform.blobs.upload(iter([data]))
    served.platform.features.ingest(view, data=blob.id)


def has_no_rows(served: ServedPlatform, view: str = "trips") -> bool:
    return served.platform.features.show(view).table_version is None


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.parametrize("name", LYING)
def test_a_file_that_lies_is_refused(served: ServedPlatform, name: str) -> None:
    with pytest.raises(InvalidInput):
        ingest(served, LYING[name])

    assert has_no_rows(served)


@pytest.mark.parametrize("name", LYING)
def test_a_spine_that_lies_is_refused(served: ServedPlatform, name: str) -> None:
    blob = served.platform.blobs.upload(iter([LYING[name]]))

    with pytest.raises(InvalidInput):
        served.platform.features.training_set("lies", spine=blob.id, views=("trips",))


@pytest.mark.parametrize("name", WEIGHTLESS)
def test_rows_that_take_no_bytes_are_counted(served: ServedPlatform, name: str) -> None:
    """Their cast to the types of keys and times would take a gigabyte in the API."""
    data, before = arrow_stream(WEIGHTLESS[name]), peak_bytes()
    assert len(data) < 1000
    blob = served.platform.blobs.upload(iter([data]))

    with pytest.raises(TooLarge):
        served.platform.features.training_set("nothing", spine=blob.id, views=("trips",))
    with pytest.raises(TooLarge):
        arrow_ipc.read_result(data, where="rows", limit_bytes=MEMORY_BYTES)

    assert peak_bytes() - before < 64 << 20


UNSTORABLE = {
    "a time": pa.array([1, 2, 3], pa.time64("us")),
    "a duration": pa.array([1, 2, 3], pa.duration("s")),
    "an interval": pa.array([(1, 2, 3)] * 3, pa.month_day_nano_interval()),
    "a wide decimal": pa.array([1, 2, 3]).cast(pa.decimal256(76, 0)),
    "an empty struct": pa.array([{}] * 3, pa.struct([])),
    "times in a list": pa.array([[1], [2], []], pa.list_(pa.time64("us"))),
    "a large number": pa.array([1, 2**64 - 1, 3], pa.uint64()),
    "a far date": pa.array([0, 2**31 - 1, 0], pa.date32()),
    "a far moment": pa.array([0, 2**50, 0], pa.timestamp("s")),
}


@pytest.mark.parametrize("name", UNSTORABLE)
def test_a_spine_of_types_that_cannot_be_stored_is_refused(served: ServedPlatform, name: str) -> None:
    served.platform.ingest("trips", rows())
    spine = rows().select(["driver", "event_time"]).append_column("odd", UNSTORABLE[name])
    blob = served.platform.blobs.upload(iter([arrow_stream(spine)]))

    with pytest.raises(InvalidInput) as refused:
        served.platform.features.training_set("odd", spine=blob.id, views=("trips",))

    assert refused.value.faults[0].where.endswith(".odd")


def test_numbers_that_can_be_stored_in_another_type_are(served: ServedPlatform) -> None:
    served.platform.ingest("trips", rows())
    spine = rows().select(["driver", "event_time"])
    spine = spine.append_column("count", pa.array([1, 2, 3], pa.uint64()))
    spine = spine.append_column("byte", pa.array([0, 127, 255], pa.uint8()))
    spine = spine.append_column("half", pa.array([0.5, None, 2.0]).cast(pa.float16()))
    blob = served.platform.blobs.upload(iter([arrow_stream(spine)]))

    served.platform.features.training_set("numbers", spine=blob.id, views=("trips",))

    found = served.platform.features.load("numbers").read_all()
    assert found.select(["count", "byte", "half"]).to_pydict() == {
        "count": [1, 2, 3],
        "byte": [0, 127, 255],
        "half": [0.5, None, 2.0],
    }


@pytest.mark.parametrize(
    "data",
    [
        b"driver,driver\n1,2\n",
        arrow_stream(pa.table([pa.array([1]), pa.array([2])], names=["a", "a"])),
    ],
    ids=["csv", "arrow"],
)
def test_columns_that_are_there_twice_are_not_inferred(served: ServedPlatform, data: bytes) -> None:
    blob = served.platform.blobs.upload(iter([data]))

    with pytest.raises(InvalidInput, match="blob") as refused:
        served.platform.features.infer(blob.id, name="twice")

    assert refused.value.faults[0].allowed == "each column once"


def test_sql_over_types_that_it_does_not_know_is_refused(served: ServedPlatform) -> None:
    wide = rows().append_column("wide", UNSTORABLE["a wide decimal"])

    with pytest.raises(InvalidInput, match="sql"):
        ingest(served, arrow_stream(wide), view="many")


def test_a_few_rows_that_take_no_bytes_are_rows(served: ServedPlatform) -> None:
    spine = rows().select(["driver", "event_time"]).append_column("nothing", pa.nulls(3))
    served.platform.ingest("trips", rows())
    blob = served.platform.blobs.upload(iter([arrow_stream(spine)]))

    made = served.platform.features.training_set("few", spine=blob.id, views=("trips",))

    assert made.rows == 3


def test_many_small_batches_become_one() -> None:
    """Each takes their reader 20 µs: a file of 200 MB could hold up the API for a quarter of a minute."""
    many = pa.concat_tables([rows()] * 500)

    read = arrow_ipc.read_result(arrow_ipc.write_table(many), where="rows", limit_bytes=MEMORY_BYTES)

    assert read.equals(many)
    assert len(read.to_batches()) == 1


@pytest.mark.parametrize("name", LYING)
def test_what_a_parser_returns_is_validated_again(name: str) -> None:
    with pytest.raises(InvalidInput):
        arrow_ipc.read_result(LYING[name], where="rows", limit_bytes=MEMORY_BYTES)


def test_a_parser_returns_nothing_compressed() -> None:
    """Few bytes could take all of the memory; a file that is compressed is read by the parser process only."""
    zeros = pa.table({"n": pa.repeat(pa.scalar(0, pa.int64()), 1_000_000)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, zeros.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(zeros)
    data = sink.getvalue()
    before = pa.total_allocated_bytes()

    with pytest.raises(InvalidInput, match="not valid"):
        arrow_ipc.read_result(data, where="rows", limit_bytes=MEMORY_BYTES)

    assert len(data) < 10_000
    assert pa.total_allocated_bytes() - before < 1 << 20
    assert arrow_ipc.read_result(arrow_ipc.write_table(zeros), where="rows", limit_bytes=MEMORY_BYTES).equals(
        zeros
    )


def test_columns_of_other_types_are_decoded(served: ServedPlatform) -> None:
    cars = pa.array(["red", "blue", None])
    runs = pa.RunEndEncodedArray.from_arrays(pa.array([1, 2, 3], pa.int32()), cars)
    kinds = {"codes": cars.dictionary_encode(), "runs": runs, "views": cars.cast(pa.string_view())}
    spine = rows().select(["driver", "event_time"])
    for name, column in kinds.items():
        spine = spine.append_column(name, column)
    served.platform.ingest("trips", rows())
    blob = served.platform.blobs.upload(iter([arrow_stream(spine)]))

    served.platform.features.training_set("kinds", spine=blob.id, views=("trips",))

    found = served.platform.features.load("kinds").read_all()
    assert {name: found[name].to_pylist() for name in kinds} == {key: ["red", "blue", None] for key in kinds}


@pytest.mark.slow
def test_a_small_file_of_many_rows_takes_no_memory(served: ServedPlatform) -> None:
    """A tenth of the attack: 10,000,000 rows of 28 bytes and more."""
    data, before = bomb(10_000_000), peak_bytes()
    assert len(data) < 1 << 20

    with pytest.raises(TooLarge, match="in parts"):
        ingest(served, data)

    assert peak_bytes() - before < 64 << 20


def test_sql_of_a_user_takes_no_memory(served: ServedPlatform) -> None:
    before = peak_bytes()

    with pytest.raises(TooLarge):
        ingest(served, arrow_stream(rows()), view="many")

    assert peak_bytes() - before < 64 << 20


# ---------------------------------------------------------------------------------------------- mutations

TEXTS = [f"text {number:04} of the file" for number in range(40)]
TABLE = pa.table(
    {
        "number": pa.array(range(700_000, 700_040), pa.int64()),
        "text": pa.array(TEXTS, pa.string()),
        "maybe": pa.array([None if n % 3 == 0 else f"maybe {n:03}" for n in range(40)], pa.string()),
        "list": pa.array([[f"item {n}", f"item {n + 1}"] for n in range(40)]),
    }
)
CODED = TABLE.set_column(1, "text", pa.array(TEXTS).dictionary_encode())
WRITTEN = {
    "stream": arrow_stream(TABLE),
    "file": arrow_file(TABLE),
    "dictionary": arrow_stream(CODED),
    "parquet": parquet_file(TABLE),
    "parquet dictionary": parquet_file(TABLE, use_dictionary=True),
}
NUMBERS = st.sampled_from(
    [-(2**63), -(2**31), -4096, -1, 0, 1, 7, 255, 4096, 1 << 20, 2**31 - 1, 2**32, 2**40, 2**63 - 1]
)


@st.composite
def mutated(draw: st.DrawFn) -> tuple[str, bytes]:
    """A file in which some words of 1, 4 or 8 bytes are others."""
    kind = draw(st.sampled_from(sorted(WRITTEN)))
    data = bytearray(WRITTEN[kind])
    for _ in range(draw(st.integers(1, 4))):
        form, size = draw(st.sampled_from([("<B", 1), ("<i", 4), ("<q", 8)]))
        place = draw(st.integers(0, len(data) - size))
        place -= place % min(size, 4)
        value = draw(NUMBERS | st.integers(-(2**63), 2**63 - 1)) % (1 << 8 * size)
        data[place : place + size] = struct.pack(form.upper(), value)
    return kind, bytes(data)


def texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for each in value:
            yield from texts_in(each)


@pytest.mark.slow
@settings(
    derandomize=True,
    max_examples=300,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(mutated())
def test_nothing_but_the_bytes_of_a_file_comes_out_of_it(
    served: ServedPlatform, made: tuple[str, bytes]
) -> None:
    _, data = made
    parsers = served.parts.services.features.backends.parsers
    source = ByteSource(len(data), lambda offset, length: data[offset : offset + length])
    options = {"name": "mutated", "texts": [], "limit_bytes": 64 << 20}

    try:
        content = parsers.parse("rows", [source], options, owner="test").content
    except InvalidInput:
        return

    table = arrow_ipc.read_result(content, where="rows", limit_bytes=MEMORY_BYTES)
    for column in table.columns:
        for value in column.to_pylist():
            assert all(text.encode() in data for text in texts_in(value))


@settings(derandomize=True, max_examples=500, deadline=None)
@given(mutated().filter(lambda made: not made[0].startswith("parquet")))
def test_nothing_but_the_bytes_of_a_stream_passes_the_second_validation(made: tuple[str, bytes]) -> None:
    """What a parser process that was taken over could send."""
    _, data = made

    try:
        table = arrow_ipc.read_result(data, where="rows", limit_bytes=MEMORY_BYTES)
    except InvalidInput:
        return

    for column in table.columns:
        if pa.types.is_string(column.type):
            assert all(value is None or value.encode() in data for value in column.to_pylist())
