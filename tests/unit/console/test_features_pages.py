"""Pages of features: the catalogue, one view, its distributions, and training sets."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest

from console_data import HOSTILE, ROWS, make_features, make_quarantine, rows
from falaj.apps.console.components.states import BAD, GOOD, IDLE, WAITING
from falaj.apps.console.pages.features.catalogue import catalogue
from falaj.apps.console.pages.features.distributions import (
    BINS,
    WORDS,
    distribution,
    distributions,
    read_sample,
)
from falaj.apps.console.pages.features.quarantine import chosen_batch, quarantine_view
from falaj.apps.console.pages.features.training_sets import (
    TrainingSetRecords,
    training_set_list,
    training_set_view,
)
from falaj.apps.console.pages.features.view import FeatureViewPage, ViewRecords, feature_view_page
from falaj.apps.console.times import Times
from falaj.errors import FalajError
from falaj.records.features import ColumnType, Entity, Feature, FeatureView
from falaj.records.governance.identity import Role
from falaj.records.record import utc_now
from platforms import OwnPlatform

TIMES = Times(UTC)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("", ["churn-calls", "trips"]),
        ("CALLS", ["churn-calls"]),
        ("minutes_7d", ["churn-calls"]),
        ("personal minutes", ["churn-calls"]),
        ("driver", ["trips"]),
        ("driver minutes", []),
    ],
)
def test_views_are_found_by_name_entity_column_and_restriction(
    light_platform: OwnPlatform, words: str, found: list[str]
) -> None:
    make_features(light_platform, "churn")
    trips = FeatureView(
        name="trips", entities=("driver",), columns=(Feature(name="fare", type=ColumnType.FLOAT),)
    )
    light_platform.apply([Entity(name="driver", key="driver"), trips])

    view = catalogue(light_platform.features.list().items, words=words, times=TIMES)

    assert [row.name for row in view.rows] == found
    assert view.total == 2


def page_of(platform: OwnPlatform, now: datetime | None = None) -> FeatureViewPage:
    view = platform.features.show("churn-calls")
    records = ViewRecords(
        view=view,
        versions=[platform.features.show(view.id, version=number) for number in (1, 2)],
        stored=platform.objects.show(view.id),
        owner="root",
        nodes=[*platform.lineage.graph(view.id)],
        readers=platform.policies.who_can("features.scan", view.id),
        reads=platform.audit.list(action="features.scan").items,
        refused=platform.audit.list(action="features.ingest", outcome="failed").items,
    )
    return feature_view_page(records, times=TIMES, now=now or utc_now())


def test_a_view_shows_its_versions_and_what_changed(light_platform: OwnPlatform) -> None:
    make_features(light_platform, "churn")

    page = page_of(light_platform)

    second, first = page.versions
    assert (second.version, second.changes) == (2, "+ roaming, + minutes_7d")
    assert first.changes == "first version"
    assert ("plan", "text", "any jurisdiction; personal") in page.columns
    assert page.aggregations == (("minutes_7d", "sum", "minutes", "7d"),)
    assert [item.name for item in page.users] == ["churn-training"]


def test_freshness_is_judged_by_the_last_ingestion_and_the_time_to_live(light_platform: OwnPlatform) -> None:
    data = make_features(light_platform, "churn")
    definition = data.calls.definition.model_copy(update={"ttl": timedelta(days=2)})
    light_platform.apply([definition])
    light_platform.ingest("churn-calls", rows(10))

    fresh, old = page_of(light_platform), page_of(light_platform, utc_now() + timedelta(days=3))

    assert (fresh.freshness.tone, fresh.freshness.online_tone) == (GOOD, IDLE)
    assert (old.freshness.tone, "longer than the time to live" in old.freshness.words) == (BAD, True)


def test_the_online_store_is_behind_until_it_is_written_again(light_platform: OwnPlatform) -> None:
    make_features(light_platform, "churn")
    light_platform.features.materialize("churn-calls")
    written = page_of(light_platform).freshness.online_tone

    light_platform.ingest("churn-calls", rows(20), again=True)

    assert (written, page_of(light_platform).freshness.online_tone) == (GOOD, WAITING)


def test_refused_files_and_readers_come_from_the_audit_log(light_platform: OwnPlatform) -> None:
    data = make_features(light_platform, "churn")
    light_platform.join("noor", Role.VIEWER)
    with pytest.raises(FalajError):
        light_platform.ingest("churn-calls", rows(5).drop_columns(["minutes"]))
    pa.table(light_platform.features.scan("churn-calls").read_all())

    page = page_of(light_platform)

    assert page.refused is not None
    assert len(page.refused) == 1
    assert page.readers is not None
    assert ("noor", "user") in [each[:2] for each in page.readers]
    assert page.reads is not None
    assert [each[1:3] for each in page.reads] == [("features.scan", "1")]
    assert data.calls.id == page.id


def test_quarantined_batches_are_shown_with_the_rows_of_one(light_platform: OwnPlatform) -> None:
    make_quarantine(light_platform, "churn")
    features = light_platform.features
    batches = features.quarantined_batches("churn-visits").items
    features.discard_quarantined(batches[0].id)
    batches = features.quarantined_batches("churn-visits").items

    opened = chosen_batch(batches, "churn-visits-2")  # has no rows left
    assert opened is not None
    rows = features.quarantined_rows(opened.id, limit=2)
    page = quarantine_view(batches, opened, rows, frozenset(), times=TIMES)

    assert [(each.name, each.rows, each.became) for each in page.batches] == [
        ("churn-visits-2", "0", "1 discarded"),
        ("churn-visits-1", "3", ""),
    ]
    assert page.batches[1].rules == "minutes type (2), minutes min (1)"
    assert page.opened is not None
    assert page.opened.name == "churn-visits-1"
    assert page.opened.columns == ("row", "breaks", "customer", "event_time", "minutes")
    assert [(each[0], each[1], each[4]) for each in page.opened.rows] == [
        ("2", "minutes min", "-4"),
        ("3", "minutes type", HOSTILE),
    ]
    hidden = quarantine_view(batches, opened, None, frozenset(), times=TIMES)
    assert hidden.opened is not None
    assert (hidden.opened.columns, hidden.opened.rows) == ((), ())


def test_distributions_of_real_rows(light_platform: OwnPlatform) -> None:
    data = make_features(light_platform, "churn")

    view = distributions(data.calls, read_sample(light_platform, data.calls), times=TIMES)

    found = {each.column: each for each in view.distributions}
    assert view.about == f"all {ROWS} rows"
    assert found["minutes"].empty_share == pytest.approx(0.1)
    assert (len(found["minutes"].counts), sum(found["minutes"].counts)) == (BINS, ROWS * 0.9)
    assert HOSTILE in found["plan"].labels
    assert sum(found["roaming"].counts) == ROWS


def test_a_large_view_is_sampled(light_platform: OwnPlatform, monkeypatch: pytest.MonkeyPatch) -> None:
    data = make_features(light_platform, "churn")
    monkeypatch.setattr("falaj.apps.console.pages.features.distributions.SAMPLED", 150)

    view = distributions(data.calls, read_sample(light_platform, data.calls), times=TIMES)

    assert view.about == f"the first 150 of {ROWS} rows, in their order of arrival"
    assert view.newest == ""


@pytest.mark.parametrize(
    ("kind", "values", "counts", "summary"),
    [
        (ColumnType.FLOAT, [], (), "no values"),
        (ColumnType.FLOAT, [None, float("nan")], (), "no values"),
        (ColumnType.FLOAT, [2.0, 2.0], (2,), "2 to 2, median 2"),
        (ColumnType.FLOAT, [1.0, float("inf")], (1,), "1 to 1, median 1"),
        (ColumnType.TEXT, ["a", "b", "a"], (2, 1), "2 different values"),
        (ColumnType.BOOLEAN, [True, True], (2,), "1 value"),
    ],
)
def test_columns_of_odd_values(
    kind: ColumnType, values: list[object], counts: tuple[int, ...], summary: str
) -> None:
    found = distribution("x", kind, values)

    assert (found.counts, found.summary) == (counts, summary)


def test_many_words_are_summed_up() -> None:
    found = distribution("x", ColumnType.TEXT, [f"w{number}" for number in range(WORDS + 30)])

    assert (found.labels[-1], found.counts[-1]) == ("30 others", 30)


def test_a_training_set_shows_what_it_pinned(light_platform: OwnPlatform) -> None:
    data = make_features(light_platform, "churn")
    records = TrainingSetRecords(
        data.training,
        light_platform.features.column_lineage(data.training.id),
        [*light_platform.lineage.graph(data.training.id)],
    )

    view = training_set_view(records, times=TIMES)

    ((name, version, table, _),) = view.pins
    assert (name, version) == ("churn-calls", "version 2")
    assert table == f"table version {data.calls.table_version}"
    assert dict(view.about)["spine"] == "churn-calls"
    assert dict(view.about)["rows of the time"] == "all of its spine"


def test_training_sets_are_found_by_column(light_platform: OwnPlatform) -> None:
    make_features(light_platform, "churn")
    listed = light_platform.features.training_sets().items

    assert [row.name for row in training_set_list(listed, words="7d", times=TIMES).rows] == ["churn-training"]
    assert training_set_list(listed, words="absent", times=TIMES).rows == ()
