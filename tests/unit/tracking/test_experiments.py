"""Experiments: names, tags, deletion, and what belongs to others."""

from __future__ import annotations

from datetime import timedelta

import pytest

from falaj.errors import AlreadyExists, Conflict, InvalidInput, NotFound
from falaj.governance.operations.caller import acting_as
from falaj.records.governance.identity import Role
from falaj.records.tracking import MetricPoint
from falaj.tracking.service import Runs
from falaj.tracking.tables import blocks, experiments, params, series, tags
from falaj.tracking.tables import runs as runs_table
from platforms import OwnPlatform


def test_names_are_free_text_and_differ_by_case(platform: OwnPlatform) -> None:
    made = platform.experiments
    first = made.create("/Users/dana/Churn: second try", tags={"team": "risk"})
    other = made.create("/users/dana/churn: second try")

    assert first.id != other.id
    assert made.find("/Users/dana/Churn: second try") == first
    assert made.show(first.id).tags[0].value == "risk"
    with pytest.raises(AlreadyExists, match="there already"):
        made.create("/Users/dana/Churn: second try")
    for name in ("", " a", "a\nb", "x" * 501, first.id):
        with pytest.raises(InvalidInput):
            made.create(name)


def test_runs_are_started_by_name_or_by_id(platform: OwnPlatform, runs: Runs) -> None:
    made = platform.experiments.create("My experiment")

    assert runs.start(made.id).experiment == runs.start("My experiment").experiment == made.id
    with pytest.raises(NotFound):
        runs.start("experiment_" + "0" * 26)
    assert len(platform.experiments.list().items) == 1


def test_an_experiment_is_renamed_and_tagged(platform: OwnPlatform) -> None:
    made = platform.experiments
    first = made.create("first")
    made.create("taken")
    platform.clock.advance(timedelta(minutes=1))

    renamed = made.rename(first.id, "second")
    tagged = made.set_tags("second", {"a": "b"})
    made.delete_tags("second", ("a",))

    assert (renamed.name, tagged.tags[0].key, made.show("second").tags) == ("second", "a", ())
    assert renamed.updated_at > first.updated_at
    with pytest.raises(AlreadyExists):
        made.rename("second", "taken")
    with pytest.raises(NotFound):
        made.delete_tags("second", ("a",))


def test_a_deleted_experiment_keeps_its_name_and_comes_back_with_its_runs(
    platform: OwnPlatform, runs: Runs
) -> None:
    made = platform.experiments
    kept, gone = runs.start("churn"), runs.start("churn")
    runs.delete(gone.id)
    made.delete("churn")

    assert (runs.list().items, made.list().items) == ((), ())
    assert made.list(view="deleted").items[0].name == "churn"
    assert runs.show(kept.id).run.deleted_at is not None
    for call in (
        lambda: runs.start("churn"),
        lambda: made.create("churn"),
        lambda: made.rename("churn", "x"),
        lambda: made.set_tags("churn", {"a": "b"}),
    ):
        with pytest.raises(Conflict, match="deleted"):
            call()
    made.restore("churn")
    assert [run.id for run in runs.list().items] == [kept.id]


def test_experiments_of_other_workspaces_are_not_found(platform: OwnPlatform) -> None:
    platform.workspaces.create("risk")
    secret = platform.experiments.create("secret")

    with acting_as(platform.join("sam", Role.DEVELOPER, workspace="risk")):
        for call in (
            lambda: platform.experiments.show(secret.id),
            lambda: platform.experiments.delete(secret.id),
            lambda: platform.experiments.find("secret", workspace="risk"),
            lambda: platform.runs.start(secret.id, workspace="risk"),
        ):
            with pytest.raises(NotFound):
                call()
        assert platform.experiments.create("secret", workspace="risk").id != secret.id


# --------------------------------------------------------------------------------------------- retention


def test_what_was_deleted_long_ago_is_removed_for_good(platform: OwnPlatform, runs: Runs) -> None:
    old, young, kept = (runs.start("churn", params={"a": 1}, tags={"b": "c"}).id for _ in range(3))
    for run in (old, young, kept):
        runs.log_metrics(run, [MetricPoint(key="loss", value=1.0)])
    upload = runs.upload_artifact(old, "a.txt", iter([b"bytes"]))
    runs.delete(old)
    platform.clock.advance(timedelta(days=20))
    runs.delete(young)
    platform.clock.advance(timedelta(days=15))

    removed = runs.cleanup()

    assert (removed.runs, removed.more) == (1, False)
    for call in (lambda: runs.show(old), lambda: runs.restore(old), lambda: platform.get(upload.blob)):
        with pytest.raises(NotFound):
            call()
    assert runs.restore(young).deleted_at is None
    assert [platform.count(table) for table in (series, blocks, params, tags)] == [2, 2, 2, 2]
    assert platform.verify_audit(deep=True).ok


def test_a_deleted_experiment_is_removed_with_all_that_is_in_it(platform: OwnPlatform, runs: Runs) -> None:
    run = runs.start("churn").id
    platform.loggedmodels.create("churn", source_run=run)
    platform.experiments.delete("churn")
    platform.clock.advance(timedelta(days=31))

    removed = runs.cleanup()

    assert (removed.runs, removed.models, removed.experiments) == (1, 1, 1)
    assert platform.count(experiments) == platform.count(runs_table) == 0
    assert platform.experiments.create("churn").id
