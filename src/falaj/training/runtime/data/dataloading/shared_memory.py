"""Shared memory blocks that a worker reuses, since each new page costs two page faults."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from falaj.training.runtime.data.sources import Batch

MAX_INLINE_BYTES = 4096
"""Tensors up to this size are sent inside the message."""
SIZES_PER_POWER_OF_TWO = 8
"""Block sizes between a power of two and the next, so that batches of many lengths share blocks."""


class SharedBlock:
    """A block of shared memory. `is_known`: the trainer has mapped it, and needs its number only."""

    def __init__(self, number: int, size_bytes: int) -> None:
        self.number, self.is_known = number, False
        self.size_bytes = size_bytes
        self.memory: Tensor = torch.empty(size_bytes, dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]


class SharedBlockPool:
    """All blocks of a worker: free, used by the batch that is being read, or held by the trainer."""

    def __init__(self) -> None:
        self._free: list[SharedBlock] = []
        self._sent: dict[int, SharedBlock] = {}
        self._in_use: dict[int, tuple[Tensor, SharedBlock]] = {}
        self._evicted: list[int] = []
        self._made = 0

    def stack(self, samples: list[Any]) -> Batch:
        """Collate like torch's `default_collate`, with the large tensors of the batch in blocks."""
        from torch.utils.data._utils.collate import collate, collate_tensor_fn, default_collate_fn_map

        ways = dict(default_collate_fn_map)
        if ways[Tensor] is collate_tensor_fn:  # else the user has registered another function
            ways[Tensor] = partial(self._stacked, otherwise=collate_tensor_fn)
        return collate(samples, collate_fn_map=ways)

    def block_of(self, tensor: Tensor) -> SharedBlock | None:
        return self._in_use[id(tensor)][1] if id(tensor) in self._in_use else None

    def copy_in(self, tensor: Tensor) -> SharedBlock:
        """Copy `tensor` into a block and return the block."""
        block = self._block(tensor.nbytes)
        self._in_use[id(tensor)] = tensor, block
        block_view(block, tensor.dtype, tensor.shape).copy_(tensor)
        return block

    def mark_sent(self) -> None:
        """Note that the batch was sent to the trainer."""
        for _, block in self._in_use.values():
            block.is_known = True
            self._sent[block.number] = block
        self._in_use.clear()
        self._evicted.clear()

    def discard(self) -> None:
        """Free the blocks of a batch that will not be sent."""
        self._free += [block for _, block in self._in_use.values()]
        self._in_use.clear()

    def release(self, numbers: Iterable[int]) -> None:
        """Free the blocks that the trainer has released."""
        self._free += [self._sent.pop(number) for number in numbers]

    @property
    def evicted(self) -> list[int]:
        """Blocks that the trainer still maps and must unmap."""
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
            return torch.stack(tuple(tensors))  # promotes dtypes, or raises
        block = self._block(size_bytes)
        batch = block_view(block, first.dtype, (len(tensors), *first.shape))
        self._in_use[id(batch)] = batch, block
        torch.stack(tuple(tensors), out=batch)
        return batch

    def _block(self, size_bytes: int) -> SharedBlock:
        """Return the smallest free block that is large enough; else a new one that replaces a smaller one."""
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
    """Return whether the tensor is fully described by its values, dtype and shape."""
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def round_up_size(size_bytes: int) -> int:
    """Return `size_bytes` rounded up to a block size."""
    grain = max(
        MAX_INLINE_BYTES, 1 << max(0, size_bytes.bit_length() - 1) >> SIZES_PER_POWER_OF_TWO.bit_length() - 1
    )
    return -(-size_bytes // grain) * grain
