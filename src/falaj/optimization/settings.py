"""Settings of an optimization job, passed by the workflow as command line arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field, ValidationError

from falaj.errors import Fault, InvalidInput
from falaj.records.features import Column
from falaj.records.optimization import AcceptanceBudget, FeatureColumns, Recipe
from falaj.records.record import Record

DEFAULT_RECIPES: tuple[Recipe, ...] = ("onnx", "int8", "int8-static", "fp16", "bf16")
"""Those that take seconds; pruning and distillation train."""


class OptimizationSettings(Record):
    """The first argument is JSON with all settings but the features; each further argument is a feature.

    With `held_out` quality is measured on another set, and recipes learn from all of the data. `no_student` is the
    reason why there is no student to measure.
    """

    target: Column
    features: FeatureColumns = ()
    recipes: tuple[Recipe, ...] = DEFAULT_RECIPES
    budget: AcceptanceBudget = AcceptanceBudget()
    training_s: Annotated[float, Field(gt=0, le=3600)] = 60.0
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = 0
    held_out: bool = False
    no_student: Annotated[str, Field(max_length=1000)] = ""

    def arguments(self) -> tuple[str, ...]:
        return (self.model_dump_json(exclude={"features"}), *self.features)


def parse_settings(arguments: Sequence[str]) -> OptimizationSettings:
    """Parse the output of `OptimizationSettings.arguments`."""
    try:
        first = OptimizationSettings.model_validate_json(arguments[0] if arguments else "{}")
        return OptimizationSettings.model_validate({**first.model_dump(), "features": tuple(arguments[1:])})
    except ValidationError as error:
        faults = [
            Fault(where=".".join(map(str, fault["loc"])) or "settings", allowed=fault["msg"])
            for fault in error.errors()
        ]
        raise InvalidInput(
            "usage: python -m falaj.optimization.runtime '{\"target\": …}' FEATURE…", faults=faults
        ) from None
