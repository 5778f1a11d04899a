"""Memory that a worker shares with its trainer and uses again: each page of new memory would cost two faults."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from falaj.training.runtime.data.sources import Batch

MAX_INLINE_BYTES = 4096
"""Tensors up to this size travel with the message about them."""
SIZES_PER_POWER_OF_TWO = 8
"""Blocks have one of so many sizes between a power of two and the next, so that batches of many lengths share them."""


class SharedBlock:
    """A piece of shared memory. `is_known`: the trainer has it too, and needs to hear no more than its number."""

    def __init__(self, number: int, size_bytes: int) -> None:
        self.number, self.is_known = number, False
        self.size_bytes = size_bytes
        self.memory: Tensor = torch.empty(size_bytes, dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]


class SharedBlockPool:
    """All blocks of a worker: free, or lent to a tensor of the batch that is being read, or with the trainer."""

    def __init__(self) -> None:
        self._free: list[SharedBlock] = []
        self._sent: dict[int, SharedBlock] = {}
        self._in_use: dict[int, tuple[Tensor, SharedBlock]] = {}
        self._evicted: list[int] = []
        self._made = 0

    def stack(self, samples: list[Any]) -> Batch:
        """As torch's `default_collate`, with the large tensors of the batch in blocks."""
        from torch.utils.data._utils.collate import collate, collate_tensor_fn, default_collate_fn_map

        ways = dict(default_collate_fn_map)
        if ways[Tensor] is collate_tensor_fn:  # else somebody has a way of their own
            ways[Tensor] = partial(self._stacked, otherwise=collate_tensor_fn)
        return collate(samples, collate_fn_map=ways)

    def block_of(self, tensor: Tensor) -> SharedBlock | None:
        return self._in_use[id(tensor)][1] if id(tensor) in self._in_use else None

    def copy_in(self, tensor: Tensor) -> SharedBlock:
        """A block with the numbers of `tensor`, which nobody put into one."""
        block = self._block(tensor.nbytes)
        self._in_use[id(tensor)] = tensor, block
        block_view(block, tensor.dtype, tensor.shape).copy_(tensor)
        return block

    def mark_sent(self) -> None:
        """The batch is with the trainer."""
        for _, block in self._in_use.values():
            block.is_known = True
            self._sent[block.number] = block
        self._in_use.clear()
        self._evicted.clear()

    def discard(self) -> None:
        """The batch, or what there was of it, will not be sent."""
        self._free += [block for _, block in self._in_use.values()]
        self._in_use.clear()

    def release(self, numbers: Iterable[int]) -> None:
        """Nobody uses these any more."""
        self._free += [self._sent.pop(number) for number in numbers]

    @property
    def evicted(self) -> list[int]:
        """Blocks that the trainer still has, and will not be told of again."""
        return list(self._evicted)

    def _stacked(
        self, tensors: Sequence[Tensor], *, collate_fn_map: Any, otherwise: Callable[..., Tensor]
    ) -> Tensor:
        first = tensors[0]
        if not all(is_plain(tensor) for tensor in tensors):
            return otherwise(tensors, collate_fn_map=collate_fn_map)
        size_bytes = len(tensors) * first.nbytes
        alike = all(each.dtype is first.dtype and each.shape == first.shape for each in tensors)
        if not alike or size_bytes <= MAX_INLINE_BYTES:
            return torch.stack(tuple(tensors))  # in a type that has room for all, or an error
        block = self._block(size_bytes)
        batch = block_view(block, first.dtype, (len(tensors), *first.shape))
        self._in_use[id(batch)] = batch, block
        torch.stack(tuple(tensors), out=batch)
        return batch

    def _block(self, size_bytes: int) -> SharedBlock:
        """The smallest that is free and large enough; else a new one, instead of a smaller one."""
        fitting = [block for block in self._free if block.size_bytes >= size_bytes]
        if fitting:
            block = min(fitting, key=lambda each: each.size_bytes)
            self._free.remove(block)
            return block
        if self._free:
            smallest = min(self._free, key=lambda each: each.size_bytes)
            self._free.remove(smallest)
            self._evicted += [smallest.number] if smallest.is_known else []
        self._made += 1
        return SharedBlock(self._made, round_up_size(size_bytes))


def block_view(block: SharedBlock, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    room: Tensor = block.memory[: prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))
    return room


def is_plain(tensor: Tensor) -> bool:
    """Whether its numbers are all there is to it."""
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def round_up_size(size_bytes: int) -> int:
    """`size_bytes`, or a little more."""
    grain = max(
        MAX_INLINE_BYTES, 1 << max(0, size_bytes.bit_length() - 1) >> SIZES_PER_POWER_OF_TWO.bit_length() - 1
    )
    return -(-size_bytes // grain) * grain
