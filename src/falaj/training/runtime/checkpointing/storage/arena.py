"""The memory in which checkpoints are staged: allocated once, reused, and pinned where there is a GPU."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from falaj.training.runtime.checkpointing.storage.parts import ALIGNMENT

MAX_OVERSIZE = 2
"""A block larger than this multiple of the need is freed: first saves stage what other processes write later."""


class StagedCopy(NamedTuple):
    """A tensor to copy, and its place in the arena, a tensor of the same shape."""

    source: Tensor
    place: Tensor

    def copy(self, *, non_blocking: bool = False) -> None:
        self.place.copy_(self.source, non_blocking=non_blocking)


class StagingArena:
    """One block of CPU memory. Its places are valid until the next `lay_out`."""

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._block = torch.empty(0, dtype=torch.uint8)

    def reserve(self, sizes: Sequence[int]) -> None:
        """Allocate a block for these sizes, and not much more."""
        total = sum(_aligned(size) for size in sizes)
        if not total <= self._block.numel() <= MAX_OVERSIZE * total:
            self._block = torch.empty(0, dtype=torch.uint8)  # free the old block before allocating
            self._block = torch.empty(total, dtype=torch.uint8, pin_memory=self._pinned)

    def lay_out(self, sources: Sequence[Tensor]) -> list[StagedCopy]:
        """Return a place for each of the local tensors `sources`; nothing is copied yet."""
        sizes = byte_sizes(sources)
        self.reserve(sizes)
        copies, at = [], 0
        for source, size in zip(sources, sizes, strict=True):
            place = self._block[at : at + size].view(source.dtype).view(source.shape)
            copies.append(StagedCopy(source.detach(), place))
            at += _aligned(size)
        return copies


def byte_sizes(tensors: Sequence[Tensor]) -> list[int]:
    return [each.numel() * each.element_size() for each in tensors]


def tensor_memory(tensor: Tensor) -> memoryview:
    """Return a view of the memory of a dense CPU tensor, which lives as long as the view."""
    size = math.prod(tensor.shape) * tensor.element_size()
    if not size:
        return memoryview(b"")
    memory = (ctypes.c_ubyte * size).from_address(tensor.data_ptr())
    memory.owner = tensor  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")


def _aligned(size: int) -> int:
    return size + -size % ALIGNMENT
