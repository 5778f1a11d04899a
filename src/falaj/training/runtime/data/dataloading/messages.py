"""What travels from a worker to its trainer: a message, and by their numbers the blocks that its tensors lie in."""

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
import torch.multiprocessing  # a block that is new to the trainer, and a tensor of another kind, travel torch's way
from torch import Tensor

from falaj.training.runtime.data.dataloading.shared_memory import MAX_INLINE_BYTES, SharedBlockPool, is_plain

HEAD = struct.Struct("<I")


class BlockTensor(NamedTuple):
    """A tensor whose numbers lie in a block; `memory` comes along when the trainer sees that block first."""

    number: int
    memory: Tensor | None
    dtype: torch.dtype
    shape: tuple[int, ...]


class InlineTensor(NamedTuple):
    """A tensor so small that its numbers are in the message."""

    numbers: bytes
    dtype: torch.dtype
    shape: tuple[int, ...]


def pack_message(message: object, blocks: SharedBlockPool) -> bytes:
    """`message` as bytes. Its blocks are still to be reported as sent, or dropped where this fails."""
    buffer = io.BytesIO()
    MessagePickler(buffer, blocks).dump(message)
    evicted = blocks.evicted  # afterwards: packing may need larger blocks, and let smaller ones go
    return HEAD.pack(len(evicted)) + struct.pack(f"<{len(evicted)}Q", *evicted) + buffer.getbuffer()


class MessagePickler(ForkingPickler):
    """What multiprocessing sends its messages by, but for tensors that have a block."""

    def __init__(self, file: io.BytesIO, blocks: SharedBlockPool) -> None:
        super().__init__(file)
        self._blocks = blocks

    def reducer_override(self, thing: Any) -> Any:
        """How a tensor travels, if it is one, and not left to torch."""
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
    """Where the trainer opens what a worker sends."""

    def __init__(self) -> None:
        self._memories: dict[int, Tensor] = {}
        self._free: deque[int] = deque()

    def decode(self, data: bytes) -> Any:
        """The message. Its tensors are the caller's, for as long as there is one that uses a block's memory."""
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
        """The blocks that no tensor has used since it was last asked."""
        return [self._free.popleft() for _ in range(len(self._free))]

    def memory(self, number: int, new: Tensor | None) -> Tensor:
        if new is not None:
            self._memories[number] = new
        return self._memories[number]

    def tensor(self, memory: Tensor, about: BlockTensor) -> Tensor:
        """A tensor in `memory`; when neither it nor a view of it is left, the block is free."""
        count = prod(about.shape)
        lease = (ctypes.c_ubyte * (count * about.dtype.itemsize)).from_address(memory.data_ptr())
        end = weakref.finalize(lease, _give_back, self._free, about.number, memory)
        end.atexit = False
        return torch.frombuffer(lease, dtype=about.dtype, count=count).view(about.shape)


_opening = threading.local()
"""Has the desk at which this thread opens a message."""


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
    """Called with `memory`, which must stay as long as there is a tensor in it."""
    free.append(number)
