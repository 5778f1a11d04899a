"""Studies: a space of hyperparameters that is searched by trials, each a job, and what came of each trial."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import Field, FiniteFloat, StringConstraints, model_validator

from falaj.records.governance.residency import UNRESTRICTED, Label
from falaj.records.names import Name, ObjectId, Reference, RefersTo, TextRule, repeated_names
from falaj.records.record import Record
from falaj.records.tracking import INT64_MAX, INT64_MIN, Key
from falaj.records.training.jobs import JobSpec

MOST_TRIALS = 10_000
MOST_REPORTS = 1000
"""Of one trial; what it reports beyond them is not judged by the pruner."""

StudyRef = Annotated[Reference, RefersTo("study")]

ParamName = Annotated[
    str,
    TextRule(
        "[A-Za-z_][A-Za-z0-9_.-]*",
        "a parameter is named like the option of the script without '--': A-Z, a-z, 0-9, '_', '-' and '.'",
        limit=100,
    ),
]
WholeNumber = Annotated[int, Field(ge=INT64_MIN, le=INT64_MAX)]
ChoiceText = Annotated[str, StringConstraints(max_length=1000, pattern=r"^[^\x00]*$")]
Choice = bool | WholeNumber | FiniteFloat | ChoiceText
"""A value of a parameter."""


class FloatParam(Record):
    """A number from `low` to `high`; with `log` small ones are tried as often as large ones."""

    type: Literal["float"] = "float"
    low: FiniteFloat
    high: FiniteFloat
    log: bool = False
    step: Annotated[FiniteFloat, Field(gt=0)] | None = None

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        if (fault := _range_fault(self.low, self.high, log=self.log, step=self.step)) is not None:
            raise ValueError(fault)
        return self

    def grid(self) -> tuple[Choice, ...] | None:
        """Return the values of a grid; none if there is no `step`."""
        if self.step is None:
            return (self.low,) if self.low == self.high else None
        count = math.floor((self.high - self.low) / self.step + 1e-8) + 1
        return tuple(self.low + number * self.step for number in range(min(count, MOST_TRIALS + 1)))


class IntParam(Record):
    """A whole number from `low` to `high`."""

    type: Literal["int"] = "int"
    low: WholeNumber
    high: WholeNumber
    log: bool = False
    step: Annotated[int, Field(ge=1, le=INT64_MAX)] = 1

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        step = None if self.step == 1 else self.step
        if (fault := _range_fault(self.low, self.high, log=self.log, step=step)) is not None:
            raise ValueError(fault)
        return self

    def grid(self) -> tuple[Choice, ...] | None:
        """Return the values of a grid."""
        return tuple(range(self.low, self.high + 1, self.step)[: MOST_TRIALS + 1])


class ChoiceParam(Record):
    """One of several values, without an order."""

    type: Literal["choice"] = "choice"
    choices: Annotated[tuple[Choice, ...], Field(min_length=1, max_length=1000)]

    @model_validator(mode="after")
    def _each_once(self) -> Self:
        if len({spell(each) for each in self.choices}) < len(self.choices):
            raise ValueError("choices are values that differ as text: the script gets them as text")
        return self

    def grid(self) -> tuple[Choice, ...] | None:
        """Return the values of a grid."""
        return self.choices


ParamRange = Annotated[FloatParam | IntParam | ChoiceParam, Field(discriminator="type")]
ParamSpace = Annotated[dict[ParamName, ParamRange], Field(min_length=1, max_length=200)]
ParamValues = dict[ParamName, Choice]

Direction = Literal["maximize", "minimize"]
SamplerName = Literal["tpe", "cmaes", "random", "grid", "nsga2"]
PrunerName = Literal["none", "asha", "median"]

SMALLER_IS_BETTER = frozenset(
    [
        "loss",
        "error",
        "err",
        "mse",
        "rmse",
        "mae",
        "mape",
        "rmsle",
        "perplexity",
        "latency",
        "nll",
        "brier",
        "deviance",
    ]
)
"""Words in the names of metrics that are minimized by default."""


class Objective(Record):
    """A metric that trials report, and whether the highest or the lowest is best."""

    metric: Key
    direction: Direction


class Pruning(Record):
    """When trials are stopped that look worse than others.

    The resource is the number of values that a trial has reported. `asha` (asynchronous successive halving) compares
    after `min_reports` of them, after `reduction` times as many, and so on; of those compared, one in `reduction` goes
    on. `median` stops a trial that is worse than the median of the others at the same report, once `startup_trials`
    have ended.
    """

    method: PrunerName = "none"
    min_reports: Annotated[int, Field(ge=1, le=MOST_REPORTS)] = 1
    reduction: Annotated[int, Field(ge=2, le=100)] = 4
    startup_trials: Annotated[int, Field(ge=1, le=MOST_TRIALS)] = 5


class StudySettings(Record):
    """How a study searches. `trials` counts all but those that were cancelled; `parallel` of them run at a time.

    It stops after `max_failures` trials in a row have failed. With `register` the model of the best trial becomes the
    next version of that model. Two studies with the same `seed` try the same values at first.
    """

    space: ParamSpace
    objectives: Annotated[tuple[Objective, ...], Field(min_length=1, max_length=8)]
    trials: Annotated[int, Field(ge=1, le=MOST_TRIALS)] = 20
    parallel: Annotated[int, Field(ge=1, le=1000)] = 1
    sampler: SamplerName = "tpe"
    pruning: Pruning = Pruning()
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] | None = None
    max_failures: Annotated[int, Field(ge=1, le=MOST_TRIALS)] = 5
    register_as: Name | None = None

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        if twice := repeated_names(self.space):
            raise ValueError(f"parameters must differ in more than case: {', '.join(sorted(twice))}")
        metrics = [each.metric for each in self.objectives]
        if len(set(metrics)) < len(metrics):
            raise ValueError(f"each metric is named once: {', '.join(metrics)}")
        return self

    @model_validator(mode="after")
    def _one_objective_where_needed(self) -> Self:
        if len(self.objectives) == 1:
            return self
        if self.pruning.method != "none":
            raise ValueError(
                f"pruning with {self.pruning.method} compares trials by one metric; give one, or no pruner"
            )
        if self.sampler == "cmaes":
            raise ValueError("cmaes searches for one metric; use tpe or nsga2 for several")
        if self.register_as is not None:
            raise ValueError("with several metrics there is no single best trial to register")
        return self

    @model_validator(mode="after")
    def _sampler_fits_the_space(self) -> Self:
        if self.sampler == "cmaes":
            numbers = [each for each in self.space.values() if each.type != "choice" and each.low < each.high]
            if len(numbers) < 2:
                raise ValueError("cmaes needs two parameters at least that are ranges of numbers; use tpe")
        if self.sampler == "grid":
            endless = [name for name, each in self.space.items() if each.grid() is None]
            if endless:
                raise ValueError(f"a grid needs a step for {', '.join(endless)}, or choices")
            if (size := grid_size(self.space)) > self.trials:
                raise ValueError(
                    f"the grid has {f'{size} points' if size <= MOST_TRIALS else f'more than {MOST_TRIALS} points'}, "
                    f"and the study {self.trials} trials; give as many trials, a smaller grid, or the sampler random"
                )
        return self

    @property
    def planned(self) -> int:
        """The trials that the study has in the end: a grid may have fewer points than were asked for."""
        return min(self.trials, grid_size(self.space)) if self.sampler == "grid" else self.trials


class TrialState(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    COMPLETE = "complete"
    PRUNED = "pruned"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        return self not in (TrialState.QUEUED, TrialState.RUNNING)


class TrialReport(Record):
    """A value of the metric that a trial reported before its end; reports are judged by the pruner."""

    step: WholeNumber
    value: FiniteFloat


class StudyTrial(Record):
    """A trial: the values that it tried, and what it reached. `reason` says why it failed or was stopped."""

    number: Annotated[int, Field(ge=0, lt=2 * MOST_TRIALS)]
    state: TrialState = TrialState.QUEUED
    params: ParamValues
    values: tuple[FiniteFloat, ...] = ()
    reports: Annotated[tuple[TrialReport, ...], Field(max_length=MOST_REPORTS)] = ()
    pruning: bool = False
    reason: Annotated[str, StringConstraints(max_length=2000)] | None = None
    job: ObjectId | None = None
    run: ObjectId | None = None
    created_at: datetime | None = None
    ended_at: datetime | None = None


class StudyState(StrEnum):
    RUNNING = "running"
    DONE = "done"
    STOPPED = "stopped"
    FAILED = "failed"

    @property
    def ended(self) -> bool:
        return self is not StudyState.RUNNING


class ParamImportance(Record):
    """The share of a parameter in the differences of a metric between trials; those of all parameters sum to 1."""

    param: str
    importance: float
    metric: str


class StudyOutcome(Record):
    """What the controller records of a study: its best trials, the importance of its parameters, how it ended."""

    best: Annotated[tuple[int, ...], Field(max_length=MOST_TRIALS)] = ()
    importance: Annotated[tuple[ParamImportance, ...], Field(max_length=1600)] = ()
    run: ObjectId | None = None
    state: StudyState = StudyState.RUNNING
    reason: Annotated[str, StringConstraints(max_length=2000)] | None = None
    version: Annotated[str, StringConstraints(max_length=400)] | None = None


class Study(Record):
    """A study and how far it is. `best` is the best trial so far; with several metrics, the Pareto front.

    `run` has its report as artifacts, `work` is the workflow that carries it out, `version` the registered model.
    """

    id: ObjectId
    workspace: ObjectId
    name: str
    state: StudyState
    reason: str | None = None
    stopping: str | None = None
    settings: StudySettings
    job: JobSpec
    counts: dict[TrialState, int] = {}
    best: tuple[StudyTrial, ...] = ()
    importance: tuple[ParamImportance, ...] = ()
    run: ObjectId | None = None
    work: ObjectId | None = None
    version: str | None = None
    owner: str
    label: Label = UNRESTRICTED
    created_at: datetime
    ended_at: datetime | None = None

    def importance_of(self, metric: str) -> tuple[ParamImportance, ...]:
        """Return the importance of the parameters for a metric."""
        return importance_of(self.importance, metric)

    @property
    def finished(self) -> int:
        """The trials that ended and count: complete, pruned or failed."""
        return sum(self.counts.get(each, 0) for each in COUNTED if each.ended)


class ReportedTrial(Record):
    """A trial in the report of a study."""

    number: int
    state: TrialState
    params: ParamValues
    values: tuple[float, ...] = ()
    run: ObjectId | None = None


class StudyReport(Record):
    """A study as data for plots: its trials by number, and the importance of its parameters."""

    study: str
    objectives: tuple[Objective, ...]
    space: ParamSpace
    trials: tuple[ReportedTrial, ...]
    best: tuple[int, ...] = ()
    importance: tuple[ParamImportance, ...] = ()


COUNTED = (TrialState.QUEUED, TrialState.RUNNING, TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAILED)
"""The states of trials that count towards `trials`: one that was cancelled is made up for."""


def importance_of(found: Sequence[ParamImportance], metric: str) -> tuple[ParamImportance, ...]:
    return tuple(each for each in found if each.metric == metric)


def grid_size(space: ParamSpace) -> int:
    """Return the points of a grid, counted up to one more than a study may have."""
    size = 1
    for each in space.values():
        size = min(size * len(each.grid() or ()), MOST_TRIALS + 1)
    return size


def default_direction(metric: str) -> Direction:
    """Return the direction of a metric by its name: losses and errors are minimized, all others maximized."""
    words = metric.lower().replace("/", "_").replace(".", "_").replace("-", "_").replace(" ", "_").split("_")
    return "minimize" if SMALLER_IS_BETTER & {*words} else "maximize"


def arguments_of(params: ParamValues) -> tuple[str, ...]:
    """Return the options that a script gets, like --lr=0.01: one word each, so that negative numbers are values."""
    return tuple(f"--{name}={spell(value)}" for name, value in params.items())


def spell(value: Choice) -> str:
    """Return a value as the script gets it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def best_trials(trials: Sequence[StudyTrial], objectives: Sequence[Objective]) -> list[StudyTrial]:
    """Return the best complete trial, the earliest of equals; with several objectives the Pareto front by number."""
    complete = [each for each in trials if each.state is TrialState.COMPLETE and each.values]
    costs = {each.number: _costs(each, objectives) for each in complete}
    if len(objectives) == 1:
        return sorted(complete, key=lambda each: (costs[each.number], each.number))[:1]
    return [
        each
        for each in complete
        if not any(_dominates(other, costs[each.number]) for other in costs.values())
    ]


def _costs(trial: StudyTrial, objectives: Sequence[Objective]) -> tuple[float, ...]:
    signs = (1.0 if each.direction == "minimize" else -1.0 for each in objectives)
    return tuple(sign * value for sign, value in zip(signs, trial.values, strict=True))


def _dominates(left: tuple[float, ...], right: tuple[float, ...]) -> bool:
    return left != right and all(a <= b for a, b in zip(left, right, strict=True))


def _range_fault(low: float, high: float, *, log: bool, step: float | None) -> str | None:
    if low > high:
        return f"low must be at most high: {low} > {high}"
    if log and low <= 0:
        return f"low must be above 0 with log: {low}"
    if log and step is not None:
        return "a range has either log or step"
    return None
