"""Searches over runs and experiments: conditions, orders, pages, and nothing that the caller may not see."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from falaj.errors import Denied, InvalidInput, NotFound
from falaj.governance.operations.caller import acting_as
from falaj.records.governance.identity import Role
from falaj.records.tracking import DatasetInput, MetricPoint
from falaj.tracking.service import Runs
from platforms import OwnPlatform

NAN = float("nan")
CONDITIONS = {
    "metrics.loss < 0.5": "b",
    "metrics.loss<=0.5": "ba",
    "metrics.loss > -inf": "ba",
    "metrics.loss != 0.5": "b",
    "metrics.val/loss >= -1e3": "a",
    "tags.team = 'risk' and metrics.loss > 0": "a",
    "tags.team = 'risk' and metrics.loss > 1": "",
    "tags.team != 'risk'": "b",
    "tags.team LIKE 'f%'": "",
    "tags.team LIKE 'F%'": "b",
    "tags.team ILIKE 'f%'": "b",
    "tags.team LIKE '____'": "a",
    "tags.team LIKE '*'": "",
    "tags.team IS NULL": "c",
    "tags.team IS NOT NULL": "ba",
    "params.optimizer = 'adam w'": "b",
    "params.n IN ('9', '10')": "cb",
    "params.n NOT IN ('9')": "b",
    "tags.nothing = ''": "",
    "status = 'KILLED'": "b",
    "attributes.status != 'KILLED'": "ca",
    "attributes.run_name IN ('a', 'c')": "ca",
    "tags.mlflow.runName = 'a'": "a",
    "start_time < '2026-01-02T00:00Z'": "a",
    "start_time = 1767225600000": "a",
    "end_time > 0": "b",
    "datasets.name = 'd' and datasets.context = 'train'": "a",
    "datasets.digest LIKE '2%'": "",
    "params.x = ''' OR 1=1 --'": "",
}
ORDERS = {
    ("metrics.loss",): "bac",
    ("metrics.loss DESC",): "abc",
    ("params.n",): "bca",
    ("start_time", "name"): "abc",
    ("name DESC",): "cba",
    ("tags.team DESC", "name"): "abc",
    ("end_time", "name DESC"): "bca",
}


def names(runs: Runs, where: str = "", **options: object) -> str:
    """Return the one-letter names of the runs that are found, in order."""
    return "".join(run.name for run in runs.list(experiments=("churn",), where=where, **options).items)


@pytest.fixture
def three(platform: OwnPlatform, runs: Runs) -> dict[str, str]:
    a = runs.start("churn", name="a", tags={"team": "risk"}, started_at=datetime(2026, 1, 1, tzinfo=UTC)).id
    b = runs.start("churn", name="b", tags={"team": "Fraud"}, params={"optimizer": "adam w", "n": "10"}).id
    c = runs.start("churn", name="c", params={"n": "9"}, parent=b).id
    runs.log_metrics(a, [MetricPoint(key=key, value=0.5) for key in ("loss", "val/loss")])
    runs.log_metrics(b, [MetricPoint(key="loss", value=value, step=-value) for value in (1, 0)])
    runs.log_metrics(c, [MetricPoint(key="loss", value=NAN)])
    runs.log_inputs(a, datasets=(DatasetInput(name="d", digest="1", tags={"mlflow.data.context": "train"}),))
    runs.end(b, status="killed")
    return {"a": a, "b": b, "c": c}


def test_runs_are_found_by_conditions(runs: Runs, three: dict[str, str]) -> None:
    assert {where: names(runs, where) for where in CONDITIONS} == CONDITIONS


def test_children_are_found_by_their_parent(runs: Runs, three: dict[str, str]) -> None:
    assert names(runs, f"attributes.parent = '{three['b']}'") == "c"
    assert names(runs, f"tags.`mlflow.parentRunId` = '{three['b']}'") == "c"


def test_what_has_no_value_comes_last(runs: Runs, three: dict[str, str]) -> None:
    assert {order: names(runs, order_by=order) for order in ORDERS} == ORDERS


def test_pages_of_any_order_have_every_run_once(runs: Runs) -> None:
    for number in range(23):
        run = runs.start("churn", params={"group": str(number % 3)} if number % 5 else None).id
        if number % 4:
            runs.log_metrics(run, [MetricPoint(key="auc", value=number % 2)])
    whole = runs.list(experiments=("churn",), order_by=("params.group DESC", "metrics.auc"), limit=100).items

    seen, after = [], ""
    while True:
        page = runs.list(
            experiments=("churn",), order_by=("params.group DESC", "metrics.auc"), limit=4, after=after
        )
        seen += page.items
        if page.next is None:
            break
        after = page.next

    assert [run.id for run in seen] == [run.id for run in whole]
    assert len({run.id for run in seen}) == 23
    with pytest.raises(InvalidInput, match="after"):
        runs.list(experiments=("churn",), order_by=("metrics.auc",), limit=4, after=after)


def test_a_list_shows_what_was_asked_for(runs: Runs, three: dict[str, str]) -> None:
    everything = runs.list(where="name = 'a'", show=("params", "tags", "metrics", "datasets")).items[0]
    one = runs.list(where="name = 'a'", metrics=("val/loss",)).items[0]

    assert [metric.key for metric in everything.metrics] == ["loss", "val/loss"]
    assert [(tag.key, tag.value) for tag in everything.tags] == [("team", "risk")]
    assert [each.name for each in everything.datasets] == ["d"]
    assert ([metric.key for metric in one.metrics], one.tags) == (["val/loss"], ())


def test_a_list_without_experiments_is_of_the_workspace(platform: OwnPlatform, runs: Runs) -> None:
    platform.workspaces.create("risk")
    first, second = runs.start("one"), runs.start("two")
    there = runs.start("one", workspace="risk")

    assert [run.id for run in runs.list().items] == [second.id, first.id]
    assert [run.id for run in runs.list(workspace="risk").items] == [there.id]
    assert [run.id for run in runs.list(experiments=("one", "risk/one")).items] == [there.id, first.id]


def test_a_search_shows_nothing_that_is_hidden(platform: OwnPlatform, runs: Runs) -> None:
    platform.workspaces.create("risk")
    runs.start("churn", name="secret", tags={"a": "b"})
    stranger = platform.join("sam", Role.DEVELOPER, workspace="risk")

    with acting_as(stranger):
        with pytest.raises((NotFound, Denied)):
            runs.list(where="tags.a = 'b'")
        with pytest.raises(NotFound):
            runs.list(experiments=("default/churn",), workspace="risk")
        assert runs.list(workspace="risk").items == ()


def test_deleted_runs_are_listed_on_request(runs: Runs, three: dict[str, str]) -> None:
    runs.delete(three["a"])

    assert names(runs) == "cb"
    assert names(runs, view="deleted") == "a"
    assert names(runs, view="all") == "cba"
    assert runs.restore(three["a"]).deleted_at is None
    assert names(runs) == "cba"


def test_experiments_are_searched(platform: OwnPlatform) -> None:
    made = platform.experiments
    made.create("churn-a", tags={"team": "risk"})
    platform.clock.advance(timedelta(hours=1))
    made.create("churn-b")
    made.create("Fraud")
    platform.clock.advance(timedelta(hours=1))
    made.set_tags("churn-a", {"team": "core"})

    def found(where: str = "", *order: str) -> list[str]:
        return [each.name for each in made.list(where=where, order_by=order).items]

    assert found() == ["Fraud", "churn-b", "churn-a"]
    assert found("name LIKE 'churn%'", "name") == ["churn-a", "churn-b"]
    assert found("name ILIKE 'FR%'") == ["Fraud"]
    assert found("tags.team = 'core'") == ["churn-a"]
    assert found("", "last_update_time DESC") == ["churn-a", "Fraud", "churn-b"]
    first = made.show("churn-a")
    assert found(f"creation_time <= '{first.created_at.isoformat()}'") == ["churn-a"]
