"""Training and evaluation mode per module: modules that the user put in evaluation mode stay there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


def ensure_training_mode(model: nn.Module) -> nn.Module:
    """Return `model` in training mode if all of it is in evaluation mode, as after loading.

    If any module is in training mode, those in evaluation mode are intended, such as a frozen batch norm.
    """
    return model if any(each.training for each in model.modules()) else model.train()


@contextmanager
def preserved_modes(model: nn.Module) -> Iterator[None]:
    """Restore the mode of each module at the end."""
    before = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, mode in before:  # a custom `train` may do more than set the mode
            if module.training != mode:
                module.train(mode)
        for module, mode in before:  # a shared module may have been set with its last owner
            if module.training != mode:
                module.training = mode
