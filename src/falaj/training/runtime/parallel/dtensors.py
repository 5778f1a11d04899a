"""Tensors that lie on several processes, as wholes and back. All processes do the same at once."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """All of `tensor`, on each process."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def to_memory_format(tensor: Tensor, *, like: Tensor) -> Tensor:
    """`tensor`, which every process has whole, cut as `like` is."""
    if not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements)
