"""Looks at the model now and then: the best score so far, and when to stop for want of progress."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast

import torch
from torch import nn

from falaj.training.runtime.data import Data, Source, move, open_data
from falaj.training.runtime.steps import Step

Evaluate: TypeAlias = Callable[[nn.Module], float] | Data
"""A function of the model, which is in evaluation mode; or data, whose mean loss is the score."""

Better = Literal["lower", "higher"]


@dataclass(frozen=True)
class Best:
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
    best: Best | None = None
    stale: int = 0

    @property
    def out_of_patience(self) -> bool:
        return self.patience is not None and self.stale >= self.patience

    def judge(self, step: int) -> float:
        """The score of the model after `step`."""
        score = self.score()
        if self._is_best(score):
            self.best, self.stale = Best(step, score), 0
        else:
            self.stale += 1
        return score

    def _is_best(self, score: float) -> bool:
        if math.isnan(score):
            return False
        if self.best is None:
            return True
        return score < self.best.score if self.better == "lower" else score > self.best.score


def scorer(evaluate: Evaluate, step: Step, *, device: torch.device, batch_size: int) -> Callable[[], float]:
    """`evaluate` as a function without arguments, which leaves the model in training mode."""
    model = step.model
    if callable(evaluate) and not hasattr(evaluate, "__getitem__"):
        measure: Callable[[nn.Module], float] = evaluate
    else:
        source = open_data(cast(Data, evaluate), where="evaluate")

        def measure(_: nn.Module) -> float:
            return mean_loss(step, source, device=device, batch_size=batch_size)

    def score() -> float:
        model.eval()
        try:
            with torch.no_grad():
                return float(measure(model))
        finally:
            model.train()

    return score


def mean_loss(step: Step, source: Source, *, device: torch.device, batch_size: int) -> float:
    """The mean loss over all of `source`, each sample with the same weight."""
    total = torch.zeros((), dtype=torch.float64)
    for start in range(0, len(source), batch_size):
        indices = torch.arange(start, min(start + batch_size, len(source)))
        batch = move(source.read(indices, seed=start), device)
        total += step.measure(batch).double().cpu() * len(indices)
    return total.item() / len(source)
