"""Definitions that are inferred from files, and files that were written in another way than CSV is read."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from falaj.errors import InvalidInput, NotFound
from falaj.features.definitions import FileColumn, infer_features
from falaj.governance.operations.caller import acting_as
from falaj.records.features import ColumnType, Entity, Feature, FeatureView
from falaj.records.governance.identity import Role

if TYPE_CHECKING:
    from conftest import FeaturesEnv

CSV = (
    b"customer_id,event_time,calls,minutes,plan,active,created_at\n"
    b"1,2026-01-01T00:00:00+00:00,3,1.5,a,true,2026-01-02T00:00:00Z\n"
    b"2,2026-01-02T00:00:00Z,4,2.5,b,false,2026-01-03T00:00:00Z\n"
)
INTEGER, TEXT, MOMENT, FLOAT = ColumnType.INTEGER, ColumnType.TEXT, ColumnType.MOMENT, ColumnType.FLOAT


@pytest.mark.slow
def test_a_definition_is_inferred_from_a_file_and_fits_it(light_env: FeaturesEnv) -> None:
    platform, features = light_env.platform, light_env.features
    blob = platform.put("rows", CSV)

    found = features.infer(blob.id, name="usage")
    features.apply(entities=(found.entity,), views=(found.view,))
    made = features.ingest("usage", data=blob.id)

    assert found.entity == Entity(name="customer", key="customer_id", type=INTEGER)
    assert {each.name: each.type.value for each in found.view.columns} == {
        "calls": "integer",
        "minutes": "float",
        "plan": "text",
        "active": "boolean",
    }
    assert (found.view.event_time, found.view.created_time) == ("event_time", "created_at")
    assert (found.rows, found.skipped, made.added) == (2, (), 2)


def test_parquet_is_read_as_well_and_what_cannot_be_stored_is_named(light_env: FeaturesEnv) -> None:
    at = pa.array([0], pa.timestamp("us", "UTC"))
    table = pa.table({"at": at, "user": ["a"], "list": [[1]], "a b": [1], "n": [1.0]})
    file = io.BytesIO()
    pq.write_table(table, file)

    found = light_env.features.infer(light_env.platform.put("rows", file.getvalue()).id, name="v")

    assert found.entity == Entity(name="user", key="user", type=TEXT)
    assert found.view == FeatureView(
        name="v", entities=("user",), columns=(Feature(name="n", type=FLOAT),), event_time="at"
    )
    assert found.skipped == ("list", "a b")


@pytest.mark.slow
def test_only_who_may_read_the_blob_learns_its_columns(light_env: FeaturesEnv) -> None:
    platform = light_env.platform
    blob = platform.put("rows", CSV)
    stranger, reader = platform.join("stranger"), platform.join("reader", Role.VIEWER)

    with acting_as(reader):
        assert light_env.features.infer(blob.id, name="usage").rows == 2
    with acting_as(stranger), pytest.raises(NotFound):
        light_env.features.infer(blob.id, name="usage")


COLUMNS = (FileColumn("n", FLOAT), FileColumn("t", TEXT), FileColumn("at", MOMENT), FileColumn("x_key", TEXT))
OPTIONS = {"rows": 1, "name": "v", "entity": None, "key": None, "event_time": None}


def test_the_key_is_the_column_that_is_named_like_one() -> None:
    assert infer_features(COLUMNS, **OPTIONS).entity.key == "x_key"  # type: ignore[arg-type]
    assert infer_features(COLUMNS[:3], **OPTIONS).entity.key == "t"  # type: ignore[arg-type]
    chosen = infer_features(COLUMNS, **OPTIONS | {"key": "t", "entity": "thing"})  # type: ignore[arg-type]
    assert chosen.entity == Entity(name="thing", key="t", type=TEXT)


@pytest.mark.parametrize(
    ("columns", "options", "words"),
    [
        (COLUMNS[:2], {}, "a column of times"),
        (COLUMNS, {"event_time": "n"}, "a column of times"),
        (COLUMNS, {"event_time": "nowhere"}, "a column of times"),
        (COLUMNS, {"key": "n"}, "whole numbers or text"),
        (COLUMNS[2:3], {}, "whole numbers or text"),
        (COLUMNS[2:], {}, "neither the key nor a time"),
    ],
)
def test_what_is_missing_is_named(
    columns: tuple[FileColumn, ...], options: dict[str, str], words: str
) -> None:
    with pytest.raises(InvalidInput) as wrong:
        infer_features(columns, **OPTIONS | options)  # type: ignore[arg-type]

    assert words in str(wrong.value)
    assert columns[0].name in str(wrong.value)


def test_a_file_that_no_view_can_hold_is_refused() -> None:
    wide = [
        FileColumn("at", MOMENT),
        FileColumn("id", TEXT),
        *(FileColumn(f"c{n}", FLOAT) for n in range(1001)),
    ]

    with pytest.raises(InvalidInput, match="1000"):
        infer_features(wide, **OPTIONS)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------- other kinds of text


@pytest.mark.parametrize(
    ("content", "words", "fix"),
    [
        (b"id;at\n1;2\n", "separated by semicolons", "with commas"),
        (b"id;at\n1,5;2,5\n", "separated by semicolons", "with commas"),
        (b"id\tat\n1\t2\n", "separated by tabs", "with commas"),
        (b"id|at\n1|2\n", "separated by vertical bars", "with commas"),
        ("id,at\n1,2\n".encode("utf-16"), "UTF-16", "iconv --from-code UTF-16"),
        (b"id,name\n1,caf\xe9\n", "LATIN1", "iconv --from-code LATIN1"),
        (b"id,caf\xe9\n1,2\n", "LATIN1", "iconv --from-code LATIN1"),
    ],
)
def test_another_separator_or_encoding_is_named(
    light_env: FeaturesEnv, content: bytes, words: str, fix: str
) -> None:
    with pytest.raises(InvalidInput) as wrong:
        light_env.features.infer(light_env.platform.put("rows", content).id, name="v")

    assert words in str(wrong.value)
    assert fix in str(wrong.value)


def test_a_byte_order_mark_and_one_column_are_no_faults(light_env: FeaturesEnv) -> None:
    marked = light_env.platform.put("marked", b"\xef\xbb\xbf" + CSV)

    assert light_env.features.infer(marked.id, name="v").entity.key == "customer_id"
    with pytest.raises(InvalidInput, match="a column of times"):
        light_env.features.infer(light_env.platform.put("one", b"x\n1\n").id, name="v")


def test_a_column_that_is_almost_there_is_suggested(light_env: FeaturesEnv) -> None:
    view = FeatureView(name="v", entities=("user",), columns=(Feature(name="calls", type=INTEGER),))
    light_env.features.apply(entities=(Entity(name="user", key="user"),), views=(view,))
    blob = light_env.platform.put("rows", b"user,event_time,Cals\na,2026-01-01T00:00:00Z,1\n")

    with pytest.raises(InvalidInput) as wrong:
        light_env.features.ingest("v", data=blob.id)

    assert "did you mean Cals? Rename it to calls" in str(wrong.value)
