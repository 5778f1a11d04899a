"""Periodic evaluation: the score, the best score so far, and early stopping."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from falaj.training.runtime.data.arrays import is_array
from falaj.training.runtime.data.sources import (
    Data,
    SampleSource,
    is_sampled,
    is_table,
    open_data,
    to_device,
)
from falaj.training.runtime.errors import InvalidTraining, TrainingFault
from falaj.training.runtime.step.modes import preserved_modes
from falaj.training.runtime.step.out_of_memory import is_out_of_memory
from falaj.training.runtime.step.step import Step

Evaluate: TypeAlias = Callable[[nn.Module], float] | Data
"""A function of the model, which is in evaluation mode; or data whose mean loss is the score."""

Better = Literal["lower", "higher"]
EXAMPLE = "evaluate=(inputs, targets), or evaluate=lambda model: error_of(model)"


@dataclass(frozen=True)
class BestScore:
    """The best evaluation so far, and its step."""

    step: int
    score: float


@dataclass
class Evaluation:
    """Scores the model after every `every` steps; `stale` counts the evaluations since the best one."""

    score: Callable[[], float]
    every: int
    better: Better
    patience: int | None
    best: BestScore | None = None
    stale: int = 0

    @property
    def out_of_patience(self) -> bool:
        return self.patience is not None and self.stale >= self.patience

    def evaluate(self, step: int) -> float:
        """Evaluate the model after `step`, and return its score."""
        score = self.score()
        if self._is_best(score):
            self.best, self.stale = BestScore(step, score), 0
        else:
            self.stale += 1
        return score

    def _is_best(self, score: float) -> bool:
        if math.isnan(score):
            return False
        if self.best is None:
            return True
        return score < self.best.score if self.better == "lower" else score > self.best.score


def make_scorer(
    evaluate: Evaluate, step: Step, *, device: torch.device, batch_size: int
) -> Callable[[], float]:
    """Return `evaluate` as a function without arguments that preserves the mode of each module."""
    if callable(evaluate) and not hasattr(evaluate, "__getitem__"):
        function: Callable[[nn.Module], float] = evaluate

        def score() -> float:
            with step.full_model() as model, evaluation_mode(model):
                return require_score(function(model))
    else:
        source = open_data(cast(Data, evaluate), where="evaluate")

        def score() -> float:
            with evaluation_mode(step.model):
                return mean_loss(step, source, device=device, batch_size=batch_size)

    return score


def require_score(given: object) -> float:
    """Return the score that the user's function gave; raise InvalidTraining if it is not a number."""
    try:
        if not isinstance(given, str | bytes):
            return float(given)  # type: ignore[arg-type]  # whatever has __float__
    except (TypeError, ValueError, RuntimeError):  # torch's, of a tensor with several values
        pass
    what = repr(given) if given is None or isinstance(given, str) else f"a {type(given).__name__}"
    fault = TrainingFault(
        "evaluate", f"a function that returns {what}", "a function that returns a number", EXAMPLE
    )
    raise InvalidTraining("the evaluation did not return a score", faults=[fault])


def evaluate_faults(given: object) -> list[TrainingFault]:
    """Return the faults of the option `evaluate` that can be found without opening the data."""
    if given is None or callable(given) or is_table(given) or isinstance(given, Tensor) or is_array(given):
        return []
    if is_sampled(given):
        return []
    if hasattr(given, "read") and hasattr(given, "__len__"):  # opened before
        return []
    return [
        TrainingFault(
            "evaluate", given, "a function of the model that returns a number, or data as for fit", EXAMPLE
        )
    ]


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode without gradients; restore the mode of each module at the end."""
    with preserved_modes(model), torch.no_grad():
        model.eval()
        yield


def mean_loss(step: Step, source: SampleSource, *, device: torch.device, batch_size: int) -> float:
    """Return the mean loss over `source`, each sample with equal weight; use smaller batches if memory runs out."""
    total = torch.zeros((), dtype=torch.float64)
    start = 0
    while start < len(source):
        indices = torch.arange(start, min(start + batch_size, len(source)))
        batch = to_device(source.read(indices, seed=start), device)
        try:
            total += step.measure(batch).double().cpu() * len(indices)
        except (RuntimeError, MemoryError) as failure:
            if batch_size == 1 or dist.is_initialized() or not is_out_of_memory(failure):
                raise  # other processes may wait for this one in a collective
            batch_size = -(-batch_size // 2)
        else:
            start += batch_size
    return total.item() / len(source)
