"""Online values: what is known now and nothing later, as in a training set."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

import falaj.features.online as online
from falaj.errors import InvalidInput, TooLarge
from falaj.features.tables import views
from falaj.ports.online import MAX_VALUE_BYTES
from falaj.records.features import (
    AggregateFunction,
    Aggregation,
    ColumnType,
    Entity,
    Feature,
    FeatureView,
    OnlineRows,
)
from polling import PATIENCE_S

if TYPE_CHECKING:
    from conftest import FeaturesEnv

MOMENT = pa.timestamp("us", "UTC")
NOON = datetime(2024, 6, 1, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)
DRIVER = Entity(name="driver", key="driver", type=ColumnType.INTEGER)
TRIPS = FeatureView(
    name="trips",
    entities=("driver",),
    columns=(Feature(name="km", type=ColumnType.FLOAT), Feature(name="n", type=ColumnType.INTEGER)),
    event_time="at",
    created_time="known",
)


def trips(*rows: tuple[int, datetime, datetime, float | None, int | None]) -> pa.Table:
    drivers, events, created, km, numbers = zip(*rows, strict=True)
    return pa.table(
        {
            "driver": pa.array(drivers, pa.int64()),
            "at": pa.array(events, MOMENT),
            "known": pa.array(created, MOMENT),
            "km": pa.array(km, pa.float64()),
            "n": pa.array(numbers, pa.int64()),
        }
    )


def with_sums(*functions: AggregateFunction, created_time: str | None = "known") -> FeatureView:
    sums = tuple(
        Aggregation(name=f"{function}_n", column="n", function=function, window=24 * HOUR)
        for function in functions
    )
    return TRIPS.model_copy(update={"aggregations": sums, "created_time": created_time})


def prepare(env: FeaturesEnv, *rows: Any, view: FeatureView = TRIPS, at: datetime = NOON) -> None:
    env.platform.clock.now = at
    env.features.apply(entities=(DRIVER,), views=(view,))
    env.features.ingest("trips", data=env.put("rows", trips(*rows)))
    env.features.materialize("trips")


def read(env: FeaturesEnv, key: str = "1") -> tuple[Any, ...]:
    return env.features.read("trips", keys=(key,)).rows[0].values


def trained(env: FeaturesEnv, at: datetime, name: str) -> tuple[Any, ...]:
    """Return the features of driver 1 in a training set with one row, at that time."""
    spine = pa.table({"driver": [1], "event_time": pa.array([at], MOMENT)})
    env.features.training_set(name, spine=env.put(f"spine-{name}", spine), views=("trips",))
    row = env.features.load(name).read_all().to_pylist()[0]
    return tuple(value for column, value in row.items() if column.startswith("trips__"))


@pytest.mark.slow
def test_a_row_of_the_future_is_served_when_its_time_has_come(env: FeaturesEnv) -> None:
    today, tomorrow = (1, NOON - HOUR, NOON - HOUR, 5.0, 5), (1, NOON + 24 * HOUR, NOON - HOUR, 9.0, 9)
    prepare(env, today, tomorrow)

    seen = []
    for hours in (0, 23, 24, 48):
        env.platform.clock.now = NOON + hours * HOUR
        seen.append(read(env))

    assert seen == [(5.0, 5), (5.0, 5), (9.0, 9), (9.0, 9)]
    assert seen == [trained(env, NOON + hours * HOUR, f"at-{hours}") for hours in (0, 23, 24, 48)]


def test_a_row_that_is_created_in_the_future_is_served_when_it_is_known(light_env: FeaturesEnv) -> None:
    prepare(light_env, (1, NOON - 2 * HOUR, NOON - HOUR, 5.0, 5), (1, NOON - HOUR, NOON + HOUR, 9.0, 9))

    before = light_env.features.read("trips", keys=("1",)).rows[0]
    light_env.platform.clock.advance(HOUR)

    assert (before.values, before.event_time) == ((5.0, 5), NOON - 2 * HOUR)
    assert read(light_env) == (9.0, 9)


def test_a_key_that_is_not_known_yet_is_unknown(light_env: FeaturesEnv) -> None:
    prepare(light_env, (1, NOON + HOUR, NOON, 5.0, 5))

    before = light_env.features.read("trips", keys=("1",)).rows[0]
    light_env.platform.clock.advance(HOUR)

    assert (before.values, before.event_time) == ((None, None), None)
    assert read(light_env) == (5.0, 5)


@pytest.mark.slow
def test_aggregations_of_the_future_are_served_when_their_time_has_come(light_env: FeaturesEnv) -> None:
    rows = [(1, NOON + hours * HOUR, NOON + hours * HOUR, 1.0, 10) for hours in (-30, -2, -1, 3, 20)]
    prepare(light_env, *rows, view=with_sums(AggregateFunction.SUM))

    seen = []
    for hours in (0, 3, 20, 100):
        light_env.platform.clock.now = NOON + hours * HOUR
        seen.append(read(light_env))

    assert seen == [(20,), (30,), (40,), (40,)]
    assert seen == [trained(light_env, NOON + hours * HOUR, f"at-{hours}") for hours in (0, 3, 20, 100)]


def test_a_reader_whose_clock_is_behind_gets_what_was_known_then(light_env: FeaturesEnv) -> None:
    second = timedelta(seconds=1)
    prepare(light_env, (1, NOON - HOUR, NOON - HOUR, 5.0, 5), (1, NOON - second, NOON - second, 9.0, 9))

    light_env.platform.clock.now = NOON - 20 * second
    behind = read(light_env)
    light_env.platform.clock.now = NOON - 24 * HOUR

    assert behind == (5.0, 5)
    assert read(light_env) == (5.0, 5)


def test_a_result_says_how_many_values_take_effect_later(light_env: FeaturesEnv) -> None:
    hours = range(-2, online.MAX_AHEAD + 100)
    prepare(light_env, *((1, NOON + n * HOUR, NOON, 1.0, n) for n in hours))

    done = light_env.features.materialize("trips")

    assert (done.keys, done.ahead) == (1, online.MAX_AHEAD)
    assert done.complete_until == NOON + (online.MAX_AHEAD + 1) * HOUR
    light_env.platform.clock.advance(online.MAX_AHEAD * HOUR)
    assert read(light_env) == (1.0, online.MAX_AHEAD)


@pytest.mark.slow
def test_an_older_materialization_that_is_slower_does_not_overwrite_a_newer_one(
    env: FeaturesEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(env, (1, NOON - HOUR, NOON - HOUR, 5.0, 5))
    other, write = env.platform.again(), online.OnlineFeatures._write
    slow, go_on = threading.Event(), threading.Event()

    def write_later(self: online.OnlineFeatures, *args: Any) -> int:
        if not slow.is_set():
            slow.set()
            go_on.wait(PATIENCE_S)
        return write(self, *args)

    monkeypatch.setattr(online.OnlineFeatures, "_write", write_later)
    with ThreadPoolExecutor(2) as pool:
        older = pool.submit(env.features.materialize, "trips")
        assert slow.wait(PATIENCE_S)
        correction = trips((1, NOON - HOUR, NOON - HOUR, 6.0, 6))  # of the same event
        env.features.ingest("trips", data=env.put("more", correction))
        newer = pool.submit(other.features.materialize, "trips")
        go_on.set()
        versions = [each.result(PATIENCE_S).table_version for each in (older, newer)]

    assert versions == [0, 1]
    assert read(env) == (6.0, 6)
    assert env.features.show("trips").online_version == 1


def test_the_online_version_never_moves_back(light_env: FeaturesEnv) -> None:
    prepare(light_env, (1, NOON, NOON, 5.0, 5))
    light_env.platform.sql("UPDATE features_views SET online_version = 7")

    light_env.features.materialize("trips")

    assert light_env.platform.rows(views)[0]["online_version"] == 7


def test_infinity_is_the_same_online_and_offline(light_env: FeaturesEnv) -> None:
    prepare(
        light_env, (1, NOON, NOON, math.inf, 1), (2, NOON, NOON, -math.inf, 1), (3, NOON, NOON, math.nan, 1)
    )

    found = light_env.features.read("trips", keys=("1", "2", "3"))

    assert [row.values[0] for row in found.rows] == [math.inf, -math.inf, None]
    assert trained(light_env, NOON, "offline")[0] == math.inf
    assert '"Infinity"' in found.model_dump_json()
    assert OnlineRows.model_validate_json(found.model_dump_json()) == found


@pytest.mark.slow
def test_aggregations_of_infinities_are_the_same_online_and_offline(light_env: FeaturesEnv) -> None:
    """The sum of both has no value, which is null as NaN is elsewhere; what has one keeps it."""
    functions = tuple(AggregateFunction)
    sums = tuple(
        Aggregation(name=f"{function}_km", column="km", function=function, window=24 * HOUR)
        for function in functions
    )
    view = TRIPS.model_copy(update={"aggregations": sums})
    rows = [(1, NOON - n * HOUR, NOON - n * HOUR, km, 1) for n, km in enumerate((1.0, math.inf, -math.inf))]

    prepare(light_env, *rows, view=view)

    online_values, offline = read(light_env), trained(light_env, NOON, "offline")
    assert online_values == offline
    found = dict(zip(functions, offline, strict=True))
    assert found == {
        AggregateFunction.COUNT: 3,
        AggregateFunction.SUM: None,
        AggregateFunction.MEAN: None,
        AggregateFunction.MIN: -math.inf,
        AggregateFunction.MAX: math.inf,
        AggregateFunction.STD: None,
    }


def test_a_text_that_says_infinity_stays_a_text() -> None:
    row = {"key": "1", "event_time": None, "values": ("Infinity", math.inf)}
    found = OnlineRows(version=1, features=("a", "b"), types=("text", "float"), rows=(row,))  # type: ignore[arg-type]

    assert OnlineRows.model_validate_json(found.model_dump_json()) == found


@pytest.mark.slow
def test_integers_do_not_become_doubles(env: FeaturesEnv) -> None:
    large = 2**53 + 1
    view = with_sums(AggregateFunction.MAX, AggregateFunction.MIN, AggregateFunction.SUM, created_time=None)
    prepare(env, (1, NOON, NOON, 1.0, large), (1, NOON - HOUR, NOON, 1.0, large + 2), view=view)

    expected = (large + 2, large, 2 * large + 2)
    assert read(env) == trained(env, NOON, "set") == expected
    assert [feature.type for feature in view.features] == [ColumnType.INTEGER] * 3


@pytest.mark.slow
def test_a_sum_that_is_too_large_for_an_integer_is_refused(light_env: FeaturesEnv) -> None:
    with pytest.raises(InvalidInput):
        prepare(
            light_env,
            (1, NOON, NOON, 1.0, 2**62),
            (1, NOON - HOUR, NOON, 1.0, 2**62),
            view=with_sums(AggregateFunction.SUM),
        )


def test_rows_ingested_during_a_materialization_come_with_the_next(light_env: FeaturesEnv) -> None:
    prepare(light_env, *((n, NOON - HOUR, NOON - HOUR, 1.0, 1) for n in range(200)))
    more = light_env.put("more", trips(*((n, NOON, NOON, 2.0, 2) for n in range(200))))

    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(light_env.features.materialize, "trips") for _ in range(2)]
        pool.submit(light_env.features.ingest, "trips", data=more).result()
        done = [each.result() for each in running]
    newest = light_env.features.materialize("trips").table_version

    assert newest == light_env.features.show("trips").online_version == 1
    assert all(each.table_version in (0, 1) for each in done)
    assert {read(light_env, str(n)) for n in range(200)} == {(2.0, 2)}


@pytest.mark.slow
def test_a_value_that_is_too_large_for_the_store_is_refused(light_env: FeaturesEnv) -> None:
    light_env.features.apply(
        entities=(DRIVER,),
        views=(
            FeatureView(
                name="texts", entities=("driver",), columns=(Feature(name="t", type=ColumnType.TEXT),)
            ),
        ),
    )
    rows = pa.table({"driver": [7], "event_time": pa.array([NOON], MOMENT), "t": ["x" * MAX_VALUE_BYTES]})
    light_env.features.ingest("texts", data=light_env.put("rows", rows))

    with pytest.raises(TooLarge, match="key 7 take"):
        light_env.features.materialize("texts")
