"""Counts the bytes that real or fake tensors hold during a step, as CUDA's caching allocator would."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

ROUND_BYTES = 512
"""The allocator's smallest block; every block is a multiple of it."""

MATRIX_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "linear", "matmul", "addmv", "mv"})
CONVOLUTIONS = frozenset({"convolution", "convolution_backward", "_convolution"})

PROCESSORS, THREADS_OF_EACH = 132, 2048
"""Of a Hopper GPU."""
THREADS, VECTOR, WARP = 128, 4, 32
LEAST_EACH, MOST_EACH = 16, 256
SUM_BYTES = 4
"""How torch reduces the rows of a matrix there: threads per block, columns per thread, and the fewest and most
values that one thread adds up before the work is shared; each partial sum takes at least so many bytes."""


def round_to_block(size: int) -> int:
    return -(-size // ROUND_BYTES) * ROUND_BYTES


class AllocationTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tracks the bytes of all storages that are created while it is entered. `peak` is the maximum since
    `reset_peak`.

    Temporary memory of GPU operations is included: partial sums with `gpu`, and with `copies` the copies that
    convolutions make of inputs in another memory format. `exact_sizes` does not round to allocator blocks, so
    that the bytes of few samples can be extrapolated.
    """

    def __init__(self, *, gpu: bool = False, copies: bool = False, exact_sizes: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current = 0
        self.peak = 0
        self.peak_at = 0
        self.multiplied = False
        """Whether matrices were multiplied since `reset_peak`: the library needs a workspace for it."""
        self._gpu, self._copies = gpu, copies
        self._clock = 0
        self._size = int if exact_sizes else round_to_block
        self._changes: list[tuple[int, int]] = []
        """Every allocation and release: the number of the storage, and the change in bytes."""
        self._held: weakref.WeakKeyDictionary[torch.UntypedStorage, tuple[int, int, int]] = (
            weakref.WeakKeyDictionary()
        )

    def reset_peak(self) -> None:
        """Measure the peak from here on."""
        self.peak, self.peak_at, self.multiplied = self.current, self._clock, False

    def track(self, tensor: Tensor) -> None:
        """Count the storage of `tensor` once until it is freed."""
        for storage in storages_of(tensor):
            if storage not in self._held:
                size, number = self._size(storage.nbytes()), len(self._changes)
                self._held[storage] = size, self._clock, number
                self.current += size
                self._changes.append((number, size))
                weakref.finalize(storage, self._free, number, size)
                self._update_peak(self.current)

    def bytes_of(self, tensors: Iterator[Tensor], *, at_peak: bool = False) -> int:
        """Return the bytes of `tensors`, each storage once; with `at_peak` only of those that existed at the peak."""
        found = {id(storage): storage for tensor in tensors for storage in storages_of(tensor)}
        entries = [
            self._held.get(storage, (round_to_block(storage.nbytes()), 0, 0)) for storage in found.values()
        ]
        return sum(size for size, born, _ in entries if not at_peak or born <= self.peak_at)

    def peak_without(self, apart: Iterator[Tensor], settled: Iterator[Tensor]) -> tuple[int, int]:
        """Return the peak of all other tensors, and the bytes of `apart` at that moment."""
        sizes = {number: size for size, _, number in self._entries(apart)}
        others = sizes.keys() | {number for _, _, number in self._entries(settled)}
        now = most = moment = 0
        for place, (number, change) in enumerate(self._changes):
            now += 0 if number in others else change
            if now > most:
                most, moment = now, place
        return most, sum(size for number, size in sizes.items() if number < moment)

    def _entries(self, tensors: Iterator[Tensor]) -> list[tuple[int, int, int]]:
        return [self._held[each] for tensor in tensors for each in storages_of(tensor) if each in self._held]

    def __torch_dispatch__(
        self,
        operation: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        found = operation(*args, **(kwargs or {}))
        self._clock += 1
        for tensor in tensors_in(found):
            self.track(tensor)
        name = getattr(operation, "overloadpacket", operation).__name__
        if name in MATRIX_PRODUCTS:
            self.multiplied = True
        elif self._copies and name in CONVOLUTIONS:
            self._note_temporary(sum(tensor.nbytes for tensor in tensors_in((args, found))))
        elif self._gpu and name == "sum" and len(args) > 1:
            size = max(SUM_BYTES, found.element_size())
            self._note_temporary(partial_sum_bytes(*rows_and_columns(args[0], args[1]), size=size))
        return found

    def _note_temporary(self, size: int) -> None:
        """Count `size` bytes for the duration of one operation."""
        self._changes += [(-1, size), (-1, -size)]
        self._update_peak(self.current + size)

    def _update_peak(self, size: int) -> None:
        if size > self.peak:
            self.peak, self.peak_at = size, self._clock

    def _free(self, number: int, size: int) -> None:
        self.current -= size
        self._changes.append((number, -size))


def rows_and_columns(tensor: Tensor, summed: Any) -> tuple[int, int]:
    """Return the shape of the matrix whose rows are reduced; (0, 0) if other dimensions than the first are
    reduced."""
    count = len(summed) if isinstance(summed, list | tuple) and tensor.dim() else 0
    if not count or sorted(each % tensor.dim() for each in summed) != list(range(count)):
        return 0, 0
    return math.prod(tensor.shape[:count]), math.prod(tensor.shape[count:])


def partial_sum_bytes(rows: int, columns: int, *, size: int = SUM_BYTES) -> int:
    """Return the temporary bytes of a row reduction on a GPU with sums of `size` bytes; 0 for few rows."""
    if columns < THREADS or columns % VECTOR:
        return 0
    height = min(rows, THREADS // WARP)
    each = -(-rows // max(1, height))
    if each < MOST_EACH:
        return 0
    across = -(-columns // (VECTOR * WARP))
    busy = -(-PROCESSORS * THREADS_OF_EACH // (THREADS * across))
    blocks = max(min(busy, -(-each // LEAST_EACH)), -(-each // MOST_EACH))
    return size * columns * blocks * WARP * VECTOR


def storages_of(tensor: Tensor) -> list[torch.UntypedStorage]:
    """Return the storages of `tensor`; for a sparse one, those of its indices and values."""
    if tensor.layout is torch.strided:
        return [tensor.untyped_storage()]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices().untyped_storage(), tensor._values().untyped_storage()]
    return []


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors_in(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)
