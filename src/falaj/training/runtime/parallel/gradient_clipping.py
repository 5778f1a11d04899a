"""Gradient clipping by the global norm over several processes; torch's own uses the norm of a shard, or raises."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from falaj.training.runtime.parallel.dtensors import local_tensor


def clip_gradients(
    parameters: Sequence[nn.Parameter],
    most: float,
    *,
    over: dist.ProcessGroup | None,
    device: torch.device,
) -> Tensor:
    """Scale all gradients so that their norm is at most `most`; return the norm before.

    `over` are the processes that hold other parameters of the same model, the stages of a pipeline.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    squares = torch.zeros((), device=device)
    if gradients:
        squares = torch.stack([squared_norm(gradient) for gradient in gradients]).sum()
    if over is not None:
        dist.all_reduce(squares, group=over)
    norm = squares.sqrt()
    factor = torch.clamp(most / (norm + 1e-6), max=1.0)
    for gradient in gradients:
        local_tensor(gradient).mul_(factor)
    return norm


def squared_norm(gradient: Tensor) -> Tensor:
    """Return the sum of squares of a whole gradient, each element counted once."""
    total = local_tensor(gradient).detach().float().square().sum()
    if isinstance(gradient, DTensor):
        mesh = gradient.device_mesh
        for axis, placement in enumerate(gradient.placements):
            if not placement.is_replicate():
                dist.all_reduce(total, group=mesh.get_group(axis))
    return total
