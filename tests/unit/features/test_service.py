"""The operations of the feature store: define, ingest, join, materialize and read."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from falaj.errors import AlreadyExists, Conflict, Damaged, Denied, InvalidInput, NotFound, ResidencyDenied
from falaj.features import arrow_tables
from falaj.features.tables import views
from falaj.governance.operations.caller import acting_as
from falaj.records.features import AggregateFunction, Aggregation, ColumnType, Entity, Feature, FeatureView
from falaj.records.governance.identity import Role

if TYPE_CHECKING:
    from conftest import FeaturesEnv

MOMENT = pa.timestamp("us", "UTC")
NOON = datetime(2024, 6, 1, 12, tzinfo=UTC)
HOUR, DAY = timedelta(hours=1), timedelta(days=1)

CAR = Feature(name="car", type=ColumnType.TEXT)
DRIVER = Entity(name="driver", key="driver", type=ColumnType.INTEGER)
CITY = Entity(name="city", key="city")
TRIPS = FeatureView(
    name="trips",
    entities=("driver",),
    columns=(Feature(name="km", type=ColumnType.FLOAT), Feature(name="car", type=ColumnType.TEXT)),
    event_time="at",
    created_time="known",
    ttl=DAY,
)


def trips(*rows: tuple[int, datetime, datetime, float | None, str | None]) -> pa.Table:
    columns = list(zip(*rows, strict=True))
    return pa.table(
        {
            "driver": pa.array(columns[0], pa.int64()),
            "at": pa.array(columns[1], MOMENT),
            "known": pa.array(columns[2], MOMENT),
            "km": pa.array(columns[3], pa.float64()),
            "car": pa.array(columns[4], pa.string()),
        }
    )


def spine(*rows: tuple[int | None, datetime]) -> pa.Table:
    drivers, moments = zip(*rows, strict=True)
    numbers = list(range(len(rows)))
    return pa.table(
        {"number": numbers, "driver": pa.array(drivers, pa.int64()), "event_time": pa.array(moments, MOMENT)}
    )


@pytest.mark.slow
def test_the_same_training_set_is_made_once(env: FeaturesEnv) -> None:
    env.features.apply(entities=(DRIVER,), views=(TRIPS,))
    env.features.ingest("trips", data=env.put("rows", trips(MORNING_TRIP)))
    rows = spine((1, NOON))

    first = env.features.training_set("twice", spine=env.put("one", rows), views=("trips",))
    again = env.features.training_set("twice", spine=env.put("two", rows), views=("trips",))

    assert again == first
    others = {"spine": env.put("three", spine((1, NOON - HOUR)))}, {"until": NOON}, {"event_time": "also"}
    for other in others:
        given = {"spine": "blob:one"} | other
        with pytest.raises((AlreadyExists, InvalidInput)):
            env.features.training_set("twice", views=("trips",), **given)
    later = trips((1, NOON - 2 * HOUR, NOON - 2 * HOUR, 7.0, "red"))
    env.features.ingest("trips", data=env.put("later", later))
    with pytest.raises(AlreadyExists, match="choose another name"):
        env.features.training_set("twice", spine="blob:one", views=("trips",))


MORNING_TRIP = (1, NOON - 4 * HOUR, NOON - 4 * HOUR, 5.0, "red")
NOON_TRIP = (1, NOON, NOON + HOUR, 9.0, None)


def loaded(env: FeaturesEnv, name: str) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = env.features.load(name).read_all().to_pydict()
    return found


# ------------------------------------------------------------------------------------------ definitions


def test_a_view_that_did_not_change_keeps_its_version(env: FeaturesEnv) -> None:
    first = env.features.apply(entities=(DRIVER,), views=(TRIPS,))

    again = env.features.apply(entities=(DRIVER,), views=(TRIPS,))

    assert (first.entities, again.entities) == (("driver",), ())
    assert [found.version for found in (*first.views, *again.views)] == [1, 1]
    assert env.platform.count(views) == 1


def test_a_changed_view_is_a_new_version_and_the_old_one_stays_readable(env: FeaturesEnv) -> None:
    env.features.apply(entities=(DRIVER,), views=(TRIPS,))
    env.features.ingest("trips", data=env.put("rows", trips(MORNING_TRIP)))

    changed = TRIPS.model_copy(update={"ttl": 2 * DAY})
    env.features.apply(views=(changed,))

    env.features.ingest("trips", data=env.put("more", trips(NOON_TRIP)))

    assert env.features.show("trips").definition.ttl == 2 * DAY
    assert env.features.show("trips", version=1).rows == 1
    assert env.features.scan("trips", version=1).read_all()["km"].to_pylist() == [5.0]
    assert env.features.scan("trips").read_all()["km"].to_pylist() == [5.0, 9.0]
    assert [found.version for found in env.features.list().items] == [2]
    with pytest.raises(NotFound):
        env.features.show("trips", version=3)


def test_an_entity_does_not_change_under_its_views(light_env: FeaturesEnv) -> None:
    light_env.features.apply(entities=(DRIVER,))

    with pytest.raises(Conflict):
        light_env.features.apply(entities=(DRIVER.model_copy(update={"type": ColumnType.TEXT}),))


def test_a_view_of_an_unknown_entity_is_refused_and_nothing_is_kept(light_env: FeaturesEnv) -> None:
    with pytest.raises(NotFound):
        light_env.features.apply(entities=(CITY,), views=(TRIPS,))

    assert light_env.features.apply(entities=(CITY,)).entities == ("city",)


def test_aggregations_over_unknown_columns_are_refused() -> None:
    wrong = Aggregation(name="x", column="none", function=AggregateFunction.SUM, window=DAY)

    with pytest.raises(ValueError, match="none"):
        FeatureView(name="v", entities=("driver",), columns=TRIPS.columns, aggregations=(wrong,))


def test_text_columns_can_be_counted_but_not_summed() -> None:
    counted = Aggregation(name="x", column="car", function=AggregateFunction.COUNT, window=DAY)
    summed = counted.model_copy(update={"function": AggregateFunction.SUM})

    FeatureView(name="v", entities=("driver",), columns=TRIPS.columns, aggregations=(counted,))
    with pytest.raises(ValueError, match="only count"):
        FeatureView(name="v", entities=("driver",), columns=TRIPS.columns, aggregations=(summed,))


# -------------------------------------------------------------------------------------------- ingestion


@pytest.mark.slow
def test_parquet_csv_and_arrow_are_ingested(light_env: FeaturesEnv) -> None:
    light_env.features.apply(entities=(DRIVER,), views=(TRIPS,))
    sink = pa.BufferOutputStream()
    pq.write_table(trips(MORNING_TRIP), sink)
    csv = b"driver,at,known,km,car,extra\n2,2024-06-01T08:00:00Z,2024-06-01 08:00:00,1,blue,x\n"

    for number, data in enumerate((sink.getvalue().to_pybytes(), csv)):
        blob = light_env.platform.put(f"upload-{number}", data)
        light_env.features.ingest("trips", data=blob.id)
    done = light_env.features.ingest("trips", data=light_env.put("arrow", trips(NOON_TRIP)))

    rows = light_env.features.scan("trips").read_all().sort_by("__arrival")
    assert (done.added, done.rows) == (1, 3)
    assert rows["driver"].to_pylist() == [1, 2, 1]
    assert rows["at"].to_pylist() == [NOON - 4 * HOUR, NOON - 4 * HOUR, NOON]
    assert rows["car"].to_pylist() == ["red", "blue", None]


@pytest.mark.slow
def test_sql_makes_rows_from_the_source(light_env: FeaturesEnv) -> None:
    view = TRIPS.model_copy(update={"sql": "SELECT * REPLACE (km * 1.6 AS km) FROM source WHERE km > 5"})
    light_env.features.apply(entities=(DRIVER,), views=(view,))

    light_env.features.ingest("trips", data=light_env.put("rows", trips(MORNING_TRIP, NOON_TRIP)))

    assert light_env.features.scan("trips").read_all()["km"].to_pylist() == [9.0 * 1.6]


def test_sql_does_not_read_files(light_env: FeaturesEnv) -> None:
    secret = light_env.folder / "secret.csv"
    secret.write_text("driver\n1\n")
    view = TRIPS.model_copy(update={"sql": f"SELECT * FROM read_csv('{secret}')"})
    light_env.features.apply(entities=(DRIVER,), views=(view,))

    with pytest.raises(InvalidInput, match="sql"):
        light_env.features.ingest("trips", data=light_env.put("rows", trips(MORNING_TRIP)))


def test_every_invalid_column_is_named_and_nothing_is_ingested(light_env: FeaturesEnv) -> None:
    light_env.features.apply(entities=(DRIVER,), views=(TRIPS,))
    wrong = pa.table({"driver": ["x"], "at": pa.array([None], MOMENT), "known": ["soon"], "km": [1.0]})

    with pytest.raises(InvalidInput) as refused:
        light_env.features.ingest("trips", data=light_env.put("rows", wrong))

    named = {fault.where.rpartition(".")[2] for fault in refused.value.faults}
    assert named == {"driver", "at", "known", "car"}
    assert light_env.features.show("trips").table_version is None


def test_the_first_bad_rows_are_named(light_env: FeaturesEnv) -> None:
    light_env.features.apply(entities=(DRIVER,), views=(TRIPS,))
    lines = [
        "driver,at,known,km,car",
        *(f"{n},2024-06-01T08:00:00Z,2024-06-01 08:00:00,1,x" for n in range(100)),
    ]
    lines[8] = "x,2024-06-01T08:00:00Z,,1,x"
    lines[51] = "y,yesterday,2024-06-01 08:00:00,far,x"
    blob = light_env.platform.put("wrong", "\n".join(lines).encode())

    with pytest.raises(InvalidInput) as refused:
        light_env.features.ingest("trips", data=blob.id)

    given = {fault.where: fault.given for fault in refused.value.faults}
    assert given == {
        "view trips.driver": "string: x, y in rows 8, 51",
        "view trips.at": "string: yesterday in row 51",
        "view trips.known": "1 without a value: row 8",
        "view trips.km": "string: far in row 51",
    }
    assert light_env.features.show("trips").table_version is None


def test_text_in_a_csv_stays_text(light_env: FeaturesEnv) -> None:
    light_env.features.apply(
        entities=(CITY,), views=(FeatureView(name="v", entities=("city",), columns=(CAR,)),)
    )
    csv = b"city,event_time,car\n007,2024-06-01T08:00:00Z,0050\n"

    light_env.features.ingest("v", data=light_env.platform.put("rows", csv).id)

    rows = light_env.features.scan("v").read_all()
    assert (rows["city"].to_pylist(), rows["car"].to_pylist()) == (["007"], ["0050"])


@pytest.mark.parametrize("data", [b"", b"PAR1", b"\x00\x01\x02", b"ARROW1\0\0 and then nothing"])
def test_files_without_rows_are_refused(light_env: FeaturesEnv, data: bytes) -> None:
    light_env.features.apply(entities=(DRIVER,), views=(TRIPS,))
    blob = light_env.platform.put("none", data)

    with pytest.raises(InvalidInput):
        light_env.features.ingest("trips", data=blob.id)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sql",
    [
        "SELECT * FROM read_csv('/etc/passwd')",
        "SELECT * FROM '/etc/passwd'",
        "SELECT * FROM other",
        "SELEC",
        "DROP TABLE source",
        "SELECT 1; SELECT 2",
        "SELECT *, driver FROM source",
        "SELECT 1 AS x",
    ],
)
def test_invalid_sql_is_refused_and_nothing_is_ingested(light_env: FeaturesEnv, sql: str) -> None:
    light_env.features.apply(entities=(DRIVER,), views=(TRIPS.model_copy(update={"sql": sql}),))

    with pytest.raises(InvalidInput):
        light_env.features.ingest("trips", data=light_env.put("rows", trips(MORNING_TRIP)))

    assert light_env.features.show("trips").table_version is None


@pytest.mark.slow
def test_bytes_in_an_unknown_format_are_refused(light_env: FeaturesEnv) -> None:
    light_env.features.apply(entities=(DRIVER,), views=(TRIPS,))
    blob = light_env.platform.put("broken", b"PAR1 and then nothing")

    with pytest.raises(InvalidInput, match="Parquet"):
        light_env.features.ingest("trips", data=blob.id)


@pytest.mark.slow
def test_rows_that_were_written_but_never_published_are_not_seen(light_env: FeaturesEnv) -> None:
    features = light_env.features
    features.apply(entities=(DRIVER,), views=(TRIPS,))
    features.ingest("trips", data=light_env.put("one", trips(MORNING_TRIP)))
    features.ingest("trips", data=light_env.put("two", trips(NOON_TRIP)))
    light_env.platform.sql("UPDATE features_views SET table_version = 0, rows = 1")
    light_env.platform.sql("DELETE FROM features_table_files WHERE version > 0")

    done = features.ingest("trips", data=light_env.put("three", trips(NOON_TRIP, NOON_TRIP)))

    assert done.rows == features.scan("trips").read_all().num_rows == 3


# ------------------------------------------------------------------------------------------ training sets


@pytest.mark.slow
def test_a_training_set_joins_what_was_known_and_keeps_every_row(env: FeaturesEnv) -> None:
    env.features.apply(entities=(DRIVER,), views=(TRIPS,))
    env.features.ingest("trips", data=env.put("rows", trips(MORNING_TRIP, NOON_TRIP)))
    given = spine((1, NOON + HOUR), (1, NOON), (None, NOON), (7, NOON), (1, NOON + DAY + HOUR))

    made = env.features.training_set("june", spine=env.put("spine", given), views=("trips",))

    found = loaded(env, "june")
    assert found["number"] == [0, 1, 2, 3, 4]
    assert found["trips__km"] == [9.0, 5.0, None, None, None]
    assert found["trips__car"] == [None, "red", None, None, None]
    assert (made.rows, [pin.table_version for pin in made.views]) == (5, [0])
    assert [each.name for each in env.features.training_sets().items] == ["june"]


@pytest.mark.slow
def test_rows_that_do_not_fit_into_memory_are_read_from_their_files(
    light_env: FeaturesEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    light_env.features.apply(entities=(DRIVER,), views=(TRIPS,))
    for number, trip in enumerate((MORNING_TRIP, NOON_TRIP)):
        light_env.features.ingest("trips", data=light_env.put(f"rows-{number}", trips(trip)))
    blob = light_env.put("spine", spine((1, NOON + HOUR), (1, NOON)))

    light_env.features.training_set("held", spine=blob, views=("trips",))
    monkeypatch.setattr(arrow_tables, "IN_MEMORY_BYTES", 0)
    light_env.features.training_set("streamed", spine=blob, views=("trips",))

    assert loaded(light_env, "held") == loaded(light_env, "streamed")
    assert loaded(light_env, "held")["trips__km"] == [9.0, 5.0]


@pytest.mark.slow
def test_a_training_set_does_not_change_when_its_views_do(light_env: FeaturesEnv) -> None:
    features = light_env.features
    features.apply(entities=(DRIVER,), views=(TRIPS,))
    features.ingest("trips", data=light_env.put("rows", trips(MORNING_TRIP)))
    features.training_set("before", spine=light_env.put("spine", spine((1, NOON))), views=("trips",))

    features.ingest("trips", data=light_env.put("more", trips((1, NOON, NOON, 7.0, None))))
    features.training_set("after", spine="blob:spine", views=("trips",))

    assert loaded(light_env, "before")["trips__km"] == [5.0]
    assert loaded(light_env, "after")["trips__km"] == [7.0]


@pytest.mark.slow
def test_aggregations_cover_the_window_before_each_row(light_env: FeaturesEnv) -> None:
    sums = tuple(
        Aggregation(name=f"{function}_3h", column="km", function=function, window=3 * HOUR)
        for function in (AggregateFunction.SUM, AggregateFunction.COUNT, AggregateFunction.MEAN)
    )
    view = TRIPS.model_copy(update={"aggregations": sums, "created_time": None, "ttl": None})
    light_env.features.apply(entities=(DRIVER,), views=(view,))
    rows = trips(*((1, NOON + n * HOUR, NOON, float(n), None) for n in range(5)))
    light_env.features.ingest("trips", data=light_env.put("rows", rows))
    given = spine((1, NOON), (1, NOON + 2 * HOUR), (1, NOON + 9 * HOUR), (2, NOON))

    light_env.features.training_set("sums", spine=light_env.put("spine", given), views=("trips",))

    found = loaded(light_env, "sums")
    assert found["trips__sum_3h"] == [0.0, 3.0, 9.0, None]
    assert found["trips__count_3h"] == [1, 3, 3, None]
    assert found["trips__mean_3h"] == [0.0, 1.0, 3.0, None]


def test_an_aggregation_is_not_seen_before_its_last_row_was_known(light_env: FeaturesEnv) -> None:
    total = Aggregation(name="km_sum", column="km", function=AggregateFunction.SUM, window=DAY)
    view = TRIPS.model_copy(update={"aggregations": (total,)})
    light_env.features.apply(entities=(DRIVER,), views=(view,))
    light_env.features.ingest("trips", data=light_env.put("rows", trips(MORNING_TRIP, NOON_TRIP)))
    given = spine((1, NOON), (1, NOON + HOUR))

    light_env.features.training_set("sums", spine=light_env.put("spine", given), views=("trips",))

    assert loaded(light_env, "sums")["trips__km_sum"] == [5.0, 14.0]


@pytest.mark.parametrize(
    "given",
    [
        pa.table({"driver": [1], "other": [1]}),
        pa.table({"driver": ["x"], "event_time": pa.array([NOON], MOMENT)}),
        pa.table({"driver": [1], "event_time": pa.array([NOON], MOMENT), "trips__km": [1.0]}),
        pa.table({"driver": [1], "event_time": pa.array([NOON], MOMENT), "__row": [1]}),
    ],
)
def test_a_spine_that_does_not_fit_is_refused(light_env: FeaturesEnv, given: pa.Table) -> None:
    light_env.features.apply(entities=(DRIVER,), views=(TRIPS,))
    light_env.features.ingest("trips", data=light_env.put("rows", trips(MORNING_TRIP)))

    with pytest.raises(InvalidInput):
        light_env.features.training_set("none", spine=light_env.put("spine", given), views=("trips",))

    assert light_env.features.training_sets().items == ()


# ------------------------------------------------------------------------------- residency, roles, lineage


def test_restrictions_of_the_rows_flow_into_the_view_and_the_training_set(env: FeaturesEnv) -> None:
    env.features.apply(entities=(DRIVER,), views=(TRIPS,))
    env.features.ingest("trips", data=env.put("rows", trips(MORNING_TRIP), only=("AE",)))
    env.put("spine", spine((1, NOON)))

    made = env.features.training_set("june", spine="blob:spine", views=("trips",))

    assert env.features.show("trips").label.only == made.label.only == {"AE"}
    with pytest.raises(ResidencyDenied) as refused:
        env.features.training_set("abroad", spine="blob:spine", views=("trips",), zone="frankfurt")
    assert refused.value.details["path"] == ["blob:rows", "view:trips"]


def test_rows_are_not_ingested_into_a_view_in_a_forbidden_zone(light_env: FeaturesEnv) -> None:
    light_env.features.apply(entities=(DRIVER,), views=(TRIPS,), zone="frankfurt")
    blob = light_env.put("rows", trips(MORNING_TRIP), only=("AE",))

    with pytest.raises(ResidencyDenied):
        light_env.features.ingest("trips", data=blob)

    assert not list((light_env.folder / "tables").rglob("*.parquet"))


def test_a_view_is_stored_in_its_zone_and_not_where_its_label_forbids(light_env: FeaturesEnv) -> None:
    local = TRIPS.model_copy(update={"only": ("AE",)})

    with pytest.raises(ResidencyDenied):
        light_env.features.apply(entities=(DRIVER,), views=(local,), zone="frankfurt")


def test_a_viewer_reads_and_does_not_change(light_env: FeaturesEnv) -> None:
    light_env.features.apply(entities=(DRIVER,), views=(TRIPS,))
    blob = light_env.put("rows", trips(MORNING_TRIP))
    sara = light_env.platform.join("sara", Role.VIEWER)

    with acting_as(sara):
        assert light_env.features.show("trips").version == 1
        with pytest.raises(Denied):
            light_env.features.apply(views=(TRIPS,))
        with pytest.raises(Denied):
            light_env.features.ingest("trips", data=blob)


# ------------------------------------------------------------------------------------------------- online


def test_the_newest_row_of_every_key_is_read_online(env: FeaturesEnv) -> None:
    env.platform.clock.now = NOON + 2 * HOUR
    env.features.apply(entities=(DRIVER,), views=(TRIPS,))
    old = (2, NOON - 2 * DAY, NOON - 2 * DAY, 1.0, "old")
    env.features.ingest("trips", data=env.put("rows", trips(NOON_TRIP, MORNING_TRIP, old)))

    done = env.features.materialize("trips")

    found = env.features.read("trips", keys=("1", "2", "3"))
    assert (done.keys, done.written, found.features) == (2, 2, ("km", "car"))
    assert [row.values for row in found.rows] == [(9.0, None), (None, None), (None, None)]
    assert [row.event_time for row in found.rows] == [NOON, NOON - 2 * DAY, None]


@pytest.mark.slow
def test_keys_of_several_columns_and_all_types_come_back(light_env: FeaturesEnv) -> None:
    view = FeatureView(
        name="all-types",
        entities=("city", "driver"),
        columns=tuple(Feature(name=kind.value, type=kind) for kind in ColumnType),
    )
    light_env.features.apply(entities=(CITY, DRIVER), views=(view,))
    rows = pa.table(
        {
            "city": ["a|b", "al ain"],
            "driver": [1, 2],
            "event_time": pa.array([NOON, NOON], MOMENT),
            "integer": [-(2**62), None],
            "float": [0.1, None],
            "boolean": [True, None],
            "text": ["دبي", None],
            "moment": pa.array([NOON, None], MOMENT),
        }
    )
    light_env.features.ingest("all-types", data=light_env.put("rows", rows))

    light_env.features.materialize("all-types")

    found = light_env.features.read("all-types", keys=("a\\|b|1", "al ain|2"))
    assert found.rows[0].values == (-(2**62), 0.1, True, "دبي", NOON.isoformat())
    assert found.rows[1].values == (None,) * 5


def test_a_view_that_is_not_online_is_refused_with_a_fix(light_env: FeaturesEnv) -> None:
    light_env.features.apply(entities=(DRIVER,), views=(TRIPS,))

    with pytest.raises(Conflict, match=r"features\.materialize"):
        light_env.features.read("trips", keys=("1",))
    with pytest.raises(Conflict, match="no rows"):
        light_env.features.materialize("trips")


@pytest.mark.slow
def test_online_values_are_encrypted_and_cannot_be_moved(light_env: FeaturesEnv) -> None:
    features = light_env.features
    features.apply(entities=(DRIVER,), views=(TRIPS.model_copy(update={"ttl": None}),))
    rows = trips((1, NOON, NOON, 1.0, "a plain secret"), (2, NOON, NOON, 2.0, None))
    features.ingest("trips", data=light_env.put("rows", rows))
    features.materialize("trips")

    stored, found = features.online_features._stores["local"], features.show("trips")
    name = f"{found.id}/1"
    (value,) = stored.read(name, [b"1"])
    moved = {"key": [b"2"], "event_time": [2**60], "value": [value]}
    stored.write(name, pa.record_batch(moved))

    assert b"plain secret" not in (light_env.folder / "online" / "local").read_bytes()
    with pytest.raises(Damaged):
        features.read("trips", keys=("2",))


@pytest.mark.slow
def test_many_online_reads_are_one_audit_entry(light_env: FeaturesEnv) -> None:
    features = light_env.features
    features.apply(entities=(DRIVER,), views=(TRIPS,))
    features.ingest("trips", data=light_env.put("rows", trips(MORNING_TRIP)))
    features.materialize("trips")

    for _ in range(20):
        features.read("trips", keys=("1",))
    features.gate.hot.flush(all_windows=True)

    entries = [each for each in light_env.platform.entries() if each["action"] == "features.read"]
    assert [entry["count"] for entry in entries] == [20]


def test_a_number_is_not_accepted_as_a_timestamp(light_env: FeaturesEnv) -> None:
    light_env.features.apply(entities=(DRIVER,), views=(TRIPS,))
    moments = {"at": [20260101], "known": [NOON]}
    rows = pa.table({"driver": [1], **moments, "km": [1.0], "car": ["red"]})

    with pytest.raises(InvalidInput) as refused:
        light_env.features.ingest("trips", data=light_env.put("rows", rows))

    (fault,) = [fault for fault in refused.value.faults if fault.where.endswith(".at")]
    assert "which cannot be cast to" in str(fault.given)
