"""The options of `fit` are declared once; its signature, the records of a run and the reference derive from there."""

from __future__ import annotations

import inspect
from dataclasses import fields
from datetime import timedelta
from typing import Any

import pytest

from falaj.training.runtime.custom_loop import step
from falaj.training.runtime.errors import InvalidTraining
from falaj.training.runtime.fit import FitKeywords, fit
from falaj.training.runtime.memory.estimate import estimate
from falaj.training.runtime.options import (
    GROUPS,
    OPTIONS,
    FitOptions,
    agreed_options,
    fit_options,
    recorded_options,
)


def test_the_signature_of_fit_has_every_option_and_its_default() -> None:
    shown = list(inspect.signature(fit).parameters.values())[3:]

    assert [each.name for each in shown] == list(OPTIONS)
    assert {each.name: each.default for each in shown} == {
        name: each.default for name, each in OPTIONS.items()
    }


def test_the_typed_keywords_of_fit_equal_the_dataclasses() -> None:
    typed = {name: kind.__forward_arg__ for name, kind in FitKeywords.__annotations__.items()}

    assert typed == {name: each.type for name, each in OPTIONS.items()}


@pytest.mark.parametrize("function", [step, estimate])
def test_other_functions_have_the_same_defaults(function: Any) -> None:
    # `step` has no end and no seed; `estimate` has no search, and the batch size of a DataLoader
    different = {"steps", "seed", "precision"} | ({"batch_size"} if function is estimate else set())
    shared = inspect.signature(function).parameters.keys() & OPTIONS.keys() - different

    assert shared
    for name in shared:
        assert inspect.signature(function).parameters[name].default == OPTIONS[name].default


def test_an_option_has_one_name() -> None:
    assert sum(len(fields(group)) for group in GROUPS.values()) == len(OPTIONS)


def test_keywords_land_in_their_groups() -> None:
    options = FitOptions.from_keywords(epochs=2, lr=0.5, checkpoint_keep=7)

    assert (options.batching.epochs, options.optimization.lr) == (2, 0.5)
    assert options.checkpointing.checkpoint_keep == 7
    assert options.values()["batch_size"] == 32
    assert list(options.values()) == list(OPTIONS)


def test_an_unknown_option_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(InvalidTraining, match="fit has no such option") as refusal:
        FitOptions.from_keywords(epoch=2)

    (fault,) = refusal.value.faults
    assert (fault.where, fault.fix) == ("epoch", "epochs, if that is meant")


def test_a_run_records_what_was_chosen() -> None:
    options = FitOptions.from_keywords(steps=3, exact=True, checkpoint_every=timedelta(minutes=2))

    recorded = dict(recorded_options(options))

    assert (recorded["steps"], recorded["exact"], recorded["lr"], recorded["warmup"]) == (3, True, 1e-3, 0)
    assert recorded.keys().isdisjoint({"epochs", "drop_last", "clip", "device", "workers"})


def test_processes_agree_on_options_that_change_the_result() -> None:
    agreed = agreed_options(FitOptions.from_keywords(steps=3))

    assert {"seed", "batch_size", "optimizer", "parallel", "evaluate", "checkpoint_every"} <= agreed.keys()
    assert agreed.keys().isdisjoint({"device", "workers", "run", "tune", "memory"})


def test_the_reference_describes_each_option() -> None:
    rows = {row.name: row for row in fit_options()}

    assert rows.keys() == OPTIONS.keys()
    assert all(row.doc.endswith(".") and row.doc[0].isupper() for row in rows.values())
    assert rows["lr"][1:3] == ("float", "0.001")
    assert rows["checkpoint_every"].default == "timedelta(seconds=60)"
