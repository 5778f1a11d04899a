"""Training and evaluation mode, module by module: what the user has put into evaluation mode stays there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


def ensure_training_mode(model: nn.Module) -> nn.Module:
    """`model`, ready to be trained: one that is all in evaluation mode, as after loading, is put into training mode.

    In a model with any module in training mode those in evaluation mode are meant so, such as a frozen batch norm.
    """
    return model if any(each.training for each in model.modules()) else model.train()


@contextmanager
def preserved_modes(model: nn.Module) -> Iterator[None]:
    """Whatever happens here, each module has its own mode afterwards."""
    before = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, mode in before:  # a model's own `train` may do more than to set the mode
            if module.training != mode:
                module.train(mode)
        for module, mode in before:  # one that has several owners was perhaps set along with the last of them
            if module.training != mode:
                module.training = mode
