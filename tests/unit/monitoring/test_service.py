"""The operations of monitoring on a real platform: drift, alerts, permissions and invalid input."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from falaj.errors import AlreadyExists, Conflict, Denied, Internal, InvalidInput, NotFound, ResidencyDenied
from falaj.governance.operations.caller import acting_as
from falaj.governance.tables import audit_entries, events
from falaj.monitoring import evaluation, store
from falaj.monitoring.drift.comparison import MINIMUM_ROWS
from falaj.monitoring.tables import positions, slots
from falaj.monitoring.windows.slots import SLOTS_KEPT
from falaj.records.governance.identity import Role
from falaj.records.governance.lineage import Direction
from falaj.records.governance.residency import Label
from falaj.records.monitoring.monitors import AlertState, MonitorWindow
from falaj.records.monitoring.sketches import DriftVerdict, FalseAlarmBudget, RowDependence

if TYPE_CHECKING:
    from conftest import MonitoringEnv

Columns = dict[str, Any]


def flights(rng: np.random.Generator, rows: int, *, shift: float = 0.0, nulls: float = 0.05) -> Columns:
    """Return columns of several kinds; `distance` moves with `shift`, `wind` has a share of `nulls`."""
    return {
        "distance": rng.normal(shift, 1, rows),
        "delay": rng.exponential(10, rows),
        "seats": rng.poisson(3, rows),
        "wind": np.where(rng.random(rows) < nulls, np.nan, rng.normal(size=rows)),
        "carrier": rng.choice(["AA", "UA", "B6"], rows, p=[0.5, 0.3, 0.2]),
    }


def watch(env: MonitoringEnv, *, rows: int = 500, **options: Any) -> str:
    window = MonitorWindow(rows=rows)
    return env.watched(flights(env.rng, 5000), window=window, **options).id


def alert_events(env: MonitoringEnv) -> list[dict[str, Any]]:
    return [row for row in env.platform.rows(events) if row["type"] == "falaj.monitoring.alert"]


# ---------------------------------------------------------------------------------------------- drift


def test_drift_is_alerted_once_and_again_only_after_it_was_clean(env: MonitoringEnv) -> None:
    monitor = watch(env)
    start = env.platform.clock()
    for shift in (0.0, 1.5, 1.5, 0.0, 1.5):
        env.deliver(flights(env.rng, 500, shift=shift))
        env.service.evaluate()
        assert env.service.evaluate().windows == 0

    first, second = env.service.alerts(monitor=monitor).items

    assert (first.state, second.state) == (AlertState.ENDED, AlertState.OPEN)
    assert (first.columns, first.version) == (("distance",), "3")
    assert (first.windows, first.rows, first.rows_seen, second.rows_seen) == (2, 500, 1000, 2500)
    assert (first.since - start, first.until - start) == (timedelta(seconds=10), timedelta(seconds=20))
    assert (first.last_until - start, first.ended_at) == (
        timedelta(seconds=30),
        start + timedelta(seconds=40),
    )
    assert [event["subject"] for event in alert_events(env)] == [first.id, second.id]
    assert alert_events(env)[0]["data"]["columns"] == ["distance"]
    assert alert_events(env)[0]["workspace"] == first.workspace
    report = env.service.alert(first.id).report
    assert report is not None
    assert report.reports[0].name == "distance"
    assert env.service.show(monitor).alert == second.id


def test_an_acknowledged_drift_that_continues_is_alerted_again(light_env: MonitoringEnv) -> None:
    monitor = watch(light_env)
    light_env.deliver(flights(light_env.rng, 500, shift=1.5))
    (ident,) = light_env.service.evaluate().raised

    known = light_env.service.acknowledge(ident)
    light_env.deliver(flights(light_env.rng, 500, shift=1.5))
    (again,) = light_env.service.evaluate().raised

    assert (known.state, known.acknowledged_at) == (
        AlertState.ACKNOWLEDGED,
        light_env.platform.clock() - timedelta(seconds=10),
    )
    assert [each.id for each in light_env.service.alerts(monitor=monitor).items] == [ident, again]
    with pytest.raises(Conflict, match="acknowledged"):
        light_env.service.acknowledge(ident)


@pytest.mark.slow
def test_the_same_data_raises_no_alarm_over_hundreds_of_windows(light_env: MonitoringEnv) -> None:
    """The budget allows a false alarm in 30 looks with a chance of 5 %; here are 300 looks at 5 columns."""
    env = light_env
    watch(env, rows=200)
    raised = []
    for _ in range(30):
        windows = tuple(env.serve(flights(env.rng, 200)) for _ in range(10))
        env.service.record("delay", windows=windows)
        raised += env.service.evaluate().raised

    (progress,) = env.service.show("delay").versions
    assert (progress.windows, progress.rows, progress.waiting_rows) == (300, 60_000, 0)
    assert env.platform.count(slots) == SLOTS_KEPT
    assert len(raised) <= 3  # 0.5 are expected at most; more than 3 come once in 500 runs


def test_more_nulls_are_drift(light_env: MonitoringEnv) -> None:
    watch(light_env)

    light_env.deliver(flights(light_env.rng, 500, nulls=0.4))

    report = light_env.service.check("delay")
    assert report.verdict is DriftVerdict.DRIFT
    assert [each.name for each in report.looks[0].drifted] == ["wind"]


def test_text_drifts_too(light_env: MonitoringEnv) -> None:
    watch(light_env)
    rows = flights(light_env.rng, 500)
    rows["carrier"] = np.array([b"UA"] * 300 + [b"ZZ"] * 200, object)  # as a tensor of bytes gives it

    light_env.deliver(rows)

    assert [each.name for each in light_env.service.check("delay").looks[0].drifted] == ["carrier"]


def test_too_few_rows_give_no_verdict(env: MonitoringEnv) -> None:
    watch(env)

    env.deliver(flights(env.rng, 60, shift=9))

    report = env.service.check("delay")
    assert report.verdict is DriftVerdict.TOO_FEW
    assert "60 rows; 80 are needed" in report.looks[0].reports[0].words
    assert env.service.evaluate().windows == 0
    assert env.service.show("delay").versions[0].waiting_rows == 60


def test_a_window_waits_until_it_is_complete(light_env: MonitoringEnv) -> None:
    env = light_env
    env.watched(flights(env.rng, 5000), window=MonitorWindow(rows=300, duration=timedelta(minutes=1)))

    judged = []
    for _ in range(7):
        env.deliver(flights(env.rng, 100))
        judged.append(env.service.evaluate().windows)

    assert judged == [0, 0, 0, 0, 0, 1, 0]
    assert env.service.show("delay").versions[0].rows == 600


def test_a_duration_alone_ends_a_window_without_new_rows(light_env: MonitoringEnv) -> None:
    env = light_env
    env.watched(flights(env.rng, 5000), window=MonitorWindow(duration=timedelta(minutes=1)))
    env.deliver(flights(env.rng, 10))
    assert env.service.evaluate().windows == 0

    env.platform.clock.advance(timedelta(minutes=1))

    assert env.service.evaluate().windows == 1
    assert env.service.show("delay").versions[0].verdict is DriftVerdict.TOO_FEW


def test_versions_are_judged_apart(light_env: MonitoringEnv) -> None:
    env = light_env
    watch(env)
    env.deliver(flights(env.rng, 500), version="3")
    env.deliver(flights(env.rng, 500, shift=2), version="4")

    env.service.evaluate()

    verdicts = {each.version: each.verdict for each in env.service.show("delay").versions}
    assert verdicts == {"3": DriftVerdict.NONE, "4": DriftVerdict.DRIFT}
    assert [look.model for look in env.service.check("delay").looks] == ["4", "3"]


def test_drift_of_two_versions_is_one_alert_until_both_are_clean_or_silent(
    light_env: MonitoringEnv,
) -> None:
    env = light_env
    watch(env)
    endpoint = env.platform.objects.show("endpoint:delay").id
    came, stands = [], []
    for version, shift in (("3", 2), ("4", 2), ("4", 0), ("3", 2), ("4", 0), ("4", 0)):
        env.deliver(flights(env.rng, 500, shift=shift), version=version)
        found = env.service.evaluate()
        came.append((len(found.raised), len(found.ended)))
        with env.platform.database.read() as tx:
            stands.append(len(store.open_alert_times(tx, endpoint)))

    assert came == [(1, 0), (0, 0), (0, 1), (1, 0), (0, 1), (0, 0)]
    assert stands == [1, 1, 0, 1, 0, 0]


def test_a_prediction_without_a_column_is_compared_with_its_own_first_rows(env: MonitoringEnv) -> None:
    watch(env)
    rng, verdicts = env.rng, []
    for mean in (0.0, 0.0, 2.0):
        env.deliver(flights(rng, 500), answers={"late": rng.normal(mean, 1, (500, 1))})
        env.service.evaluate()
        (look,) = env.service.check("delay").looks
        verdicts.append(next(report for report in look.reports if report.name == "late"))

    learning, clean, drifted = verdicts
    assert [report.verdict for report in verdicts] == [
        DriftVerdict.TOO_FEW,
        DriftVerdict.NONE,
        DriftVerdict.DRIFT,
    ]
    assert "become its reference" in learning.words
    assert "compared with its own first 500 rows" in clean.words
    assert drifted.role == "prediction"
    assert env.service.show("delay").versions[0].own_reference == ("late",)


def test_a_prediction_is_compared_with_the_column_of_its_name(light_env: MonitoringEnv) -> None:
    env = light_env
    env.watched({"x": env.rng.normal(size=2000), "score": env.rng.random(2000)})

    env.deliver({"x": env.rng.normal(size=500)}, answers={"score": env.rng.random(500) / 3})

    (drifted,) = env.service.check("delay").looks[0].drifted
    assert (drifted.name, drifted.role, drifted.reference_rows) == ("score", "prediction", 2000)


def test_booleans_that_a_model_sees_as_numbers_are_compared(light_env: MonitoringEnv) -> None:
    env = light_env
    env.watched({"late": env.rng.random(2000) < 0.2})

    env.deliver({"late": (env.rng.random(4000) < 0.2).astype(np.float32)})
    same = env.service.check("delay")
    env.deliver({"late": (env.rng.random(4000) < 0.8).astype(np.float32)})

    assert (same.verdict, env.service.check("delay").verdict) == (DriftVerdict.NONE, DriftVerdict.DRIFT)


def test_a_column_of_another_kind_is_not_judged_and_does_no_harm(light_env: MonitoringEnv) -> None:
    watch(light_env)
    rows = flights(light_env.rng, 500)
    rows["distance"] = np.array(["near", "far"] * 250)

    light_env.deliver(rows)
    light_env.deliver(flights(light_env.rng, 500))

    words = [each.words for each in light_env.service.check("delay").looks[0].reports]
    assert light_env.service.evaluate().windows == 2
    assert any(each.startswith("distance shows no drift") for each in words)


# ---------------------------------------------------------------------------------------------- retention


@pytest.mark.slow
def test_merged_slots_equal_one_big_window(light_env: MonitoringEnv) -> None:
    env = light_env
    watch(env, rows=10**6)
    parts = [flights(env.rng, 40, shift=0.4) for _ in range(SLOTS_KEPT + 40)]
    for part in parts:
        env.deliver(part)
    together = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    (merged,) = env.service.check("delay").looks
    assert env.platform.count(slots) == SLOTS_KEPT

    env.deliver(together, version="big")

    big = {look.model: look for look in env.service.check("delay").looks}["big"]
    exact = {report.name: report for report in big.reports}
    for report in merged.reports:
        other = exact[report.name]
        assert (report.verdict, report.window_rows) == (other.verdict, other.window_rows)
        for one, two in zip(report.evidence, other.evidence, strict=True):
            assert one.value == pytest.approx(two.value, abs=0.02)


@pytest.mark.slow
def test_slots_are_not_merged_across_evaluated_windows(light_env: MonitoringEnv) -> None:
    env = light_env
    watch(env, rows=80)
    for _ in range(3 * SLOTS_KEPT // 2):
        env.deliver(flights(env.rng, 27))
        env.service.evaluate()

    (progress,) = env.service.show("delay").versions
    assert progress.rows + progress.waiting_rows == 27 * 3 * SLOTS_KEPT // 2
    assert progress.windows == SLOTS_KEPT // 2
    assert env.platform.count(slots) == SLOTS_KEPT


def test_another_process_continues_in_the_middle(env: MonitoringEnv) -> None:
    watch(env)
    env.deliver(flights(env.rng, 300, shift=1.5))
    assert env.service.evaluate().windows == 0

    other = env.again()
    other.record("delay", windows=(env.serve(flights(env.rng, 300, shift=1.5)),))
    (raised,) = other.evaluate().raised

    assert env.service.evaluate().windows == 0
    assert (env.service.alert(raised).rows, len(alert_events(env))) == (600, 1)


def test_two_evaluations_at_once_judge_a_window_once(
    light_env: MonitoringEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    env, other = light_env, light_env.again()
    watch(env)
    env.deliver(flights(env.rng, 500, shift=1.5))
    judge = evaluation._evaluate_position

    def slow(*given: Any) -> Any:
        monkeypatch.undo()
        with ThreadPoolExecutor(1) as threads:
            assert len(threads.submit(other.evaluate).result().raised) == 1
        return judge(*given)

    monkeypatch.setattr(evaluation, "_evaluate_position", slow)
    assert env.service.evaluate().windows == 0
    assert len(alert_events(env)) == 1


def test_an_interrupted_evaluation_is_rolled_back(
    light_env: MonitoringEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = light_env
    watch(env)
    env.deliver(flights(env.rng, 500, shift=1.5))
    before = env.platform.rows(positions)

    def broken(*given: Any) -> None:
        raise OSError("the machine goes down")

    monkeypatch.setattr(evaluation, "_store_progress", broken)
    with pytest.raises(Internal):
        env.service.evaluate()
    monkeypatch.undo()

    assert (env.platform.rows(positions), env.service.alerts().items) == (before, ())
    assert len(env.service.evaluate().raised) == len(alert_events(env)) == 1


def test_windows_whose_key_was_destroyed_do_not_stop_the_others(light_env: MonitoringEnv) -> None:
    env = light_env
    watch(env)
    env.deliver(flights(env.rng, 500, shift=1.5))

    env.platform.keys.destroy("default")

    other = env.again()  # a service that has not cached the key; one that has sees it within a second
    assert [other.evaluate().windows for _ in range(2)] == [0, 0]
    (resting,) = env.platform.rows(positions)
    assert resting["due_at"] == env.platform.clock() + evaluation.UNREADABLE_RETRY


def test_an_evaluation_without_windows_leaves_no_audit_entry(light_env: MonitoringEnv) -> None:
    watch(light_env)
    before = light_env.platform.count(audit_entries), light_env.platform.count(events)

    for _ in range(5):
        light_env.service.evaluate()

    assert (light_env.platform.count(audit_entries), light_env.platform.count(events)) == before


def test_delivered_windows_are_stored_encrypted(light_env: MonitoringEnv) -> None:
    env = light_env
    env.watched({"city": np.array(["samarkand"] * 500)})
    env.deliver({"city": np.array(["samarkand"] * 500)})
    env.deliver({"city": np.array(["samarkand"] * 500)})
    env.service.evaluate()

    stored = [row["sealed"] for row in env.platform.rows(slots)]
    assert not [each for each in stored if b"samarkand" in each]
    files = [path.read_bytes() for path in env.platform.home.path.rglob("*") if path.is_file()]
    assert not [each for each in files if b"samarkand" in each]


def test_nothing_is_kept_of_an_endpoint_without_a_monitor(light_env: MonitoringEnv) -> None:
    env = light_env
    env.factory.make("endpoint", "delay")

    answer = env.service.record("delay", windows=(env.serve(flights(env.rng, 10)),))

    assert (answer.stored, env.platform.count(slots)) == (0, 0)


def test_removing_a_monitor_removes_its_windows_and_keeps_its_alerts(env: MonitoringEnv) -> None:
    monitor = watch(env)
    env.deliver(flights(env.rng, 500, shift=1.5))
    (ident,) = env.service.evaluate().raised

    env.service.remove("delay")

    assert (env.platform.count(slots), env.platform.count(positions)) == (0, 0)
    assert env.service.alert(ident).state is AlertState.ENDED
    assert env.service.list().items == ()
    with pytest.raises(NotFound):
        env.service.check(monitor)
    assert env.service.watch("delay", reference="flights").name == "delay"


def test_time_bounds_select_the_windows_to_check(light_env: MonitoringEnv) -> None:
    env = light_env
    watch(env)
    env.deliver(flights(env.rng, 500))
    between = env.platform.clock()
    env.deliver(flights(env.rng, 500, shift=2))
    env.service.evaluate()

    verdicts = [
        env.service.check("delay", until=between).verdict,
        env.service.check("delay", since=between).verdict,
        env.service.check("delay", since=env.platform.clock()).verdict,
    ]

    assert verdicts == [DriftVerdict.NONE, DriftVerdict.DRIFT, DriftVerdict.TOO_FEW]


def test_after_another_reference_is_set_it_compares_with_the_other_training_set(env: MonitoringEnv) -> None:
    watch(env)
    env.deliver(flights(env.rng, 500, shift=1.5))
    (ident,) = env.service.evaluate().raised
    newer = env.training_set("newer", flights(env.rng, 5000, shift=1.5))

    monitor = env.service.set_reference("delay", reference="newer")
    env.deliver(flights(env.rng, 500, shift=1.5))
    env.service.evaluate()

    assert (monitor.training_set, monitor.alert, monitor.versions) == (newer, None, ())
    assert env.service.alert(ident).state is AlertState.ENDED
    assert env.service.show("delay").versions[0].verdict is DriftVerdict.NONE
    assert newer in {node.id for node in env.platform.lineage.graph(monitor.id, direction=Direction.UP)}


# ---------------------------------------------------------------------------- permissions and residency


def test_a_monitor_and_its_alerts_are_under_the_label_of_the_training_set(light_env: MonitoringEnv) -> None:
    env = light_env
    source = env.platform.put("raw", b"rows")
    env.platform.objects.label(source.id, only=("AE",), classes=("personal",))
    env.factory.make("endpoint", "delay")
    env.training_set("flights", flights(env.rng, 2000), sources=(source.id,))

    monitor = env.service.watch("delay", reference="flights", window=MonitorWindow(rows=500))
    env.deliver(flights(env.rng, 500, shift=2))
    (raised,) = env.service.evaluate().raised

    label = Label(only=frozenset({"AE"}), classes=frozenset({"personal"}))
    assert (monitor.label, env.service.alert(raised).label) == (label, label)
    above = env.platform.lineage.graph(raised, direction=Direction.UP)
    assert {source.id, monitor.id} <= {node.id for node in above}


def test_sketches_of_data_forbidden_in_this_zone_are_not_made(light_env: MonitoringEnv) -> None:
    env = light_env
    source = env.platform.put("raw", b"rows", zone="frankfurt", only=("DE",))
    env.factory.make("endpoint", "delay")
    env.training_set("flights", flights(env.rng, 2000), sources=(source.id,))

    with pytest.raises(ResidencyDenied, match="local"):
        env.service.watch("delay", reference="flights")


def test_an_endpoint_that_is_labelled_later_may_no_longer_deliver(light_env: MonitoringEnv) -> None:
    env = light_env
    watch(env)
    env.factory.make("endpoint", "unwatched")
    window = env.serve(flights(env.rng, 10))
    assert env.service.record("delay", windows=(window,)).stored == 1

    for name in ("delay", "unwatched"):
        env.platform.objects.label(f"endpoint:{name}", only=("DE",))

    with pytest.raises(ResidencyDenied, match="local"):
        env.service.record("delay", windows=(window,))
    assert env.service.record("unwatched", windows=(window,)).stored == 0, (
        "nothing is kept, so nothing is refused"
    )


def test_only_operators_deliver_and_only_readers_of_the_training_set_monitor(
    light_env: MonitoringEnv,
) -> None:
    env = light_env
    env.factory.make("endpoint", "delay")
    env.training_set("flights", flights(env.rng, 2000))
    window = env.serve(flights(env.rng, 10))

    with acting_as(env.platform.join("dana", Role.DEVELOPER)):
        env.service.watch("delay", reference="flights")
        with pytest.raises(Denied):
            env.service.record("delay", windows=(window,))
        with pytest.raises(Denied):
            env.service.evaluate()
    with acting_as(env.platform.join("vera", Role.VIEWER)):
        assert env.service.check("delay").verdict is DriftVerdict.TOO_FEW
        with pytest.raises(Denied):
            env.service.remove("delay")


# -------------------------------------------------------------------------------------------- bad input


def test_bad_input_is_refused_with_the_reason(light_env: MonitoringEnv) -> None:
    env = light_env
    env.factory.make("endpoint", "delay")
    env.training_set("flights", {"km": np.arange(1000.0), "parts": [[1, 2]] * 1000})
    env.training_set("empty", {"km": np.array([], float)})

    with pytest.raises(NotFound, match="no endpoint 'nowhere'"):
        env.service.watch("nowhere", reference="flights")
    with pytest.raises(NotFound, match="no dataset 'nothing'"):
        env.service.watch("delay", reference="nothing")
    with pytest.raises(InvalidInput, match="columns of the training set that can be watched: km") as wrong:
        env.service.watch("delay", reference="flights", columns=("km", "miles", "parts"))
    assert wrong.value.faults[0].given == "miles, parts"
    with pytest.raises(InvalidInput, match="no rows"):
        env.service.watch("delay", reference="empty")
    for window in ({"rows": 0}, {"rows": MINIMUM_ROWS - 1}, {"duration": 0}, {}):
        with pytest.raises(InvalidInput):
            env.service.watch("delay", reference="flights", window=window)  # type: ignore[arg-type]
    first = env.service.watch("delay", reference="flights")
    assert env.service.watch("delay", reference="flights") == first
    with pytest.raises(AlreadyExists, match="set-reference delay"):
        env.service.watch("delay", reference="flights", window=MonitorWindow(rows=2000))
    with pytest.raises(InvalidInput, match="until"):
        env.service.check("delay", since=env.platform.clock(), until=env.platform.clock())
    assert [each.name for each in env.service.list().items] == ["delay"]


def test_an_invalid_sketch_is_refused(light_env: MonitoringEnv) -> None:
    watch(light_env)
    good = light_env.serve(flights(light_env.rng, 10))
    broken = good.features[0].model_copy(update={"sketch": b"\x00" * 40})
    bad = good.model_copy(update={"features": (broken, *good.features[1:])})

    with pytest.raises(InvalidInput, match=r"windows\.1\.features\.distance"):
        light_env.service.record("delay", windows=(good, bad))

    assert light_env.platform.count(slots) == 0


@pytest.mark.slow
def test_an_endpoint_of_another_workspace_is_refused(light_env: MonitoringEnv) -> None:
    env = light_env
    env.platform.workspaces.create("other")
    env.factory.make("endpoint", "delay", workspace="other")
    env.training_set("flights", flights(env.rng, 2000))

    with pytest.raises(InvalidInput, match="an endpoint of workspace default"):
        env.service.watch("other/delay", reference="flights")


def test_days_of_the_training_set_tell_how_rows_depend_on_each_other(light_env: MonitoringEnv) -> None:
    rng, days = light_env.rng, np.repeat(np.arange(30), 300)
    times = np.datetime64("2026-01-01", "us") + days * np.timedelta64(86_400_000_000, "us")
    common = rng.normal(size=30)[days]
    light_env.watched({"event_time": times, "x": common + rng.normal(size=9_000)})

    light_env.deliver({"x": rng.normal(size=1_000) + 1.0})
    (look,) = light_env.service.check("delay").looks

    report = next(each for each in look.reports if each.name == "x")
    assert report.verdict is DriftVerdict.NONE  # a day may be so
    assert report.effective_rows is not None
    assert report.effective_rows < 50
    assert "rows vary like" in report.words


def test_rows_may_be_taken_as_independent(light_env: MonitoringEnv) -> None:
    rng = light_env.rng
    budget = FalseAlarmBudget(dependence=RowDependence.NONE)
    made = light_env.watched({"x": rng.normal(size=9_000)}, budget=budget)

    light_env.deliver({"x": rng.normal(size=1_000) + 0.3})

    assert made.budget.dependence is RowDependence.NONE
    assert light_env.service.check("delay").verdict is DriftVerdict.DRIFT
