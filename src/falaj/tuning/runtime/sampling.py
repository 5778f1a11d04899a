"""An Optuna study in memory that follows a stored one: asks for parameters, tells results, and judges reports.

Every trial is sampled by a sampler of its own, whose seed is derived from the seed of the study and the number of the
trial. So a study that is built again from its stored trials goes on as it would have, and no state of a sampler is
stored. See decision 0058.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances
from optuna.pruners import BasePruner, MedianPruner, NopPruner, SuccessiveHalvingPruner
from optuna.samplers import (
    BaseSampler,
    CmaEsSampler,
    GridSampler,
    NSGAIISampler,
    RandomSampler,
    TPESampler,
)
from optuna.study import StudyDirection
from optuna.trial import Trial, TrialState

ENDS = {"complete": TrialState.COMPLETE, "pruned": TrialState.PRUNED, "failed": TrialState.FAIL}
"""Trials that were cancelled are told as failed: Optuna learns nothing from either."""
KEEPING_STATE = ("cmaes", "nsga2")
"""Samplers that mark the trials that they sampled: the marks are made again when the trials are replayed."""
FEWEST_FOR_IMPORTANCE = 4

Values = Mapping[str, Any]


class SampledStudy:
    """A study as Optuna sees it. `settings` is the JSON of StudySettings, `grid` the values of each parameter."""

    def __init__(self, settings: Values, *, seed: int, grid: Mapping[str, Sequence[Any]] | None) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        warnings.filterwarnings("ignore", message="PedAnovaImportanceEvaluator computes the importances")
        self._sampler, self._seed, self._grid = settings["sampler"], seed, grid
        self._distributions = {name: distribution(each) for name, each in settings["space"].items()}
        self._study = optuna.create_study(
            directions=[each["direction"] for each in settings["objectives"]],
            pruner=make_pruner(settings["pruning"]),
            sampler=RandomSampler(seed=0),
        )
        self._metrics = [each["metric"] for each in settings["objectives"]]
        self._trials: dict[int, Trial] = {}

    def ask(self) -> tuple[int, dict[str, Any]]:
        """Return the number and the parameters of the next trial."""
        number = len(self._study.trials)
        self._study.sampler = self._make_sampler(number)
        trial = self._trials[number] = self._study.ask(self._distributions)
        return trial.number, trial.params

    def replay(self, number: int, params: Values) -> None:
        """Take a trial that was asked for before, with the parameters that it got."""
        if number != len(self._study.trials):
            raise ValueError(f"trial {number} comes after {len(self._study.trials)} others")
        keeps = self._sampler in KEEPING_STATE
        self._study.sampler = self._make_sampler(number) if keeps else RandomSampler(seed=0)
        self._study.enqueue_trial(dict(params))
        trial = self._trials[number] = self._study.ask()
        _ = trial.relative_params  # sampled again, only for the marks
        for name, each in self._distributions.items():
            suggest(trial, name, each)

    def report(self, number: int, values: Sequence[float], *, after: int = 0) -> list[bool]:
        """Report values behind the first `after` ones; return of each whether the trial is to be stopped there."""
        trial, verdicts = self._trials[number], []
        for at, value in enumerate(values, after + 1):
            trial.report(value, at)
            verdicts.append(trial.should_prune())
        return verdicts

    def tell(self, number: int, state: str, values: Sequence[float]) -> None:
        """Tell how a trial ended."""
        trial = self._trials.pop(number)
        ended = ENDS.get(state, TrialState.FAIL)
        if self._sampler == "grid":
            self._study.sampler = RandomSampler(
                seed=0
            )  # a grid would stop `optimize` at its end, which is not used
        self._study.tell(trial, list(values) if ended is TrialState.COMPLETE else None, state=ended)

    def importance(self) -> dict[str, dict[str, float]]:
        """Return the importance of each parameter by metric, by PED-ANOVA; metrics of which it cannot be told lack."""
        found = {metric: self._importance_of(place) for place, metric in enumerate(self._metrics)}
        return {metric: shares for metric, shares in found.items() if shares}

    def _importance_of(self, place: int) -> dict[str, float]:
        done = [each for each in self._study.trials if each.state is TrialState.COMPLETE]
        several = {each.values[place] for each in done}
        names = [name for name in self._distributions if len({str(each.params[name]) for each in done}) > 1]
        if len(done) < FEWEST_FOR_IMPORTANCE or len(several) < 2 or not names:
            return {}
        # With several metrics the evaluator asks what makes the target low, whatever the directions are.
        sign = 1 if self._study.directions[place] is StudyDirection.MINIMIZE else -1
        target = None if len(self._metrics) == 1 else lambda trial: sign * trial.values[place]
        evaluator = PedAnovaImportanceEvaluator()
        shares = get_param_importances(self._study, evaluator=evaluator, params=names, target=target)
        return {name: float(shares.get(name, 0.0)) for name in self._distributions}

    def _make_sampler(self, number: int) -> BaseSampler:
        seed = derive_seed(self._seed, number)
        match self._sampler:
            case "grid":
                return GridSampler(
                    self._grid or {}, seed=self._seed
                )  # one order of the points for all trials
            case "random":
                return RandomSampler(seed=seed)
            case "cmaes":
                return CmaEsSampler(seed=seed, warn_independent_sampling=False)
            case "nsga2":
                return NSGAIISampler(seed=seed)
            case _:
                return TPESampler(seed=seed)


def distribution(given: Values) -> BaseDistribution:
    """Return the range of a parameter as Optuna has it."""
    if given["type"] == "choice":
        return CategoricalDistribution(given["choices"])
    if given["type"] == "int":
        return IntDistribution(given["low"], given["high"], log=given["log"], step=given["step"])
    return FloatDistribution(given["low"], given["high"], log=given["log"], step=given["step"])


def suggest(trial: Trial, name: str, given: BaseDistribution) -> None:
    """Let a trial have a parameter."""
    if isinstance(given, CategoricalDistribution):
        trial.suggest_categorical(name, given.choices)
    elif isinstance(given, IntDistribution):
        trial.suggest_int(name, given.low, given.high, log=given.log, step=given.step)
    elif isinstance(given, FloatDistribution):
        trial.suggest_float(name, given.low, given.high, log=given.log, step=given.step)


def make_pruner(given: Values) -> BasePruner:
    """Return the pruner of the settings."""
    if given["method"] == "asha":
        return SuccessiveHalvingPruner(min_resource=given["min_reports"], reduction_factor=given["reduction"])
    if given["method"] == "median":
        warmup = given["min_reports"] - 1
        return MedianPruner(n_startup_trials=given["startup_trials"], n_warmup_steps=warmup)
    return NopPruner()


def derive_seed(seed: int, number: int) -> int:
    """Return the seed of one trial."""
    return int.from_bytes(blake2b(f"{seed}:{number}".encode(), digest_size=4).digest())
