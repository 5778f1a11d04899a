"""Looks at the model now and then: the best score so far, and when to stop for want of progress."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from falaj.training.runtime.data.sources import Data, SampleSource, is_table, open_data, to_device
from falaj.training.runtime.errors import InvalidTraining, TrainingFault
from falaj.training.runtime.step.modes import preserved_modes
from falaj.training.runtime.step.out_of_memory import is_out_of_memory
from falaj.training.runtime.step.step import Step

Evaluate: TypeAlias = Callable[[nn.Module], float] | Data
"""A function of the model, which is in evaluation mode; or data, whose mean loss is the score."""

Better = Literal["lower", "higher"]
EXAMPLE = "evaluate=(inputs, targets), or evaluate=lambda model: error_of(model)"


@dataclass(frozen=True)
class BestScore:
    """The best evaluation so far, and the step after which it was made."""

    step: int
    score: float


@dataclass
class Evaluation:
    """Scores the model after every `every` steps; `stale` counts those since the best one."""

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
        """The score of the model after `step`."""
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
    """`evaluate` as a function without arguments, which leaves each module in its own mode."""
    if callable(evaluate) and not hasattr(evaluate, "__getitem__"):
        judge: Callable[[nn.Module], float] = evaluate

        def score() -> float:
            with step.full_model() as model, evaluation_mode(model):
                return require_score(judge(model))
    else:
        source = open_data(cast(Data, evaluate), where="evaluate")

        def score() -> float:
            with evaluation_mode(step.model):
                return mean_loss(step, source, device=device, batch_size=batch_size)

    return score


def require_score(given: object) -> float:
    """The score that a function of the caller's has returned; refused if it is no number."""
    try:
        if not isinstance(given, str | bytes):
            return float(given)  # type: ignore[arg-type]  # whatever has __float__
    except (TypeError, ValueError, RuntimeError):  # torch's, of a tensor with several values
        pass
    what = repr(given) if given is None or isinstance(given, str) else f"a {type(given).__name__}"
    fault = TrainingFault("evaluate", f"a function that gives {what}", "one that gives a number", EXAMPLE)
    raise InvalidTraining("an evaluation does not give a score", faults=[fault])


def evaluate_faults(given: object) -> list[TrainingFault]:
    """What is wrong with the option `evaluate`, as far as it can be seen without opening it."""
    has_samples = hasattr(given, "__len__") and hasattr(given, "__getitem__")
    if given is None or callable(given) or is_table(given) or isinstance(given, Tensor) or has_samples:
        return []
    if hasattr(given, "read") and hasattr(given, "__len__"):  # opened before
        return []
    return [
        TrainingFault(
            "evaluate", given, "a function of the model that gives a number, or data as for fit", EXAMPLE
        )
    ]


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """In evaluation mode, without gradients; afterwards each module has its own mode again."""
    with preserved_modes(model), torch.no_grad():
        model.eval()
        yield


def mean_loss(step: Step, source: SampleSource, *, device: torch.device, batch_size: int) -> float:
    """The mean loss over all of `source`, each sample with the same weight; in smaller batches if memory runs out."""
    total = torch.zeros((), dtype=torch.float64)
    start = 0
    while start < len(source):
        indices = torch.arange(start, min(start + batch_size, len(source)))
        batch = to_device(source.read(indices, seed=start), device)
        try:
            total += step.measure(batch).double().cpu() * len(indices)
        except (RuntimeError, MemoryError) as failure:
            if batch_size == 1 or dist.is_initialized() or not is_out_of_memory(failure):
                raise  # other processes may wait for this one in the midst of the model
            batch_size = -(-batch_size // 2)
        else:
            start += batch_size
    return total.item() / len(source)
