"""Messages from a worker to its trainer, whose tensors lie in shared memory blocks."""

from __future__ import annotations

import ctypes
import io
import struct
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from math import prod
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import torch
import torch.multiprocessing  # registers the pickling of new blocks and special tensors
from torch import Tensor

from falaj.training.runtime.data.dataloading.shared_memory import MAX_INLINE_BYTES, SharedBlockPool, is_plain

HEAD = struct.Struct("<I")


class BlockTensor(NamedTuple):
    """A tensor in a block; `memory` is sent when the trainer sees the block for the first time."""

    number: int
    memory: Tensor | None
    dtype: torch.dtype
    shape: tuple[int, ...]


class InlineTensor(NamedTuple):
    """A small tensor whose values are in the message."""

    numbers: bytes
    dtype: torch.dtype
    shape: tuple[int, ...]


def pack_message(message: object, blocks: SharedBlockPool) -> bytes:
    """Return `message` as bytes. The caller then marks its blocks as sent, or as dropped if this fails."""
    buffer = io.BytesIO()
    MessagePickler(buffer, blocks).dump(message)
    evicted = blocks.evicted  # read after pickling, which may replace blocks
    return HEAD.pack(len(evicted)) + struct.pack(f"<{len(evicted)}Q", *evicted) + buffer.getbuffer()


class MessagePickler(ForkingPickler):
    """The pickler of multiprocessing, with tensors in shared blocks."""

    def __init__(self, file: io.BytesIO, blocks: SharedBlockPool) -> None:
        super().__init__(file)
        self._blocks = blocks

    def reducer_override(self, thing: Any) -> Any:
        """Return the reduction of a plain tensor; leave other objects to torch."""
        if type(thing) is not Tensor:
            return NotImplemented
        block = self._blocks.block_of(thing)
        if block is None and (not is_plain(thing) or thing.is_shared()):  # type: ignore[no-untyped-call]
            return NotImplemented
        if block is None and thing.nbytes <= MAX_INLINE_BYTES:
            whole = thing.contiguous()
            numbers = ctypes.string_at(whole.data_ptr(), whole.nbytes)
            return unpack_tensor, (InlineTensor(numbers, thing.dtype, tuple(thing.shape)),)
        block = block or self._blocks.copy_in(thing)
        memory = None if block.is_known else block.memory
        return unpack_tensor, (BlockTensor(block.number, memory, thing.dtype, tuple(thing.shape)),)


class MessageReceiver:
    """Decodes the messages of one worker in the trainer."""

    def __init__(self) -> None:
        self._memories: dict[int, Tensor] = {}
        self._free: deque[int] = deque()

    def decode(self, data: bytes) -> Any:
        """Return the message. A block is released when no tensor in it is left."""
        (count,) = HEAD.unpack_from(data)
        evicted = struct.unpack_from(f"<{count}Q", data, HEAD.size)
        _opening.receiver = self
        try:
            message = ForkingPickler.loads(memoryview(data)[HEAD.size + 8 * count :])
        finally:
            del _opening.receiver
        for number in evicted:
            del self._memories[number]
        return message

    def take_released(self) -> list[int]:
        """Return the blocks that were released since the last call."""
        return [self._free.popleft() for _ in range(len(self._free))]

    def memory(self, number: int, new: Tensor | None) -> Tensor:
        if new is not None:
            self._memories[number] = new
        return self._memories[number]

    def tensor(self, memory: Tensor, about: BlockTensor) -> Tensor:
        """Return a tensor in `memory`; the block is released when neither it nor a view of it is left."""
        count = prod(about.shape)
        lease = (ctypes.c_ubyte * (count * about.dtype.itemsize)).from_address(memory.data_ptr())
        end = weakref.finalize(lease, _give_back, self._free, about.number, memory)
        end.atexit = False
        return torch.frombuffer(lease, dtype=about.dtype, count=count).view(about.shape)


_opening = threading.local()
"""Holds the receiver whose message this thread is decoding."""


def unpack_tensor(about: BlockTensor | InlineTensor) -> Tensor:
    if isinstance(about, InlineTensor):
        return _tensor(about.numbers, about.dtype, about.shape)
    receiver: MessageReceiver = _opening.receiver
    return receiver.tensor(receiver.memory(about.number, about.memory), about)


def _tensor(numbers: bytes, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    if not numbers:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(numbers), dtype=dtype).view(shape)


def _give_back(free: deque[int], number: int, memory: Tensor) -> None:
    """Release a block. `memory` is an argument to stay alive as long as a tensor uses it."""
    free.append(number)
