"""Batches of metrics, parameters and tags: all of it is stored, or nothing; what is too much is refused."""

from __future__ import annotations

import json

import pytest

from falaj.errors import Conflict, InvalidInput, NotFound
from falaj.governance.operations.caller import acting_as
from falaj.governance.operations.operation import operations_of
from falaj.records.governance.identity import Role
from falaj.records.tracking import MetricPoint
from falaj.tracking import store
from falaj.tracking.service import Runs
from platforms import OwnPlatform

OPERATIONS = operations_of(Runs)
POINT = MetricPoint(key="loss", value=0.5)


@pytest.fixture
def run(runs: Runs) -> str:
    return runs.start("churn").id


def test_a_batch_has_metrics_parameters_and_tags(platform: OwnPlatform, runs: Runs, run: str) -> None:
    logged = runs.log_batch(run, metrics=(POINT,), params={"lr": 0.1}, tags={"a": "b"}, batch="1")
    again = runs.log_batch(run, metrics=(POINT,), params={"lr": 0.1}, tags={"a": "b"}, batch="1")

    assert (logged.metrics, logged.params, logged.tags, logged.repeated) == (1, 1, 1, 0)
    assert (again.params, again.tags) == (0, 0)
    found = runs.show(run)
    assert ([each.points for each in found.metrics], found.params[0].value) == ([1], "0.1")
    assert platform.verify_audit(deep=True).ok


def test_a_batch_that_is_wrong_in_part_stores_nothing(runs: Runs, run: str) -> None:
    runs.log_params(run, {"lr": "1"})

    with pytest.raises(Conflict, match="lr"):
        runs.log_batch(run, metrics=(POINT,), params={"lr": "2", "new": "x"}, tags={"a": "b"})
    named = MetricPoint(key="loss", value=1, model="logged_" + "0" * 26)
    with pytest.raises(NotFound):
        runs.log_batch(run, metrics=(POINT, named), tags={"a": "b"})

    found = runs.show(run)
    assert (found.metrics, found.tags, [each.key for each in found.params]) == ((), (), ["lr"])


def test_a_deleted_run_takes_no_batch(runs: Runs, run: str) -> None:
    runs.delete(run)

    for given in ({"metrics": (POINT,)}, {"params": {"a": 1}}, {"tags": {"a": "b"}}, {}):
        with pytest.raises(Conflict, match="deleted"):
            runs.log_batch(run, **given)


def test_a_stranger_logs_no_batch(platform: OwnPlatform, runs: Runs, run: str) -> None:
    platform.workspaces.create("risk")

    with acting_as(platform.join("sam", Role.DEVELOPER, workspace="risk")):
        for given in ({"metrics": (POINT,)}, {"params": {"a": 1}}):
            with pytest.raises(NotFound):
                runs.log_batch(run, **given)

    assert runs.show(run).params == ()


def test_values_of_50_mb_and_a_million_tags_are_refused() -> None:
    large = "x" * 50_000_000
    for given in ({"params": {"a": large}}, {"tags": {"a": large}}, {"tags": {large: "a"}}):
        with pytest.raises(InvalidInput) as refused:
            OPERATIONS["log_batch"].check({"run": "run", **given})
        assert len(str(refused.value)) < 2000
    million = json.dumps({"run": "run", "tags": {f"k{number}": "v" for number in range(1_000_000)}})
    with pytest.raises(InvalidInput):
        OPERATIONS["set_tags"].check_json(million.encode())


def test_tags_do_not_pile_up_without_end(runs: Runs, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MOST_TAGS", 3)
    runs.set_tags(run, {"a": "1", "b": "1"})

    with pytest.raises(Conflict, match="at most 3"):
        runs.set_tags(run, {"c": "1", "d": "1"})
    runs.set_tags(run, {"a": "2", "c": "1"})

    assert [(tag.key, tag.value) for tag in runs.show(run).tags] == [("a", "2"), ("b", "1"), ("c", "1")]


def test_tags_are_deleted_by_key(runs: Runs, run: str) -> None:
    runs.set_tags(run, {"a": "1", "b": "2"})

    assert runs.delete_tags(run, ("a", "zzz")).stored == 1
    with pytest.raises(NotFound, match="'a'"):
        runs.delete_tags(run, ("a",))
    assert [tag.key for tag in runs.show(run).tags] == ["b"]
