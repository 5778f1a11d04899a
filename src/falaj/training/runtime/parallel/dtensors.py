"""Conversion of distributed tensors. Collective: all processes call these together."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor


def full_tensor(tensor: Tensor) -> Tensor:
    """Return all of `tensor` on each process."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_tensor(tensor: Tensor) -> Tensor:
    """Return the part of `tensor` on this process."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
