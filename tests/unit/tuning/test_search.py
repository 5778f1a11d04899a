"""The search of a study: trials are jobs, each once, whatever happens to the controller."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from falaj.control.tuning import search as search_module
from falaj.control.tuning.search import StudySearch
from falaj.records.training.jobs import JobState
from falaj.records.tuning import StudyOutcome, StudyState, StudyTrial, TrialState

if TYPE_CHECKING:
    from conftest import StudyEnv, quality  # type: ignore[attr-defined]
else:

    def quality(trial: StudyTrial) -> dict[str, float]:
        params = trial.params
        return {"auc": -((float(params["x"]) - 1) ** 2) - abs(int(params["n"]) - 2) - (params["kind"] == "b")}


class Killed(BaseException):
    """The controller is gone."""


def test_every_trial_is_a_job_with_its_parameters_as_arguments(env: StudyEnv) -> None:
    study = env.create()

    outcome = env.drive(study, quality)

    found = env.trials(study)
    assert outcome.state is StudyState.DONE
    assert [each.number for each in found] == env.ran == [0, 1, 2, 3, 4, 5]
    assert {each.state for each in found} == {TrialState.COMPLETE}
    best = max(found, key=lambda each: each.values)
    assert outcome.best == (best.number,) == (env.platform.studies.show(study.id).best[0].number,)
    job = env.harness.jobs.show(str(found[0].job))
    assert job.spec.args == tuple(f"--{name}={value}" for name, value in found[0].params.items())
    assert (job.name, job.spec.experiment) == ("churn-0", "churn")
    run = env.platform.runs.show(str(found[0].run))
    assert {each.key: each.value for each in run.params}.items() >= {
        name: str(value) for name, value in found[0].params.items()
    }.items()
    tags = {each.key: each.value for each in run.tags}
    assert (tags["falaj.study"], tags["falaj.trial"]) == ("churn", "0")
    assert sum(each.importance for each in outcome.importance) == pytest.approx(1)


def test_no_more_trials_than_allowed_run_at_a_time(light_env: StudyEnv) -> None:
    env = light_env
    study = env.create(parallel=3)
    search = env.search(study)

    for _ in range(3):
        search.poll()

    assert [each.number for each in env.trials(study)] == [0, 1, 2]
    assert [each.state for each in env.platform.jobs.list().items] == [JobState.QUEUED] * 3
    assert env.steps.said[-1] == "0 trials run, 3 wait in the queue"


def test_the_same_seed_tries_the_same_values(light_env: StudyEnv) -> None:
    params = []
    for name in ("one", "two"):
        study = light_env.create(name, parallel=1)
        light_env.drive(study, quality)
        params.append([each.params for each in light_env.trials(study)])

    assert params[0] == params[1]


# ------------------------------------------------------------------------------------------------------ kills


def killed_at(call: int, method: Callable[..., Any], *, after: bool) -> Callable[..., Any]:
    """Return `method`, which kills the controller before or after its call of this number."""
    count = 0

    def perform(*given: Any, **more: Any) -> Any:
        nonlocal count
        count += 1
        if count == call and not after:
            raise Killed
        found = method(*given, **more)
        if count == call:
            raise Killed
        return found

    return perform


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("step", ["record", "submit"])
def test_after_a_kill_at_any_step_no_trial_is_repeated(
    light_env: StudyEnv, monkeypatch: pytest.MonkeyPatch, step: str, after: bool
) -> None:
    env = light_env
    undisturbed = env.create("undisturbed", trials=8, parallel=2)
    env.drive(undisturbed, quality)
    expected = [each.params for each in env.trials(undisturbed)]
    study = env.create(trials=8, parallel=2)
    env.ran.clear()
    owner = env.harness.services.studies if step == "record" else env.harness.services.jobs
    kills = 0

    for call in (1, 2, 3, 5):
        with monkeypatch.context() as patch:
            patch.setattr(owner, step, killed_at(call, getattr(owner, step), after=after), raising=False)
            search = env.search(study)
            with search_ends(search):
                try:
                    for _ in range(6):
                        search.poll()
                        env.run_jobs(study, quality)
                except Killed:
                    kills += 1
    outcome = env.drive(study, quality)

    found = env.trials(study)
    assert kills >= 3
    assert outcome.state is StudyState.DONE
    assert sorted(env.ran) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert len({each.job for each in found}) == 8
    assert (
        len([each for each in env.platform.jobs.list(limit=1000).items if each.spec.experiment == "churn"])
        == 8
    )
    assert [each.params for each in found[:2]] == expected[:2]


class search_ends:  # noqa: N801 - a context manager
    """Close a search, as the end of its process does."""

    def __init__(self, search: StudySearch) -> None:
        self._search = search

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None:
        self._search.close()


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["tpe", "cmaes"])
def test_a_resumed_search_asks_for_what_it_would_have_asked_for(light_env: StudyEnv, sampler: str) -> None:
    env = light_env
    studies = [env.create(name, trials=14, parallel=1, sampler=sampler) for name in ("whole", "cut")]
    env.drive(studies[0], quality)

    while not _ended(env, studies[1]):  # a new search, and a new process of Optuna, every few steps
        search = env.search(studies[1])
        with search_ends(search):
            for _ in range(4):
                search.poll()
                env.run_jobs(studies[1], quality)

    whole, cut = ([each.params for each in env.trials(study)] for study in studies)
    assert whole == cut


def _ended(env: StudyEnv, study: Any) -> bool:
    return sum(each.state.ended for each in env.trials(study)) == 14


def test_a_lost_sampler_is_started_again(light_env: StudyEnv) -> None:
    study = light_env.create(parallel=1)
    search = light_env.search(study)
    search.poll()
    light_env.run_jobs(study, quality)
    sampler = search._sampler
    assert sampler is not None
    sampler._process.kill()
    sampler._process.wait()

    search.poll()  # fails, and forgets it
    outcome = light_env.drive(study, quality)

    assert outcome.state is StudyState.DONE
    assert sorted(light_env.ran) == [0, 1, 2, 3, 4, 5]


# --------------------------------------------------------------------------------------------------- failures


def test_a_trial_that_reports_nan_has_failed(env: StudyEnv) -> None:
    study = env.create(trials=3, parallel=1)

    outcome = env.drive(study, lambda trial: {"auc": math.nan} if trial.number == 0 else quality(trial))

    first = env.trials(study)[0]
    assert (outcome.state, first.state, first.values) == (StudyState.DONE, TrialState.FAILED, ())
    assert first.reason == "its last 'auc', of step 1, is NaN"


def test_a_trial_without_the_metric_names_those_that_it_has(light_env: StudyEnv) -> None:
    study = light_env.create(trials=2, max_failures=2)

    outcome = light_env.drive(study, lambda trial: {"loss": 1.0, "acc": 0.5})

    assert outcome.state is StudyState.FAILED
    assert outcome.reason == (
        "2 trials in a row failed, the last with: it reported no metric 'auc'; it reported acc, loss"
    )


def test_failures_in_a_row_stop_the_study_and_others_do_not(light_env: StudyEnv) -> None:
    flaky = light_env.create("flaky", trials=8, parallel=1, max_failures=2)
    broken = light_env.create("broken", trials=8, parallel=1, max_failures=2)

    first = light_env.drive(flaky, lambda trial: "ValueError: no" if trial.number % 2 else quality(trial))
    second = light_env.drive(broken, lambda trial: "ValueError: no")

    assert (first.state, len(light_env.trials(flaky))) == (StudyState.DONE, 8)
    assert (second.state, len(light_env.trials(broken))) == (StudyState.FAILED, 2)
    assert "2 trials in a row failed, the last with: ValueError: no" in str(second.reason)


def test_a_study_without_a_complete_trial_has_failed(light_env: StudyEnv) -> None:
    study = light_env.create(trials=2, parallel=2)

    outcome = light_env.drive(study, lambda trial: "MemoryError")

    assert (outcome.state, outcome.reason) == (StudyState.FAILED, "none of its 2 trials was completed")


def test_a_trial_whose_job_a_person_cancels_is_made_up_for(light_env: StudyEnv) -> None:
    env = light_env
    study = env.create(trials=3, parallel=1)
    search = env.search(study)
    search.poll()
    env.harness.jobs.cancel(str(env.trials(study)[0].job))
    search.poll()
    search.close()

    outcome = env.drive(study, quality)

    states = [each.state for each in env.trials(study)]
    assert states == [TrialState.CANCELLED, *[TrialState.COMPLETE] * 3]
    assert outcome.state is StudyState.DONE


def test_a_preempted_trial_waits_again_goes_on_and_counts_once(env: StudyEnv) -> None:
    """Its job resumes from its checkpoint, like every job; tests/scenarios/test_preemption.py shows that."""
    study = env.create(trials=2, parallel=1, max_failures=1)
    search = env.search(study)
    search.poll()
    (trial,) = env.trials(study)
    env.begin(trial)
    search.poll()
    states = [env.trials(study)[0].state]

    env.preempt(trial)
    search.poll()
    states.append(env.trials(study)[0].state)
    again = env.search(study)  # of the next controller: the first one was killed meanwhile
    again.poll()
    env.begin(trial, attempt=2)
    again.poll()
    states.append(env.trials(study)[0].state)
    env.end(trial, quality(trial), attempt=2)
    outcome = env.drive(study, quality)

    assert states == [TrialState.RUNNING, TrialState.QUEUED, TrialState.RUNNING]
    assert outcome.state is StudyState.DONE
    assert [(each.number, each.state) for each in env.trials(study)] == [
        (0, TrialState.COMPLETE),
        (1, TrialState.COMPLETE),
    ]
    jobs = [each for each in env.platform.jobs.list().items if each.spec.experiment == "churn"]
    assert sorted((each.attempt, each.preemptions) for each in jobs) == [(1, 0), (2, 1)]


def test_a_full_workspace_makes_trials_wait(light_env: StudyEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    env = light_env
    monkeypatch.setattr(env.harness.jobs, "_unfinished_limit", 1)
    study = env.create(trials=2, parallel=2)
    search = env.search(study)

    search.poll()

    assert [each.job is None for each in env.trials(study)] == [False, True]
    assert any("the most that it may have" in each for each in env.steps.said)
    monkeypatch.setattr(search_module, "LONGEST_PAUSE_S", 0.0)
    search._submit_at = 0.0
    env.run_jobs(study, quality)
    search.close()
    assert env.drive(study, quality).state is StudyState.DONE


# ---------------------------------------------------------------------------------------------- stop and prune


def test_a_stopped_study_cancels_its_jobs_and_can_be_resumed(env: StudyEnv) -> None:
    study = env.create(trials=4, parallel=2)
    search = env.search(study)
    search.poll()
    first = env.trials(study)[0]
    env.begin(first)
    env.end(first, quality(first))
    search.poll()
    env.begin(env.trials(study)[1])

    env.platform.studies.stop(study.id)
    search.poll()
    running = env.harness.jobs.show(str(env.trials(study)[1].job))
    env.finish_cancelled(study)
    ended = None
    while ended is None:
        ended = search.poll()
    search.close()
    stopped = env.record(study, StudyOutcome.model_validate(ended))

    assert running.cancelling
    assert (stopped.state, stopped.reason) == (StudyState.STOPPED, "stopped by " + _owner(env))
    assert [each.state for each in env.trials(study)] == [
        TrialState.COMPLETE,
        TrialState.CANCELLED,
        TrialState.CANCELLED,
    ]
    resumed = env.platform.studies.resume(study.id)
    assert (resumed.state, resumed.stopping) == (StudyState.RUNNING, None)
    assert env.drive(study, quality).state is StudyState.DONE
    assert env.ran == [0, 1, 3, 4, 5]
    assert env.trials(study)[0].values == tuple(quality(first).values())


def _owner(env: StudyEnv) -> str:
    return str(env.platform.studies.list().items[0].owner)


@pytest.mark.parametrize("method", ["asha", "median"])
def test_a_trial_that_looks_worse_is_pruned_not_failed(env: StudyEnv, method: str) -> None:
    pruning = {"method": method, "startup_trials": 3, "reduction": 2}
    study = env.create(trials=5, parallel=1, pruning=pruning)
    search = env.search(study)
    for number in range(4):
        search.poll()
        trial = env.trials(study)[number]
        env.begin(trial)
        env.end(trial, [0.5, 0.6, 0.7 + number / 100])
    search.poll()
    worst = env.trials(study)[4]
    env.begin(worst)
    env.log(worst, [0.1])

    search.poll()

    doomed = env.trials(study)[4]
    job = env.harness.jobs.show(str(worst.job))
    assert (doomed.state, doomed.pruning, job.cancelling) == (TrialState.RUNNING, True, True)
    env.finish_cancelled(study)
    outcome = StudyOutcome.model_validate(search.poll())
    pruned = env.trials(study)[4]
    assert (outcome.state, pruned.state, pruned.values) == (StudyState.DONE, TrialState.PRUNED, ())
    assert pruned.reason == f"pruned by {method} after 1 reports: auc 0.1 at step 10"
    assert [each.value for each in pruned.reports] == [0.1]
    ended = env.harness.jobs.show(str(worst.job))
    assert (ended.state, ended.reason) == (JobState.CANCELLED, f"cancelled: {pruned.reason}")
    tags = {each.key: each.value for each in env.platform.runs.show(str(worst.run)).tags}
    assert tags["falaj.trial.state"] == "pruned"


def test_a_killed_controller_still_knows_that_a_trial_was_pruned(light_env: StudyEnv) -> None:
    env = light_env
    study = env.create(trials=4, parallel=1, pruning={"method": "median", "startup_trials": 2})
    search = env.search(study)
    for number in range(3):
        search.poll()
        trial = env.trials(study)[number]
        env.begin(trial)
        env.end(trial, [0.5, 0.7])
    search.poll()
    worst = env.trials(study)[3]
    env.begin(worst)
    env.log(worst, [0.1])
    search.poll()
    search.close()

    env.finish_cancelled(study)
    outcome = env.drive(study, quality)

    assert [each.state for each in env.trials(study)][-1] is TrialState.PRUNED
    assert outcome.state is StudyState.DONE


def test_what_a_trial_had_survived_does_not_prune_it_after_a_restart(light_env: StudyEnv) -> None:
    env = light_env
    study = env.create(trials=8, parallel=2, pruning={"method": "median", "startup_trials": 1})
    search = env.search(study)
    search.poll()
    slow = env.trials(study)[0]
    env.begin(slow)
    env.log(slow, [0.5])
    search.poll()
    for number in range(1, 6):  # better ones overtake it
        trial = env.trials(study)[number]
        env.begin(trial)
        env.end(trial, [0.6, 0.9])
        search.poll()
    search.close()

    again = env.search(study)
    again.poll()

    assert not env.trials(study)[0].pruning
    env.log(slow, [0.55], after=1)
    again._report_times.clear()
    again.poll()
    assert env.trials(study)[0].pruning


@pytest.mark.parametrize("attempts", [1, 2], ids=["new", "preempted"])
def test_a_trial_that_waits_at_a_restart_is_judged_by_reports_that_it_did_not_go_on_with(
    light_env: StudyEnv, attempts: int
) -> None:
    env = light_env
    study = env.create(trials=8, parallel=2, pruning={"method": "median", "startup_trials": 1})
    search = env.search(study)
    search.poll()
    slow = env.trials(study)[0]
    if attempts == 2:
        env.begin(slow)
        env.log(slow, [0.5])
        search.poll()
    for number in range(1, 6):  # better ones overtake it
        trial = env.trials(study)[number]
        env.begin(trial)
        env.end(trial, [0.6, 0.9])
        search.poll()
    if attempts == 2:
        env.preempt(slow)
        search.poll()
    search.close()

    again = env.search(study)
    again.poll()
    env.begin(slow, attempt=attempts)
    if attempts == 1:
        env.log(slow, [0.5])
    again.poll()

    assert env.trials(study)[0].pruning is (attempts == 1)
    env.log(slow, [0.55], after=1)
    again._report_times.clear()
    again.poll()
    assert env.trials(study)[0].pruning


def test_a_refused_job_ends_the_study_with_the_reason(
    light_env: StudyEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = light_env.create()
    search = light_env.search(study)

    def refuse(*given: Any, **more: Any) -> Any:
        from falaj.errors import Denied

        raise Denied("you may not")

    with monkeypatch.context() as patch:
        patch.setattr(light_env.harness.services.jobs, "submit", refuse, raising=False)
        with pytest.raises(Exception, match="you may not"):
            search.poll()
    search.abandon("you may not")

    ended = light_env.platform.studies.show(study.id)
    assert (ended.state, ended.reason) == (StudyState.FAILED, "you may not")
    assert {each.state for each in light_env.trials(study)} == {TrialState.CANCELLED}
