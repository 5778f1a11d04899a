"""Names of columns that differ only by case are refused: queries ignore it, and would read one column for another."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from falaj.errors import InvalidInput
from falaj.records.features import AggregateFunction, Aggregation, ColumnType, Entity, Feature, FeatureView

if TYPE_CHECKING:
    from conftest import FeaturesEnv

MOMENT = pa.timestamp("us", "UTC")
NOON = datetime(2024, 6, 1, 12, tzinfo=UTC)
DRIVER = Entity(name="driver", key="d", type=ColumnType.INTEGER)
CITY = Entity(name="city", key="D", type=ColumnType.INTEGER)
KM = Feature(name="km", type=ColumnType.FLOAT)
TRIPS = FeatureView(name="trips", entities=("driver",), columns=(KM,), event_time="at")


def total(name: str) -> Aggregation:
    return Aggregation(name=name, column="km", function=AggregateFunction.SUM, window=timedelta(hours=1))


def view(**changes: object) -> FeatureView:
    return FeatureView.model_validate({**TRIPS.model_dump(exclude={"known_at"}), **changes})


def rows(**columns: object) -> pa.Table:
    return pa.table({"d": [7], "at": pa.array([NOON], MOMENT), "km": [1.5], **columns})


@pytest.mark.parametrize(
    "given",
    [
        view(aggregations=(total("D"),)),
        view(aggregations=(total("sum"), total("SUM"))),
        view(aggregations=(total("AT"),)),
        view(columns=(KM, Feature(name="D", type=ColumnType.FLOAT))),
        view(columns=(KM, Feature(name="KM", type=ColumnType.FLOAT))),
        view(columns=(KM, Feature(name="At", type=ColumnType.FLOAT))),
        view(created_time="AT"),
        view(created_time="D"),
        view(entities=("driver", "city")),
    ],
)
def test_a_view_whose_columns_differ_by_case_only_is_refused(
    light_env: FeaturesEnv, given: FeatureView
) -> None:
    with pytest.raises(InvalidInput, match="differ by more than case"):
        light_env.features.plan(entities=(DRIVER, CITY), views=(given,))
    with pytest.raises(InvalidInput, match="differ by more than case"):
        light_env.features.apply(entities=(DRIVER, CITY), views=(given,))

    assert light_env.features.list().items == ()


@pytest.mark.slow
def test_an_aggregation_may_have_the_name_of_its_column_in_capitals(light_env: FeaturesEnv) -> None:
    light_env.features.apply(entities=(DRIVER,), views=(view(aggregations=(total("KM"),)),))
    light_env.features.ingest("trips", data=light_env.put("rows", rows()))

    light_env.features.training_set(
        "set", spine=light_env.put("spine", rows().drop_columns("km")), views=("trips",), event_time="at"
    )

    assert light_env.features.load("set").read_all()["trips__KM"].to_pylist() == [1.5]


@pytest.mark.slow
@pytest.mark.parametrize("extra", ["D", "AT", "TRIPS__km", "Trips__KM"])
def test_a_spine_whose_columns_differ_by_case_only_is_refused(light_env: FeaturesEnv, extra: str) -> None:
    light_env.features.apply(entities=(DRIVER,), views=(TRIPS,))
    light_env.features.ingest("trips", data=light_env.put("rows", rows()))
    spine = light_env.put("spine", rows(**{extra: [1]}))

    with pytest.raises(InvalidInput, match="differ by more than case"):
        light_env.features.training_set("set", spine=spine, views=("trips",), event_time="at")

    assert light_env.features.training_sets().items == ()


@pytest.mark.slow
def test_two_views_whose_keys_differ_by_case_only_are_not_joined(light_env: FeaturesEnv) -> None:
    other = view(name="stays", entities=("city",))
    light_env.features.apply(entities=(DRIVER, CITY), views=(TRIPS, other))
    light_env.features.ingest("trips", data=light_env.put("rows", rows()))
    light_env.features.ingest("stays", data=light_env.put("more", rows(D=[8])))

    for spine in (rows(D=[8]), rows()):
        with pytest.raises(InvalidInput, match="spine"):
            light_env.features.training_set(
                "set",
                spine=light_env.put(f"spine-{spine.num_columns}", spine),
                views=("trips", "stays"),
                event_time="at",
            )


@pytest.mark.slow
def test_two_views_whose_features_have_one_name_are_not_joined(light_env: FeaturesEnv) -> None:
    first = view(name="a", columns=(Feature(name="b__c", type=ColumnType.FLOAT),))
    second = view(name="a__b", columns=(Feature(name="C", type=ColumnType.FLOAT),))
    light_env.features.apply(entities=(DRIVER,), views=(first, second))
    light_env.features.ingest("a", data=light_env.put("rows", rows(b__c=[1.0])))
    light_env.features.ingest("a__b", data=light_env.put("more", rows(C=[2.0])))
    spine = light_env.put("spine", rows())

    with pytest.raises(InvalidInput, match="a__b__c, a__b__C"):
        light_env.features.training_set("set", spine=spine, views=("a", "a__b"), event_time="at")
    with pytest.raises(InvalidInput, match="a__b__c, a__b__c"):
        light_env.features.training_set("set", spine=spine, views=("a", "a"), event_time="at")


@pytest.mark.slow
def test_a_column_in_another_case_is_named(light_env: FeaturesEnv) -> None:
    light_env.features.apply(entities=(DRIVER,), views=(TRIPS,))
    given = rows().rename_columns(["D", "AT", "km"])

    with pytest.raises(InvalidInput) as refused:
        light_env.features.ingest("trips", data=light_env.put("rows", given))

    fixes = [fault.fix for fault in refused.value.faults]
    assert fixes == ["did you mean D? Rename it to d", "did you mean AT? Rename it to at"]


@pytest.mark.slow
def test_no_view_is_inferred_from_columns_that_differ_by_case_only(light_env: FeaturesEnv) -> None:
    blob = light_env.platform.put("rows", b"id,event_time,km,KM\n1,2026-01-01T00:00:00Z,1,2\n")

    with pytest.raises(InvalidInput, match="differ by more than case"):
        light_env.features.infer(blob.id, name="trips")


@pytest.mark.slow
def test_sql_does_not_read_a_column_for_another(light_env: FeaturesEnv) -> None:
    light_env.features.apply(entities=(DRIVER,), views=(view(sql="SELECT d, at, KM AS km FROM source"),))

    with pytest.raises(InvalidInput, match="km, KM"):
        light_env.features.ingest("trips", data=light_env.put("rows", rows(KM=[2.5])))
