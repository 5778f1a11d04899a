"""The space of a study and its settings: all faults at once, with the lines of the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from falaj.errors import InvalidInput
from falaj.records.tuning import (
    ChoiceParam,
    FloatParam,
    IntParam,
    Objective,
    StudySettings,
    StudyTrial,
    TrialState,
    arguments_of,
    best_trials,
    default_direction,
)
from falaj.sdk.definition_files.space_toml import parse_space, read_space

GOOD = """
# learning
lr = {low = 1e-5, high = 1e-1, log = true}
layers = {low = 1, high = 4, type = "int"}
optimizer = ["adam", "sgd"]

[dropout]
low = 0
high = 0.5
step = 0.1
"""
BAD = """
lr = {low = 1.0, high = 0.1}
layers = {lo = 1, high = 4}
optimizer = []
"two words" = [1]

depth = 3
width = {low = 0, high = 8, log = true}
kind = {type = "colour", low = 1}
mixed = [1, "1"]
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "space.toml"
    path.write_text(text)
    return path


def test_a_file_gives_ranges_and_choices(tmp_path: Path) -> None:
    assert read_space(write(tmp_path, GOOD)) == {
        "lr": FloatParam(low=1e-5, high=0.1, log=True),
        "layers": IntParam(low=1, high=4),
        "optimizer": ChoiceParam(choices=("adam", "sgd")),
        "dropout": FloatParam(low=0, high=0.5, step=0.1),
    }


def test_all_faults_are_told_with_their_lines(tmp_path: Path) -> None:
    path = write(tmp_path, BAD)

    with pytest.raises(InvalidInput) as found:
        read_space(path)

    places = {fault.where.removeprefix(f"{path}:") for fault in found.value.faults}
    assert places >= {
        "2 lr",
        "3 layers.lo",
        "3 layers.low",
        "4 optimizer.choices",
        "5 two words",
        "7 depth",
        "8 width",
        "9 kind.type",
        "10 mixed",
    }
    by_place = {fault.where.removeprefix(f"{path}:"): fault for fault in found.value.faults}
    assert by_place["3 layers.lo"].fix == "did you mean low?"
    assert by_place["7 depth"].fix == "depth = [3]"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "one at least"),
        ("lr = {", "a TOML file in UTF-8"),
        ("lr = [1]\nLR = [2]", "differ in more than case"),
        ('m = {low = 0.0, high = 1.0, when = {optimizer = "sgd"}}', "a space has no conditions"),
    ],
)
def test_a_file_that_is_no_space_is_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(InvalidInput) as found:
        read_space(write(tmp_path, text))

    assert words in str(found.value)


@pytest.mark.parametrize("bytes_", [b"\xff\xfe", b"a = [" + b"[" * 100_000])
def test_bytes_that_are_no_toml_are_refused(tmp_path: Path, bytes_: bytes) -> None:
    path = tmp_path / "space.toml"
    path.write_bytes(bytes_)

    with pytest.raises(InvalidInput, match="cannot be read"):
        read_space(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"nowhere\.toml"):
        read_space(tmp_path / "nowhere.toml")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 2**70, "1", None, {}, object()])
def test_bounds_are_finite_numbers(value: Any) -> None:
    with pytest.raises(InvalidInput):
        parse_space({"x": {"low": value, "high": 1}})


def settings(**given: Any) -> StudySettings:
    values = {
        "space": {
            "x": {"type": "float", "low": 0.0, "high": 1.0},
            "n": {"type": "int", "low": 1, "high": 10},
        },
        "objectives": [{"metric": "auc", "direction": "maximize"}],
    }
    return StudySettings.model_validate(values | given)


TWO = [{"metric": "auc", "direction": "maximize"}, {"metric": "ms", "direction": "minimize"}]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"space": {}}, "at least 1 item"),
        ({"sampler": "grid"}, "a grid needs a step for x"),
        (
            {"sampler": "grid", "trials": 5, "space": {"n": {"type": "int", "low": 1, "high": 10}}},
            "the grid has 10 points, and the study 5 trials",
        ),
        (
            {"sampler": "grid", "trials": 5, "space": {"n": {"type": "int", "low": 1, "high": 10**15}}},
            "the grid has more than 10000 points",
        ),
        ({"sampler": "cmaes", "space": {"x": {"type": "float", "low": 0.0, "high": 1.0}}}, "cmaes needs two"),
        ({"sampler": "cmaes", "objectives": TWO}, "cmaes searches for one metric"),
        ({"pruning": {"method": "asha"}, "objectives": TWO}, "compares trials by one metric"),
        ({"register_as": "churn", "objectives": TWO}, "no single best trial"),
        ({"objectives": [TWO[0], TWO[0]]}, "each metric is named once"),
        ({"trials": 0}, "greater than or equal to 1"),
        ({"trials": 10_001}, "less than or equal to 10000"),
        ({"parallel": 0}, "greater than or equal to 1"),
        ({"sampler": "magic"}, "'tpe', 'cmaes'"),
    ],
)
def test_settings_that_cannot_work_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError) as found:
        settings(**given)

    assert words in str(found.value)


def test_a_grid_has_no_more_trials_than_points() -> None:
    space = {"n": {"type": "int", "low": 1, "high": 10, "step": 3}}

    assert settings(sampler="grid", trials=100, space=space).planned == 4


def test_parameters_become_arguments_of_one_word_each() -> None:
    given = {"lr": -1e-05, "layers": 3, "bias": True, "kind": "two words"}

    assert arguments_of(given) == ("--lr=-1e-05", "--layers=3", "--bias=true", "--kind=two words")


@pytest.mark.parametrize(
    ("metric", "direction"),
    [("auc", "maximize"), ("val_loss", "minimize"), ("rmse", "minimize"), ("test/error", "minimize"),
     ("glossary", "maximize"), ("accuracy", "maximize")],
)  # fmt: skip
def test_losses_and_errors_are_minimized(metric: str, direction: str) -> None:
    assert default_direction(metric) == direction


def trial(number: int, *values: float, state: TrialState = TrialState.COMPLETE) -> StudyTrial:
    return StudyTrial(number=number, state=state, params={}, values=values)


def test_the_best_is_the_earliest_of_equals_among_the_complete() -> None:
    one = [Objective(metric="auc", direction="maximize")]
    found = [trial(0, 0.5), trial(1, 0.9), trial(2, 0.9), trial(3, state=TrialState.FAILED)]

    assert [each.number for each in best_trials(found, one)] == [1]


def test_with_several_objectives_the_best_are_the_pareto_front() -> None:
    two = [Objective(metric="auc", direction="maximize"), Objective(metric="ms", direction="minimize")]
    found = [trial(0, 0.9, 10.0), trial(1, 0.8, 5.0), trial(2, 0.7, 6.0), trial(3, 0.9, 11.0)]

    assert [each.number for each in best_trials(found, two)] == [0, 1]
