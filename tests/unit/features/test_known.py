"""What counts as known: a created time, the time of ingestion, or the event time. Offline and online agree on it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from falaj.errors import InvalidInput
from falaj.features.joins import INGESTED
from falaj.records.features import (
    AggregateFunction,
    Aggregation,
    ChangeKind,
    ColumnType,
    Entity,
    Feature,
    FeatureView,
    KnownAt,
)
from platforms import OwnPlatform, make_platform

if TYPE_CHECKING:
    from conftest import FeaturesEnv

MOMENT = pa.timestamp("us", "UTC")
NOON = datetime(2024, 6, 1, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)
DRIVER = Entity(name="driver", key="driver", type=ColumnType.INTEGER)
KM = Feature(name="km", type=ColumnType.FLOAT)
TRIPS = FeatureView(name="trips", entities=("driver",), columns=(KM,))
TOTAL = Aggregation(name="total", column="km", function=AggregateFunction.SUM, window=4 * HOUR)


def trips(*rows: tuple[int, datetime, float | None], **more: Any) -> pa.Table:
    drivers, moments, km = zip(*rows, strict=True) if rows else ((), (), ())
    return pa.table(
        {
            "driver": pa.array(drivers, pa.int64()),
            "event_time": pa.array(moments, MOMENT),
            "km": pa.array(km, pa.float64()),
            **more,
        }
    )


def ingest(env: FeaturesEnv, at: datetime, *rows: tuple[int, datetime, float | None], **options: Any) -> Any:
    env.platform.clock.now = at
    blob = env.put(f"rows-{at:%d-%H-%M}-{len(rows)}", trips(*rows))
    return env.features.ingest("trips", data=blob, **options)


numbers = itertools.count()


def joined(env: FeaturesEnv, *spine: datetime) -> list[float | None]:
    """Return the feature of driver 1 at each of the moments."""
    name = f"set-{next(numbers)}"
    rows = trips(*((1, at, None) for at in spine)).drop_columns("km")
    env.features.training_set(name, spine=env.put(name, rows), views=("trips",))
    found: list[float | None] = env.features.load(name).read_all().columns[-1].to_pylist()
    return found


@pytest.mark.slow
def test_a_late_row_does_not_change_an_older_row_of_a_training_set(env: FeaturesEnv) -> None:
    env.features.apply(entities=(DRIVER,), views=(TRIPS,))
    ingest(env, NOON + 5 * HOUR, (1, NOON, 3.0))
    before = joined(env, NOON + 2 * HOUR, NOON + 6 * HOUR)

    late = ingest(env, NOON + 6 * HOUR, (1, NOON + HOUR, 777.0))

    assert late.known_from == NOON + 6 * HOUR
    assert before == [3.0, 3.0]
    assert joined(env, NOON + 2 * HOUR, NOON + 6 * HOUR - HOUR / 60, NOON + 6 * HOUR) == [3.0, 3.0, 777.0]


@pytest.mark.slow
def test_a_first_load_of_history_is_joined_by_event_time(env: FeaturesEnv) -> None:
    env.features.apply(entities=(DRIVER,), views=(TRIPS,))
    ingest(env, NOON + 9 * HOUR)  # a load without rows is not the first

    first = ingest(env, NOON + 9 * HOUR, (1, NOON, 1.0), (1, NOON + HOUR, 2.0))

    assert first.known_from is None
    assert joined(env, NOON - HOUR, NOON, NOON + 2 * HOUR) == [None, 1.0, 2.0]


@pytest.mark.slow
def test_a_back_fill_was_known_when_it_happened(light_env: FeaturesEnv) -> None:
    light_env.features.apply(entities=(DRIVER,), views=(TRIPS,))
    ingest(light_env, NOON + 9 * HOUR, (1, NOON + 2 * HOUR, 2.0))

    done = ingest(light_env, NOON + 10 * HOUR, (1, NOON, 1.0), backfill=True)

    assert done.known_from is None
    assert joined(light_env, NOON, NOON + HOUR, NOON + 3 * HOUR) == [1.0, 1.0, 2.0]
    assert light_env.features.scan("trips").read_all()[INGESTED].to_pylist() == [None, None]


@pytest.mark.slow
def test_rows_that_will_happen_are_not_known_before(light_env: FeaturesEnv) -> None:
    light_env.features.apply(entities=(DRIVER,), views=(TRIPS,))
    ingest(light_env, NOON, (1, NOON, 1.0))
    ingest(light_env, NOON + HOUR, (1, NOON + 3 * HOUR, 3.0))

    assert joined(light_env, NOON + 2 * HOUR, NOON + 3 * HOUR) == [1.0, 3.0]


@pytest.mark.slow
def test_a_late_row_changes_windows_from_when_it_came_in(light_env: FeaturesEnv) -> None:
    light_env.features.apply(entities=(DRIVER,), views=(TRIPS.model_copy(update={"aggregations": (TOTAL,)}),))
    ingest(light_env, NOON + 2 * HOUR, (1, NOON, 1.0), (1, NOON + 2 * HOUR, 2.0))
    ingest(light_env, NOON + 5 * HOUR, (1, NOON + HOUR, 10.0))

    assert joined(light_env, NOON, NOON + 3 * HOUR, NOON + 5 * HOUR) == [1.0, 3.0, 13.0]


@pytest.mark.slow
def test_with_event_times_alone_a_late_row_changes_older_rows_and_the_record_says_so(
    light_env: FeaturesEnv,
) -> None:
    by_event = TRIPS.model_copy(update={"known_at": KnownAt.EVENT_TIME})
    light_env.features.apply(entities=(DRIVER,), views=(by_event,))
    ingest(light_env, NOON + 5 * HOUR, (1, NOON, 3.0))

    late = ingest(light_env, NOON + 6 * HOUR, (1, NOON + HOUR, 777.0))

    assert late.known_from is None
    assert joined(light_env, NOON + 2 * HOUR) == [777.0]
    assert light_env.features.training_sets().items[0].views[0].known_at is KnownAt.EVENT_TIME
    assert INGESTED not in light_env.features.scan("trips").schema.names


@pytest.mark.slow
def test_the_record_of_a_training_set_says_what_counted_as_known(light_env: FeaturesEnv) -> None:
    created = FeatureView(name="created", entities=("driver",), columns=(KM,), created_time="known")
    light_env.features.apply(entities=(DRIVER,), views=(TRIPS, created))
    ingest(light_env, NOON, (1, NOON, 3.0))
    rows = trips((1, NOON, 3.0), known=pa.array([NOON], MOMENT))
    light_env.features.ingest("created", data=light_env.put("created", rows))

    made = light_env.features.training_set("set", spine="view:trips", views=("trips", "created"))

    assert [pin.known_at for pin in made.views] == [KnownAt.INGESTION, KnownAt.CREATED_TIME]
    with pytest.raises(InvalidInput, match="known says when a row of this view was known"):
        light_env.features.ingest("created", data=light_env.put("more", rows), backfill=True)


@pytest.mark.parametrize(
    ("created_time", "known_at"), [("known", "ingestion"), ("known", "event_time"), (None, "created_time")]
)
def test_a_view_does_not_say_two_things(created_time: str | None, known_at: str) -> None:
    with pytest.raises(ValueError, match="known_at is created_time where"):
        FeatureView.model_validate(TRIPS.model_dump() | {"created_time": created_time, "known_at": known_at})


# --------------------------------------------------------------------------------------- what a view says


def test_a_definition_that_does_not_say_it_keeps_what_the_last_version_said(light_env: FeaturesEnv) -> None:
    by_event = TRIPS.model_copy(update={"known_at": KnownAt.EVENT_TIME})
    light_env.features.apply(entities=(DRIVER,), views=(by_event,))

    again = light_env.features.apply(views=(TRIPS,))
    (longer,) = light_env.features.apply(views=(TRIPS.model_copy(update={"ttl": 9 * HOUR}),)).views

    assert [(each.change, each.version) for each in again.changes] == [(ChangeKind.UNCHANGED, 1)]
    assert (longer.version, longer.known_at) == (2, KnownAt.EVENT_TIME)
    stated = TRIPS.model_copy(update={"ttl": 9 * HOUR, "known_at": KnownAt.INGESTION})
    (change,) = light_env.features.plan(views=(stated,))
    assert (change.change, change.differences) == (ChangeKind.CHANGED, ("known_at",))


def test_a_new_view_says_what_counts_as_known(light_env: FeaturesEnv) -> None:
    (made,) = light_env.features.apply(entities=(DRIVER,), views=(TRIPS,)).views

    assert (made.definition.known_at, made.known_at) == (KnownAt.INGESTION, KnownAt.INGESTION)


# ------------------------------------------------------------------------------------ online and offline


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnPlatform]:
    with make_platform(tmp_path_factory.mktemp("agree")) as made:
        yield made


row = st.tuples(
    st.integers(1, 3), st.integers(-6, 0), st.one_of(st.none(), st.integers(-9, 9), st.just("nan"))
)
loads = st.lists(st.lists(row, min_size=1, max_size=5), min_size=2, max_size=5)
"""Rows of each load: their key, their event in hours before the load, and their value."""


def assert_online_equals_offline(
    platform: OwnPlatform, given: list[list[tuple[int, int, Any]]], view: FeatureView
) -> None:
    """Load, materialize and read again and again; then ask a training set for the same moments."""
    name = f"trips-{next(numbers)}"
    platform.apply([DRIVER, view.model_copy(update={"name": name})])
    seen, moments, now = [], list[datetime](), NOON
    for rows in given:
        now += 2 * HOUR
        platform.clock.now = now
        values = [(key, now + hours * HOUR, None if km is None else float(km)) for key, hours, km in rows]
        known = {"known": pa.array([now] * len(rows), MOMENT)} if view.created_time else {}
        platform.ingest(name, trips(*values, **known))
        platform.features.materialize(name)
        for minutes in (0, 90):
            platform.clock.now = now + timedelta(minutes=minutes)
            found = platform.features.read(name, keys=("1", "2", "3")).rows
            seen += [each.values[0] for each in found]
            moments += [platform.clock.now] * 3

    keys = [1, 2, 3] * (len(moments) // 3)
    spine = pa.table({"driver": keys, "event_time": pa.array(moments, MOMENT)})
    platform.training_set(f"set-{name}", spine=spine, views=[name])

    offline = platform.features.load(f"set-{name}").read_all().columns[-1].to_pylist()
    assert offline == seen


kinds = st.builds(
    lambda created, total, ttl: TRIPS.model_copy(
        update={"created_time": created, "aggregations": total, "ttl": ttl}
    ),
    st.sampled_from([None, "known"]),
    st.sampled_from([(), (TOTAL,)]),
    st.sampled_from([None, 3 * HOUR]),
)


@pytest.mark.slow
@settings(max_examples=4)
@given(given=loads, view=kinds)
def test_what_is_read_online_is_what_a_training_set_has(
    shared: OwnPlatform, given: list[list[tuple[int, int, Any]]], view: FeatureView
) -> None:
    assert_online_equals_offline(shared, given, view)


@pytest.mark.slow
@settings(max_examples=15)
@given(given=loads, view=kinds)
def test_what_is_read_online_is_always_what_a_training_set_has(
    shared: OwnPlatform, given: list[list[tuple[int, int, Any]]], view: FeatureView
) -> None:
    assert_online_equals_offline(shared, given, view)
