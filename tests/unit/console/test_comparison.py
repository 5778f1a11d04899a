"""Runs side by side: what differs, which is best, and the axes of parallel coordinates; and tuning studies."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from falaj.apps.console.pages.runs.comparison import axis_of, chosen_runs, comparison_view, distinct_names
from falaj.apps.console.pages.studies.study import study_view
from falaj.apps.console.pages.studies.table import studies_view
from falaj.apps.console.times import Times
from falaj.records.tracking import Metric, Param, Run, RunDetails, RunStatus
from falaj.records.training.jobs import JobSpec
from falaj.records.tuning import (
    ChoiceParam,
    FloatParam,
    Objective,
    ParamImportance,
    Study,
    StudySettings,
    StudyState,
    StudyTrial,
    TrialState,
    best_trials,
)

NOON = datetime(2026, 11, 17, 12, tzinfo=UTC)
TIMES = Times(UTC)


def run(ident: str, params: dict[str, str], metrics: dict[str, float]) -> RunDetails:
    return RunDetails(
        run=Run(
            id=ident,
            workspace="w",
            experiment="e",
            name=f"name of {ident}",
            status=RunStatus.FINISHED,
            owner="dana",
            started_at=NOON,
        ),
        params=tuple(Param(key=key, value=value) for key, value in params.items()),
        tags=(),
        metrics=tuple(
            Metric(key=key, points=1, last=value, last_step=1, last_timestamp=NOON)
            for key, value in metrics.items()
        ),
        artifacts=(),
    )


RUNS = (
    run("run_1", {"lr": "0.1", "model": "a", "same": "1"}, {"loss": 0.5, "auc": 0.7, "system/x": 1}),
    run(
        "run_2",
        {"lr": "0.0001", "model": "<b>", "same": "1"},
        {"loss": 0.4, "auc": float("nan"), "system/x": 2},
    ),
    run("run_3", {"same": "1"}, {"loss": 0.6}),
)


def test_only_parameters_that_differ_are_shown_unless_all_are_asked_for() -> None:
    view = comparison_view(RUNS, times=TIMES)

    assert [row.name for row in view.params] == ["lr", "model"]
    assert view.params[0].values == ("0.1", "0.0001", "–")
    assert [row.name for row in comparison_view(RUNS, times=TIMES, only_differences=False).params] == [
        "lr",
        "model",
        "same",
    ]


def test_runs_of_the_same_name_are_told_apart() -> None:
    found = run("run_1", {}, {}).run
    later, other = (
        found.model_copy(update={"id": "run_2"}),
        found.model_copy(update={"id": "run_3", "name": "b"}),
    )

    def names(*runs: Run) -> list[str]:
        return [name for _, name in distinct_names(runs, TIMES)]

    assert names(found, other) == ["name of run_1", "b"]
    assert names(found, later) == ["name of run_1 (run_1)", "name of run_1 (run_2)"]
    later = later.model_copy(update={"started_at": NOON + timedelta(minutes=1)})
    assert names(found, later) == ["name of run_1 (12:00:00)", "name of run_1 (12:01:00)"]
    later = later.model_copy(update={"started_at": NOON + timedelta(days=1)})
    assert names(found, later) == [
        "name of run_1 (2026-11-17 12:00:00)",
        "name of run_1 (2026-11-18 12:00:00)",
    ]


def test_a_parameter_with_one_value_and_gaps_is_no_axis() -> None:
    found = [run("run_1", {"lr": "1", "once": "7"}, {}), run("run_2", {"lr": "2"}, {})]

    assert [axis.name for axis in comparison_view(found, times=TIMES).axes] == ["lr"]


def test_the_best_value_of_a_metric_has_a_star() -> None:
    rows = {row.name: row.values for row in comparison_view(RUNS, times=TIMES).metrics}

    assert rows["loss"] == ("0.5", "0.4 ★", "0.6")
    assert rows["auc"] == ("0.7", "nan", "–")
    assert rows["system/x"] == ("1", "2", "–")


def test_axes_are_numbers_logarithms_or_words() -> None:
    view = comparison_view(RUNS, times=TIMES)

    assert [(axis.name, axis.words, axis.log) for axis in view.axes] == [
        ("lr", None, True),
        ("model", ("a", "<b>"), False),
        ("loss", None, False),
        ("auc", None, False),
    ]
    assert view.coloured_by == 2
    assert axis_of("lr", ["0.1", None]).values == (0.1, None)
    assert axis_of("lr", ["nan", "1"]).words == ("nan", "1")


def test_the_address_names_each_run_once_and_not_too_many() -> None:
    assert chosen_runs({"runs": "a,b,,a"}) == ("a", "b")
    assert len(chosen_runs({"runs": ",".join(str(number) for number in range(100))})) == 30


# -------------------------------------------------------------------------------------------- studies


def trial(number: int, value: float | None, **params: object) -> StudyTrial:
    state = TrialState.RUNNING if value is None else TrialState.COMPLETE
    return StudyTrial(
        number=number,
        state=state,
        params={"lr": 0.1 * (number + 1), "kind": "<i>a"} | params,  # type: ignore[arg-type]
        values=() if value is None else (value,),
        run=f"run_{number}",
    )


TRIALS = (trial(0, 0.5), trial(1, 0.3), trial(2, 0.4), trial(3, None))


def study(state: StudyState = StudyState.RUNNING) -> Study:
    space = {"lr": FloatParam(low=0.01, high=1, log=True), "kind": ChoiceParam(choices=("<i>a", "b"))}
    objectives = (Objective(metric="val_loss", direction="minimize"),)
    return Study(
        id="study_1",
        workspace="w",
        name="tune",
        state=state,
        settings=StudySettings(space=space, objectives=objectives, trials=10),
        job=JobSpec(name="train", script="train.py"),
        counts={TrialState.COMPLETE: 3, TrialState.RUNNING: 1},
        best=tuple(best_trials(TRIALS, objectives)),
        importance=(
            ParamImportance(param="kind", importance=0.2, metric="val_loss"),
            ParamImportance(param="lr", importance=0.8, metric="val_loss"),
        ),
        owner="dana",
        created_at=NOON,
    )


def test_a_study_shows_its_progress_its_best_trial_and_the_importance_of_parameters() -> None:
    view = study_view(study(), TRIALS, times=TIMES)

    assert (view.finished, view.planned, view.is_running) == (3, 10, True)
    assert (view.best[0].number, view.best[0].values, view.best[0].params[1]) == (1, ("0.3",), "<i>a")
    assert view.best_so_far == ((0, 0.5), (1, 0.3), (2, 0.3))
    assert [name for name, _ in view.importance] == ["lr", "kind"]
    assert [axis.name for axis in view.axes] == ["lr", "kind", "val_loss"]
    assert [each.number for each in view.trials] == [3, 2, 1, 0]
    assert ("trials", "3 complete, 1 running") in view.facts


def test_a_study_without_complete_trials_has_nothing_to_plot() -> None:
    bare = study().model_copy(update={"best": (), "importance": ()})

    view = study_view(bare, (trial(0, None),), times=TIMES)

    assert (view.values, view.axes, view.best, view.importance) == ((), (), (), ())


def test_studies_are_listed_with_their_best_value() -> None:
    view = studies_view([study(), study(StudyState.DONE)], times=TIMES)

    assert (view.lines[0].trials, view.lines[0].best) == ("3 of 10", "0.3")
