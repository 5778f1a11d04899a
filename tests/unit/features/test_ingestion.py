"""Ingestion: what is assumed about rows, uploads that come twice, and many at once."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pytest

from falaj.errors import Denied, InvalidInput, Unavailable
from falaj.features import views as view_rows
from falaj.features.validation import checks, conversion
from falaj.governance.operations.caller import acting_as
from falaj.records.features import ColumnType, Entity, Feature, FeatureView
from falaj.records.governance.identity import Role
from polling import PATIENCE_S

if TYPE_CHECKING:
    from conftest import FeaturesEnv

MOMENT = pa.timestamp("us", "UTC")
NOON = datetime(2024, 6, 1, 12, tzinfo=UTC)
DRIVER = Entity(name="driver", key="driver")
TRIPS = FeatureView(
    name="trips", entities=("driver",), columns=(Feature(name="km", type=ColumnType.FLOAT),), event_time="at"
)


def trips(*drivers: str, at: datetime = NOON) -> pa.Table:
    count = len(drivers)
    return pa.table({"driver": drivers, "at": pa.array([at] * count, MOMENT), "km": [1.0] * count})


@pytest.fixture
def stored(env: FeaturesEnv) -> FeaturesEnv:
    env.features.apply(entities=(DRIVER,), views=(TRIPS,))
    return env


@pytest.fixture
def light(light_env: FeaturesEnv) -> FeaturesEnv:
    light_env.features.apply(entities=(DRIVER,), views=(TRIPS,))
    return light_env


# ------------------------------------------------------------------------------------------- assumptions


def test_what_was_assumed_about_the_rows_is_said(light: FeaturesEnv) -> None:
    csv = b"driver,at,km,colour,size\na,2024-06-01 12:00:00,1,red,2\nb,2024-06-01 12:00:00,1,red,2\n"

    done = light.features.ingest("trips", data=light.platform.put("rows", csv).id)

    assert done.notes == (
        "at: 2 timestamps without a time zone, read as UTC",
        "colour: not a column of the view, left out",
        "size: not a column of the view, left out",
    )
    assert light.features.scan("trips").read_all()["at"].to_pylist() == [NOON, NOON]


@pytest.mark.slow
def test_text_of_any_width_is_read_the_same(light: FeaturesEnv) -> None:
    times = pa.array(["2024-06-01T12:00:00", "2024-06-01T16:00:00+04:00"], pa.large_string())
    rows = pa.table({"driver": pa.array(["a", "b"], pa.large_string()), "at": times, "km": [1.0, 2.0]})

    done = light.features.ingest("trips", data=light.put("rows", rows))

    assert done.notes == ("at: 1 timestamp without a time zone, read as UTC",)
    assert light.features.scan("trips").read_all()["at"].to_pylist() == [NOON, NOON]


def test_nanoseconds_are_not_cut_in_silence(light: FeaturesEnv) -> None:
    times = pa.array([1_000, 1_001, 2_999], pa.timestamp("ns", "UTC"))
    rows = pa.table({"driver": ["a", "b", "c"], "at": times, "km": [1.0] * 3})

    done = light.features.ingest("trips", data=light.put("rows", rows))

    assert done.notes == ("at: 2 timestamps with nanoseconds, cut to microseconds",)


@pytest.mark.parametrize(
    "times",
    [
        pa.array([0, 1 << 62], MOMENT),
        pa.array([0, -(1 << 62)], pa.timestamp("us")),
        pa.array([0, 1 << 50], pa.timestamp("s", "UTC")),  # more microseconds than 64 bits hold
        pa.array([0, 1 << 60], pa.timestamp("ms", "Not/Known")),
        pa.array([0, 2**31 - 1], pa.date32()),
    ],
    ids=["future", "past", "overflow", "unknown zone", "date"],
)
def test_moments_that_no_reader_could_show_are_refused(light: FeaturesEnv, times: pa.Array) -> None:
    """Once stored, they would fail every later read of their key."""
    rows = light.put("rows", pa.table({"driver": ["a", "b"], "at": times, "km": [1.0, 2.0]}))

    with pytest.raises(InvalidInput) as refused:
        light.features.ingest("trips", data=rows)
    light.features.ingest("trips", data=light.put("sound", trips("a")))
    with pytest.raises(InvalidInput) as refused_spine:
        light.features.training_set("set", spine=rows, views=("trips",), event_time="at")

    assert "row 2" in str(refused.value.faults[0].given)
    assert "row 2" in str(refused_spine.value.faults[0].given)


def test_the_time_before_the_first_moment_is_no_bound(light: FeaturesEnv) -> None:
    rows = light.put("rows", trips("a", at=datetime(1, 1, 2, tzinfo=UTC)))
    light.features.ingest("trips", data=rows)

    made = light.features.training_set("set", spine="view:trips", views=("trips",), last=timedelta(days=9))

    assert made.rows == 1


def test_rows_that_say_everything_have_no_notes(light: FeaturesEnv) -> None:
    whole = pa.table({"driver": ["a"], "at": pa.array([1_000], pa.timestamp("ns", "UTC")), "km": [1.0]})

    assert light.features.ingest("trips", data=light.put("rows", whole), strict=True).notes == ()


@pytest.mark.parametrize(
    ("rows", "where"),
    [
        (b"driver,at,km\na,2024-06-01 12:00:00,1\n", "view trips.at"),
        (b"driver,at,km\na,2024-06-01,1\n", "view trips.at"),
        (b"driver,at,km\na,2024-06-01T12:00:00.000000001Z,1\n", "view trips.at"),
        (b"driver,at,km\na,2024-06-01T12:00:00Z,1\nb,2024-06-01 12:00:00,1\n", "view trips.at"),
        (b"driver,at,km,KM\na,2024-06-01T12:00:00Z,1,1\n", "view trips.KM"),
    ],
)
def test_strict_refuses_what_would_be_assumed(light: FeaturesEnv, rows: bytes, where: str) -> None:
    blob = light.platform.put("rows", rows).id

    with pytest.raises(InvalidInput) as refused:
        light.features.ingest("trips", data=blob, strict=True)

    (fault,) = refused.value.faults
    assert fault.where == where
    assert fault.given
    assert fault.allowed
    assert "without strict" in (fault.fix or "")
    assert light.features.show("trips").rows == 0


@pytest.mark.slow
def test_nanoseconds_are_not_cut_in_silence_by_the_sql_of_a_view(light: FeaturesEnv) -> None:
    light.features.apply(views=(TRIPS.model_copy(update={"sql": "SELECT * FROM source"}),))
    times = pa.array([1_000, 1_001], pa.timestamp("ns", "UTC"))
    rows = pa.table({"driver": ["a", "b"], "at": times, "km": [1.0] * 2})

    done = light.features.ingest("trips", data=light.put("rows", rows))

    assert done.notes == ("at: 1 timestamp with nanoseconds, cut to microseconds",)


@pytest.mark.slow
def test_what_was_assumed_about_the_times_of_a_spine_is_said(light: FeaturesEnv) -> None:
    light.features.ingest("trips", data=light.put("rows", trips("a")))
    csv = b"driver,event_time\na,2024-06-01 12:00:00\na,2024-06-01 11:59:59\n"

    made = light.features.training_set("set", spine=light.platform.put("spine", csv).id, views=("trips",))
    again = light.features.training_set("set", spine="blob:spine", views=("trips",))

    assert made.notes == ("event_time: 2 timestamps without a time zone, read as UTC",)
    assert again == made
    assert light.features.load("set").read_all()["trips__km"].to_pylist() == [1.0, None]


@pytest.mark.slow
def test_nanoseconds_of_a_spine_are_not_cut_in_silence(light: FeaturesEnv) -> None:
    light.features.ingest("trips", data=light.put("rows", trips("a")))
    times = pa.array([1_001], pa.timestamp("ns", "UTC"))
    spine = pa.table({"driver": ["a"], "event_time": times, "signup": times})

    made = light.features.training_set("set", spine=light.put("spine", spine), views=("trips",))

    words = "1 timestamp with nanoseconds, cut to microseconds"
    assert made.notes == (f"event_time: {words}", f"signup: {words}")


def test_columns_of_a_spine_are_stored_as_tables_store_them(light: FeaturesEnv) -> None:
    light.features.ingest("trips", data=light.put("rows", trips("a")))
    odd = {
        "half": pa.array([1.5], pa.float16()),
        "byte": pa.array([200], pa.uint8()),
        "large": pa.array([2**63 - 1], pa.uint64()),
        "day": pa.array([0], pa.date64()),
        "second": pa.array([7], pa.timestamp("s")),
        "pair": pa.array([[1, 2]], pa.list_(pa.int64())),
    }
    spine = pa.table({"driver": ["a"], "event_time": pa.array([NOON], MOMENT), **odd})

    light.features.training_set("set", spine=light.put("spine", spine), views=("trips",))

    row = light.features.load("set").read_all().to_pylist()[0]
    assert (row["half"], row["byte"], row["large"], row["pair"]) == (1.5, 200, 2**63 - 1, [1, 2])
    assert (row["day"], row["second"]) == (date(1970, 1, 1), datetime(1970, 1, 1, 0, 0, 7))  # noqa: DTZ001


def test_columns_of_a_spine_that_no_table_stores_are_named() -> None:
    """They were an internal error, or one that asked to try again later."""
    odd = {
        "took": pa.array([1], pa.duration("s")),
        "hour": pa.array([1], pa.time32("s")),
        "large": pa.array([2**63], pa.uint64()),
        "pairs": pa.array([[1]], pa.list_(pa.float16())),
    }

    with pytest.raises(InvalidInput, match="4 columns cannot be stored") as refused:
        conversion.storable(pa.table({"driver": ["a"], **odd}), where="spine")

    assert [fault.where for fault in refused.value.faults] == [f"spine.{name}" for name in odd]


FAR = {
    "after 9999": pa.array([300_000_000_000], pa.timestamp("s", "UTC")),
    "before 1": pa.array([-99_999_999_999_999_999], pa.timestamp("us", "UTC")),
    "wraps to 1970": pa.array([2**64 // 1_000_000], pa.timestamp("s", "UTC")),
    "year 0": pa.array(["0000-06-01T12:00:00Z"]),
}


@pytest.mark.parametrize("times", FAR.values(), ids=FAR)
def test_a_time_that_no_reader_has_is_refused(times: pa.Array) -> None:
    """Python has the years 1 to 9999: what lies outside could be stored, and never be read."""
    moment = Feature(name="at", type=ColumnType.MOMENT)

    with pytest.raises(InvalidInput) as refused:
        checks.conform(pa.table({"at": times}), (moment,), required=frozenset(), where="view trips")

    (fault,) = refused.value.faults
    assert "in row 1" in (fault.given or "")
    assert "in the years 1 to 9999" in (fault.allowed or "")


@pytest.mark.slow
def test_neither_a_view_nor_a_spine_has_a_time_that_no_reader_has(light: FeaturesEnv) -> None:
    times = FAR["after 9999"]
    light.features.ingest("trips", data=light.put("near", trips("a")))
    rows = light.put("rows", pa.table({"driver": ["a"], "at": times, "km": [1.0]}))
    spine = light.put("spine", pa.table({"driver": ["a"], "event_time": times}))

    with pytest.raises(InvalidInput, match=r"view trips.at"):
        light.features.ingest("trips", data=rows)
    with pytest.raises(InvalidInput, match=r"spine.event_time"):
        light.features.training_set("set", spine=spine, views=("trips",))


@pytest.mark.slow
def test_a_time_before_1970_is_read_as_it_was(light: FeaturesEnv) -> None:
    at = datetime(1, 1, 1, tzinfo=UTC)
    light.features.ingest("trips", data=light.put("rows", trips("a", at=at)))
    light.features.materialize("trips")
    spine = pa.table({"driver": ["a"], "event_time": pa.array([at], MOMENT)})
    light.features.training_set("set", spine=light.put("spine", spine), views=("trips",))

    assert light.features.read("trips", keys=("a",)).rows[0].event_time == at
    assert light.features.load("set").read_all()["trips__km"].to_pylist() == [1.0]


def test_nan_is_no_text(light: FeaturesEnv) -> None:
    keys = pa.table({"driver": [1.5, float("nan")], "at": pa.array([NOON, NOON], MOMENT), "km": [1.0, 2.0]})

    with pytest.raises(InvalidInput) as refused:
        light.features.ingest("trips", data=light.put("rows", keys))

    assert refused.value.faults[0].given == "1 without a value: row 2"


@pytest.mark.slow
def test_a_nan_in_a_spine_matches_no_key(light: FeaturesEnv) -> None:
    light.features.ingest("trips", data=light.put("rows", trips("nan", "1.5")))
    spine = pa.table({"driver": [float("nan"), 1.5], "event_time": pa.array([NOON, NOON], MOMENT)})

    light.features.training_set("set", spine=light.put("spine", spine), views=("trips",))

    assert light.features.load("set").read_all()["trips__km"].to_pylist() == [None, 1.0]


# --------------------------------------------------------------------------------------------------- twice


def test_the_same_upload_is_added_once(stored: FeaturesEnv) -> None:
    features = stored.features
    first = features.ingest("trips", data=stored.put("one", trips("a", "b")))
    began = stored.platform.clock.now
    stored.platform.clock.advance(timedelta(hours=1))

    second = features.ingest("trips", data=stored.put("two", trips("a", "b")))

    assert (first.added, first.already_since) == (2, None)
    assert (second.added, second.rows, second.already_since) == (0, 2, began)
    assert second.table_version == first.table_version
    assert features.scan("trips").read_all().num_rows == 2


@pytest.mark.slow
def test_the_same_upload_is_added_again_if_asked(stored: FeaturesEnv) -> None:
    features = stored.features
    for name in ("one", "two"):
        done = features.ingest("trips", data=stored.put(name, trips("a")), again=True)
        assert (done.added, done.already_since) == (1, None)

    assert features.ingest("trips", data=stored.put("three", trips("a"))).added == 0
    assert features.scan("trips").read_all().num_rows == 2


def test_an_upload_that_comes_twice_keeps_its_stricter_label(light: FeaturesEnv) -> None:
    light.features.ingest("trips", data=light.put("one", trips("a")))

    light.features.ingest("trips", data=light.put("two", trips("a"), only=("AE",)))

    assert light.features.show("trips").label.only == {"AE"}


def test_another_view_gets_the_same_upload_too(light: FeaturesEnv) -> None:
    light.features.apply(views=(TRIPS.model_copy(update={"name": "others"}),))
    light.features.ingest("trips", data=light.put("one", trips("a")))

    assert light.features.ingest("others", data=light.put("two", trips("a"))).added == 1


@pytest.mark.slow
def test_strict_refuses_rows_that_were_added_before_without_it(light: FeaturesEnv) -> None:
    csv = b"driver,at,km\na,2024-06-01 12:00:00,1\n"
    light.features.ingest("trips", data=light.platform.put("one", csv).id)

    with pytest.raises(InvalidInput):
        light.features.ingest("trips", data=light.platform.put("two", csv).id, strict=True)


@pytest.mark.slow
def test_who_may_not_read_a_blob_does_not_learn_whether_it_was_added(light: FeaturesEnv) -> None:
    blob = light.put("one", trips("a"))
    light.features.ingest("trips", data=blob)
    sara = light.platform.join("sara", Role.DEVELOPER)
    light.platform.policies.publish(
        "no-blobs", text='forbid(principal, action == Action::"blobs.read", resource);'
    )

    with acting_as(sara), pytest.raises(Denied):
        light.features.ingest("trips", data=blob)


# ------------------------------------------------------------------------------------------------- at once


@pytest.mark.slow
def test_ingestions_at_the_same_time_all_succeed(stored: FeaturesEnv) -> None:
    other = stored.platform.again()
    blobs = [stored.put(f"rows-{number}", trips(f"d{number}")) for number in range(12)]

    with ThreadPoolExecutor(12) as pool:
        done = list(
            pool.map(
                lambda number: (other if number % 2 else stored).features.ingest("trips", data=blobs[number]),
                range(12),
            )
        )

    rows = stored.features.scan("trips").read_all()
    assert sorted(each.rows for each in done) == list(range(1, 13))
    assert sorted(rows["driver"].to_pylist()) == sorted(f"d{number}" for number in range(12))
    assert sorted(rows["__arrival"].to_pylist()) == list(range(12))


def test_the_same_upload_at_the_same_time_is_added_once(stored: FeaturesEnv) -> None:
    blobs = [stored.put(f"rows-{number}", trips("a")) for number in range(6)]

    with ThreadPoolExecutor(6) as pool:
        done = list(pool.map(lambda blob: stored.features.ingest("trips", data=blob), blobs))

    assert sorted(each.added for each in done) == [0] * 5 + [1]
    assert stored.features.scan("trips").read_all().num_rows == 1


def test_an_ingestion_does_not_wait_for_ever(light: FeaturesEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_rows, "WAIT_S", 0.05)
    found = light.features.show("trips")
    queue = f"{found.workspace}/{found.id}"

    blob = light.put("rows", trips("a"))

    with (
        light.features.backends.tables["local"].turn(queue, wait_s=0),
        pytest.raises(Unavailable, match=r"view trips: .* try again later"),
    ):
        light.features.ingest("trips", data=blob)

    assert light.features.ingest("trips", data="blob:rows").added == 1


@pytest.mark.slow
def test_rows_of_many_batches_are_ingested(light: FeaturesEnv) -> None:
    count = 300_000
    rows = pa.table(
        {
            "driver": [f"d{number}" for number in range(count)],
            "at": pa.array(np.arange(count), MOMENT),
            "km": np.arange(count, dtype=float),
        }
    )

    light.features.ingest("trips", data=light.put("rows", rows))
    light.features.ingest("trips", data=light.put("more", rows.slice(1)))

    found = light.features.scan("trips").read_all().sort_by("__arrival")
    assert found["km"].to_pylist() == [*range(count), *range(1, count)]
    assert light.features.ingest("trips", data="blob:rows").added == 0


PROCESS = """
import sys
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from falaj.assembly.home import open_home
from falaj.assembly.platform import assemble

home = open_home(Path(sys.argv[1]), Path(sys.argv[2]))
parts = assemble(home, as_owner=True)
with ThreadPoolExecutor(10) as pool:
    done = list(pool.map(lambda blob: parts.services.features.ingest("trips", data=blob), sys.argv[3:]))
print(sum(each.added for each in done))
parts.close()
"""


@pytest.mark.slow
def test_forty_ingestions_of_several_processes_all_succeed(stored: FeaturesEnv) -> None:
    blobs = [stored.put(f"rows-{number}", trips(f"d{number}")) for number in range(40)]
    home = stored.platform.home
    folders = [str(home.path), str(home.config_dir)]

    running = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, *folders, *blobs[start : start + 10]], stdout=subprocess.PIPE
        )
        for start in (0, 10, 20, 30)
    ]
    answers = [process.communicate(timeout=PATIENCE_S)[0] for process in running]

    rows = stored.features.scan("trips").read_all()
    assert answers == [b"10\n"] * 4
    assert sorted(rows["__arrival"].to_pylist()) == list(range(40))
    assert set(rows["driver"].to_pylist()) == {f"d{number}" for number in range(40)}
    assert stored.platform.verify_audit(deep=True).problems == ()
