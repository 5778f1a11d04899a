"""Operations on studies: names, rights, pages, and what is never changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from falaj.errors import AlreadyExists, Conflict, Denied, InvalidInput, NotFound
from falaj.governance.operations.caller import acting_as
from falaj.records.governance.identity import Role
from falaj.records.training.jobs import JobSpec
from falaj.records.tuning import StudyOutcome, StudySettings, StudyState, StudyTrial, TrialState
from falaj.tuning.report import render_report, report_data
from platforms import InternalAsController

if TYPE_CHECKING:
    from conftest import StudyEnv  # type: ignore[attr-defined]

PARAMS = {"x": 0.5, "n": 2, "kind": "a"}


def record(env: StudyEnv, study: str, *trials: StudyTrial, **outcome: Any) -> Any:
    recorder = InternalAsController(env.platform.studies, env.platform)
    return recorder.record(study, trials=trials, outcome=StudyOutcome(**outcome) if outcome else None)


def test_a_study_has_its_settings_and_a_workflow(env: StudyEnv) -> None:
    made = env.create()

    found = env.platform.studies.show("churn")
    assert found == made
    assert (found.state, found.counts, found.best) == (StudyState.RUNNING, {}, ())
    assert env.platform.workflows.show(str(found.work)).workflow == "studies.create"
    assert [each.name for each in env.platform.studies.list().items] == ["churn"]


def test_a_name_is_taken_once(env: StudyEnv) -> None:
    env.create()

    with pytest.raises(AlreadyExists, match="there is a study churn already") as found:
        env.create()

    assert "falaj studies resume churn" in str(found.value.faults[0].fix)


def test_a_script_needs_its_code(light_env: StudyEnv) -> None:
    made = light_env.create()

    with pytest.raises(InvalidInput, match="code"):
        light_env.platform.studies.create(
            "other", settings=made.settings, job=JobSpec(name="x", script="train.py")
        )


def test_trials_are_listed_newest_first_in_pages(env: StudyEnv) -> None:
    study = env.create()
    record(env, study.id, *(StudyTrial(number=number, params=PARAMS) for number in range(5)))

    first = env.platform.studies.trials(study.id, limit=2)
    second = env.platform.studies.trials(study.id, limit=2, after=str(first.next))

    assert [each.number for each in (*first.items, *second.items)] == [4, 3, 2, 1]
    with pytest.raises(InvalidInput):
        env.platform.studies.trials(study.id, state=TrialState.FAILED, after=str(first.next))


def test_a_trial_that_has_ended_is_never_changed(env: StudyEnv) -> None:
    study = env.create()
    trial = StudyTrial(number=0, params=PARAMS)
    record(env, study.id, trial)
    record(env, study.id, trial.model_copy(update={"state": TrialState.COMPLETE, "values": (0.9,)}))

    with pytest.raises(Conflict, match="trial 0 has ended: complete"):
        record(env, study.id, trial.model_copy(update={"state": TrialState.FAILED}))

    (kept,) = env.platform.studies.trials(study.id).items
    assert (kept.state, kept.values) == (TrialState.COMPLETE, (0.9,))


def test_only_the_controller_records(light_env: StudyEnv) -> None:
    study = light_env.create()

    with pytest.raises(Denied, match="internal"):
        light_env.platform.studies.record(study.id, trials=(StudyTrial(number=0, params=PARAMS),))


# ----------------------------------------------------------------------------------------------------- rights


def test_a_viewer_may_look_and_not_search(light_env: StudyEnv) -> None:
    study = light_env.create()
    viewer = light_env.platform.join("vera", Role.VIEWER)

    with acting_as(viewer):
        assert light_env.platform.studies.show(study.id).name == "churn"
        for refused in (
            lambda: light_env.create("other"),
            lambda: light_env.platform.studies.stop(study.id),
            lambda: light_env.platform.studies.resume(study.id),
        ):
            with pytest.raises(Denied):
                refused()


def test_a_stranger_sees_nothing(light_env: StudyEnv) -> None:
    study = light_env.create()
    stranger = light_env.platform.join("stan")

    with acting_as(stranger), pytest.raises(NotFound):
        light_env.platform.studies.show(study.id)
    with acting_as(stranger), pytest.raises(NotFound):
        light_env.platform.studies.trials(study.id)


def test_a_token_must_be_for_what_the_study_does(light_env: StudyEnv) -> None:
    platform = light_env.platform
    secret = platform.tokens.issue(purpose="tune", actions=("studies.*", "blobs.*")).secret

    with acting_as(platform.caller_of(secret)), pytest.raises(Denied, match=r"not for jobs\.submit"):
        light_env.create()


# --------------------------------------------------------------------------------------------- stop and resume


def test_a_running_study_is_not_resumed_and_an_ended_one_not_stopped(light_env: StudyEnv) -> None:
    study = light_env.create()

    with pytest.raises(Conflict, match="study churn is running"):
        light_env.platform.studies.resume(study.id)
    record(light_env, study.id, state=StudyState.STOPPED, reason="stopped by amal")
    with pytest.raises(Conflict, match="study churn has ended already: stopped"):
        light_env.platform.studies.stop(study.id)


def test_another_space_is_another_study(light_env: StudyEnv) -> None:
    study = light_env.create()
    record(light_env, study.id, state=StudyState.STOPPED)
    known = light_env.platform.studies.show(study.id).settings
    other = StudySettings.model_validate(
        known.model_dump() | {"space": {**known.space, "x": {"type": "float", "low": 0.0, "high": 1.0}}}
    )

    with pytest.raises(Conflict, match="another space is another study") as found:
        light_env.platform.studies.resume(study.id, space=other.space)

    assert [(each.where, each.given, each.allowed) for each in found.value.faults] == [
        ("space.x", "0.0 to 1.0", "-2.0 to 2.0")
    ]
    assert light_env.platform.studies.resume(study.id, space=known.space).state is StudyState.RUNNING


def test_a_study_that_had_its_trials_needs_more_to_go_on(light_env: StudyEnv) -> None:
    study = light_env.create(trials=1)
    trial = StudyTrial(number=0, params=PARAMS)
    record(light_env, study.id, trial)
    done = trial.model_copy(update={"state": TrialState.COMPLETE, "values": (0.9,)})
    record(light_env, study.id, done, state=StudyState.DONE, best=(0,))

    with pytest.raises(Conflict, match="has had its 1 trials; falaj studies resume churn --trials 21"):
        light_env.platform.studies.resume(study.id)

    resumed = light_env.platform.studies.resume(study.id, trials=3, parallel=2)
    assert (resumed.settings.trials, resumed.settings.parallel) == (3, 2)
    assert [each.number for each in resumed.best] == [0]


# ----------------------------------------------------------------------------------------------------- report


def test_the_report_is_one_file_without_scripts_and_escapes_names(light_env: StudyEnv) -> None:
    choices = ["<script>alert(1)</script>", "b"]
    space = {
        "kind": {"type": "choice", "choices": choices},
        "x": {"type": "float", "low": 0.1, "high": 1.0, "log": True},
    }
    study = light_env.create(space=space)
    for number in range(3):
        trial = StudyTrial(number=number, params={"kind": choices[number % 2], "x": 0.1 * (number + 1)})
        record(light_env, study.id, trial)
        record(
            light_env,
            study.id,
            trial.model_copy(update={"state": TrialState.COMPLETE, "values": (float(number),)}),
            best=(number,),
        )
    found = light_env.platform.studies.show(study.id)

    data = report_data(found, light_env.trials(study))
    text = render_report(data)

    assert data.best == (2,)
    assert text.count("<polyline") == 3
    assert text.count("<polyline class=best") == 1
    assert "<script" not in text
    assert "http" not in text.replace('xmlns="http://www.w3.org/2000/svg"', "")


def test_the_report_of_a_study_without_results_says_so(light_env: StudyEnv) -> None:
    study = light_env.create()

    text = render_report(report_data(study, []))

    assert "No trial was completed." in text
    assert "Too few trials were completed to tell." in text
