"""Train a torch model to predict as the original does, and the target, within a time limit."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from falaj.optimization.runtime.conversion.converted import Array
from falaj.optimization.runtime.quality import CLIP, QualityEvaluator
from falaj.optimization.runtime.recipes.training_rows import TrainingRows

BATCH = 64
SOFT = 0.5
"""Share of the loss that is the difference from the original; the rest is that from the target."""


def fine_tune(
    model: nn.Module,
    rows: TrainingRows,
    *,
    seconds: float,
    epochs: int,
    rate: float,
    seed: int,
    after_step: Callable[[], None] = lambda: None,
) -> None:
    """Train for `epochs` at most, and no longer than `seconds`; the learning rate falls to zero by then."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    inputs = torch.from_numpy(rows.trained.features)
    target = torch.from_numpy(rows.trained.target).float()
    teacher = torch.from_numpy(rows.teacher).float()
    objective = distillation_loss(rows.evaluator, rows.trained.target)
    weights = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.Adam(weights, lr=rate)
    steps, began, number = epochs * math.ceil(len(inputs) / BATCH), time.monotonic(), 0
    for _ in range(epochs):
        order = torch.randperm(len(inputs))
        for start in range(0, len(inputs), BATCH):
            part = order[start : start + BATCH]
            left = 1 - max(number / steps, (time.monotonic() - began) / seconds)
            if left <= 0:
                return
            for group in optimizer.param_groups:
                group["lr"] = rate * left
            optimizer.zero_grad()
            made = model(inputs[part])
            loss = objective(made.reshape(teacher[part].shape), target[part], teacher[part])
            torch.autograd.backward(loss)
            optimizer.step()
            after_step()
            number += 1


def torch_predict(model: nn.Module) -> Callable[[Array], Array]:
    """Return a function from rows to the model's predictions."""

    def predict(rows: Array) -> Array:
        with torch.no_grad():
            made: Array = model(torch.from_numpy(rows)).numpy()
        return made

    return predict


def distillation_loss(evaluator: QualityEvaluator, target: Array) -> Callable[[Any, Any, Any], torch.Tensor]:
    """Return the loss of predictions given the target and the original's predictions."""
    if evaluator.kind == "number" or not evaluator.probabilities:
        scale = float(np.var(target)) or 1.0

        def squares(made: torch.Tensor, wanted: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
            flat = made.reshape(len(wanted))
            hard, soft = ((flat - wanted) ** 2).mean(), ((made - teacher) ** 2).mean()
            return ((1 - SOFT) * hard + SOFT * soft) / scale

        return squares

    def entropy(made: torch.Tensor, wanted: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        if made.ndim == 2 and made.shape[1] > 1:
            logs = torch.log_softmax(made, 1) if evaluator.logits else torch.log(made.clamp(CLIP, 1 - CLIP))
            shares = torch.softmax(teacher, 1) if evaluator.logits else teacher
            hard = -logs.gather(1, wanted.long()[:, None]).mean()
            return (1 - SOFT) * hard - SOFT * (shares * logs).sum(dim=1).mean()
        flat, soft = made.reshape(len(wanted)).clamp(CLIP, 1 - CLIP), teacher.reshape(len(wanted))
        return nn.functional.binary_cross_entropy(flat, (1 - SOFT) * wanted + SOFT * soft)

    return entropy
