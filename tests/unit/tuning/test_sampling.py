"""Optuna as it is used: a study that is built again from its trials goes on exactly as it would have."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from falaj.records.tuning import StudySettings, StudyTrial, TrialState
from falaj.tuning.runtime.__main__ import perform
from falaj.tuning.runtime.sampling import SampledStudy, derive_seed
from falaj.tuning.sampler_process import SamplerProcess

SPACE = {
    "x": {"type": "float", "low": -5.0, "high": 5.0},
    "y": {"type": "float", "low": 1e-4, "high": 1.0, "log": True},
    "n": {"type": "int", "low": 1, "high": 4},
    "kind": {"type": "choice", "choices": ["a", "b", True]},
}
ONE = [{"metric": "loss", "direction": "minimize"}]
TWO = [*ONE, {"metric": "size", "direction": "minimize"}]


def settings(**given: Any) -> dict[str, Any]:
    made = StudySettings.model_validate({"space": SPACE, "objectives": ONE, "trials": 1000, **given})
    return made.model_dump(mode="json")


def cost(params: dict[str, Any]) -> list[float]:
    return [(params["x"] - 1) ** 2 + (params["kind"] == "a") + params["n"]]


def history(
    given: dict[str, Any], *, restart_at: frozenset[int] = frozenset(), trials: int = 40
) -> list[Any]:
    """Return the parameters of trials of which three run at a time; before some the study is built again."""
    study, events, running, asked = (
        SampledStudy(given, seed=3, grid=None),
        list[Any](),
        list[Any](),
        list[Any](),
    )
    while len(asked) < trials:
        if len(asked) in restart_at:
            study = SampledStudy(given, seed=3, grid=None)
            for event in events:
                perform(study, event)
        while len(running) < 3:
            number, params = study.ask()
            events.append({"do": "replay", "number": number, "params": params})
            running.append((number, params))
            asked.append(params)
        number, params = running.pop(0)
        state = "failed" if number % 7 == 3 else "complete"
        values = cost(params) * len(given["objectives"])
        study.tell(number, state, values)
        events.append({"do": "tell", "number": number, "state": state, "values": values})
    return asked


@pytest.mark.parametrize("sampler", ["tpe", "cmaes", "random", "nsga2"])
def test_a_study_that_is_built_again_asks_for_the_same(sampler: str) -> None:
    given = settings(sampler=sampler)

    assert history(given, restart_at=frozenset({4, 11, 30})) == history(given)


@pytest.mark.parametrize("sampler", ["tpe", "nsga2"])
def test_with_several_objectives_too(sampler: str) -> None:
    given = settings(sampler=sampler, objectives=TWO)

    assert history(given, restart_at=frozenset({4, 25})) == history(given)


def test_a_sampler_that_learns_is_better_than_chance() -> None:
    found = {
        name: sum(
            min(cost(params)[0] for params in history(settings(sampler=name), trials=60)) for _ in range(1)
        )
        for name in ("tpe", "random")
    }

    assert found["tpe"] < found["random"]


def test_a_grid_visits_every_point_once_in_any_order_of_ends() -> None:
    space = {
        "n": SPACE["n"],
        "kind": SPACE["kind"],
        "x": {"type": "float", "low": 0.0, "high": 1.0, "step": 0.5},
    }
    made = StudySettings.model_validate({"space": space, "objectives": ONE, "sampler": "grid", "trials": 50})
    grid = {name: each.grid() for name, each in made.space.items()}
    study = SampledStudy(made.model_dump(mode="json"), seed=1, grid=grid)  # type: ignore[arg-type]

    asked = []
    for number in range(made.planned):
        asked.append(study.ask()[1])
        if number % 2:
            study.tell(number, "complete", [1.0])
    for number in range(0, made.planned, 2):
        study.tell(number, "complete", [1.0])

    assert made.planned == 36
    assert len({str(sorted(each.items(), key=str)) for each in asked}) == 36


def test_a_restarted_grid_goes_on_where_it_was() -> None:
    made = StudySettings.model_validate(
        {
            "space": {"n": SPACE["n"], "kind": SPACE["kind"]},
            "objectives": ONE,
            "sampler": "grid",
            "trials": 12,
        }
    )
    grid = {name: each.grid() for name, each in made.space.items()}
    first = SampledStudy(made.model_dump(mode="json"), seed=1, grid=grid)  # type: ignore[arg-type]
    asked = [first.ask() for _ in range(5)]
    again = SampledStudy(made.model_dump(mode="json"), seed=1, grid=grid)  # type: ignore[arg-type]
    for number, params in asked:
        again.replay(number, params)

    rest = [again.ask()[1] for _ in range(7)]

    assert len({str(each) for each in [*(params for _, params in asked), *rest]}) == 12


def test_asha_stops_the_worse_ones_at_the_rungs() -> None:
    study = SampledStudy(settings(pruning={"method": "asha", "reduction": 2}), seed=1, grid=None)
    stopped = []
    for loss in (0.1, 0.2, 0.9, 0.8):
        number, _ = study.ask()
        stopped.append(study.report(number, [loss, loss, loss]))

    assert stopped[0] == [False, False, False]
    assert any(stopped[2])
    assert any(stopped[3])


def test_importance_finds_the_parameter_that_matters() -> None:
    study = SampledStudy(settings(sampler="random"), seed=2, grid=None)
    for _ in range(60):
        number, params = study.ask()
        study.tell(number, "complete", [params["x"] ** 2])

    (found,) = study.importance().values()

    assert max(found, key=lambda name: found[name]) == "x"
    assert sum(found.values()) == pytest.approx(1)


@pytest.mark.parametrize("direction", ["maximize", "minimize"])
def test_importance_for_each_of_several_metrics_is_that_of_a_study_of_the_metric(direction: str) -> None:
    """Optuna asks what makes a target low, also where it is maximized, once there are several."""
    both = [{"metric": "cost", "direction": "minimize"}, {"metric": "auc", "direction": direction}]
    several = SampledStudy(settings(sampler="random", objectives=both), seed=2, grid=None)
    alone = [SampledStudy(settings(sampler="random", objectives=[each]), seed=2, grid=None) for each in both]
    for _ in range(80):
        number, params = several.ask()
        values = [float(params["n"]), max(params["x"], 0.0) ** 4 - 0.01 * params["n"]]
        several.tell(number, "complete", values)
        for study, value in zip(alone, values, strict=True):
            study.replay(number, params)
            study.tell(number, "complete", [value])

    found = several.importance()

    assert found == alone[0].importance() | alone[1].importance()
    assert [max(found[name], key=found[name].__getitem__) for name in ("cost", "auc")] == ["n", "x"]


def test_importance_of_equal_or_few_trials_is_unknown() -> None:
    study = SampledStudy(settings(), seed=2, grid=None)
    for _ in range(6):
        number, _ = study.ask()
        study.tell(number, "complete", [1.0])

    assert study.importance() == {}


def test_the_process_finds_the_same_importance_without_scikit_learn() -> None:
    given = StudySettings.model_validate(settings(sampler="random"))
    here = SampledStudy(given.model_dump(mode="json"), seed=2, grid=None)

    with closing(SamplerProcess(given, seed=2)) as process:
        for _ in range(8):
            number, params = process.ask()
            assert (number, params) == here.ask()
            values = (float(params["x"]) ** 2,)
            here.tell(number, "complete", values)
            process.tell(StudyTrial(number=number, params=params, state=TrialState.COMPLETE, values=values))
        found = {each.param: each.importance for each in process.importance()}
        loaded = Path(f"/proc/{process.pid}/maps").read_text()

    assert found == here.importance()["loss"]
    assert ("numpy" in loaded, "sklearn" in loaded) == (True, False)


def test_seeds_of_trials_differ() -> None:
    assert len({derive_seed(seed, number) for seed in range(20) for number in range(200)}) == 4000
