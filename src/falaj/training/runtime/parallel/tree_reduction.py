"""Gradient sums in a fixed binary tree, so that they are bitwise equal for any number of processes.

The leaves are the micro-batches of a step, a power of two; each process has the leaves of a whole subtree.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

GradientSums = list[Tensor | None]
"""A tensor per parameter, and one for the loss; None where nothing was computed."""


class PairwiseSum:
    """Pairwise summation of leaves that arrive in order; only few partial sums are kept at any time."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, GradientSums]] = []

    def add(self, leaf: GradientSums, *, place: int) -> None:
        """Add the leaf at `place`, which is after all others; missing leaves count as zero."""
        if self._waiting:
            self._merge(below=height(self._waiting[-1][0], place))
        self._waiting.append((place, leaf))
        end = (place ^ (place + 1)).bit_length()  # the subtrees up to this height end with `place`
        self._merge(below=end)

    def take(self) -> GradientSums | None:
        """Return the sum of the whole subtree; None without leaves."""
        self._merge(below=sys.maxsize)
        total = self._waiting[0][1] if self._waiting else None
        self._waiting = []
        return total

    def _merge(self, *, below: int) -> None:
        """Merge the last partial sums that meet below this height."""
        while len(self._waiting) > 1 and height(self._waiting[-2][0], self._waiting[-1][0]) < below:
            place, right = self._waiting.pop()
            self._waiting[-1] = place, added(self._waiting[-1][1], right)


def height(left: int, right: int) -> int:
    """Return the height of the smallest subtree with both leaves."""
    return (left ^ right).bit_length()


def added(left: GradientSums, right: GradientSums) -> GradientSums:
    return [b if a is None else a if b is None else a + b for a, b in zip(left, right, strict=True)]


def sum_over_processes(own: GradientSums, like: Sequence[Tensor], *, rank: int, size: int) -> GradientSums:
    """Return the sum over all processes, each of which has one subtree: pairs first, then pairs of pairs."""
    distance = 1
    while distance < size:
        own = added_in_order(own, exchange(own, like, rank ^ distance), mine_first=not rank & distance)
        distance *= 2
    return own


def added_in_order(own: GradientSums, other: GradientSums, *, mine_first: bool) -> GradientSums:
    return added(own, other) if mine_first else added(other, own)


def exchange(own: GradientSums, like: Sequence[Tensor], partner: int) -> GradientSums:
    """Exchange sums with `partner`; `like` has the shapes of both."""
    device = like[0].device
    present = torch.tensor([value is not None for value in own], dtype=torch.uint8, device=device)
    theirs = torch.empty_like(present)
    swap([present], [theirs], partner)
    has = theirs.bool().tolist()
    sent = [value.contiguous() for value in own if value is not None]
    received = [
        torch.empty_like(model, memory_format=torch.contiguous_format)
        for model, there in zip(like, has, strict=True)
        if there
    ]
    swap(sent, received, partner)
    arrived = iter(received)
    return [next(arrived) if there else None for there in has]


def swap(sent: Sequence[Tensor], received: Sequence[Tensor], partner: int) -> None:
    outgoing = [dist.P2POp(dist.isend, flat, partner) for flat in flattened(sent)]
    buffers = [
        torch.empty(sum(t.numel() for t in group), dtype=group[0].dtype, device=group[0].device)
        for group in by_dtype(received)
    ]
    incoming = [dist.P2POp(dist.irecv, buffer, partner) for buffer in buffers]
    if outgoing or incoming:
        for work in dist.batch_isend_irecv([*outgoing, *incoming]):
            work.wait()
    for group, buffer in zip(by_dtype(received), buffers, strict=True):
        for tensor, part in zip(group, torch.split(buffer, [t.numel() for t in group]), strict=True):
            tensor.copy_(part.view_as(tensor))


def flattened(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.cat([tensor.reshape(-1) for tensor in group]) for group in by_dtype(tensors)]


def by_dtype(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return [groups[dtype] for dtype in sorted(groups, key=str)]
