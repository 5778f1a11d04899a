"""What was seen of the memory of a step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StepTrace:
    """The bytes of a step in one process over `samples` samples, computed in one piece."""

    samples: int
    parameters: int
    trained: int
    """The parameters that have gradients, so also the bytes of these: sparse ones count as whole."""
    buffers: int
    state: int
    """What the optimizer remembers."""
    activations: int
    """The most that a forward and backward pass has beside all these, and the samples; without gradients."""
    batch: int
    """The samples alone."""
    early_gradients: int
    """The gradients that are there already at that moment."""
    update: int
    """What the optimizer's update has beside parameters, gradients and its state, for as long as it lasts."""
    workspace: int = 0
    """What libraries of the GPU keep for themselves."""
