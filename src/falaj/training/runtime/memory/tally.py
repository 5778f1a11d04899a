"""Counts the bytes that tensors hold while a step is computed, real ones or fake ones, as CUDA's allocator would."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

ROUND_BYTES = 512
"""The allocator's smallest block; every other one is a multiple of it."""

PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "linear", "matmul", "addmv", "mv"})
CONVOLUTIONS = frozenset({"convolution", "convolution_backward", "_convolution"})

PROCESSORS, THREADS_OF_EACH = 132, 2048
"""Of a Hopper GPU."""
THREADS, VECTOR, WARP = 128, 4, 32
LEAST_EACH, MOST_EACH = 16, 256
"""How torch sums up the rows of a matrix there: so many threads in a block, for so many columns each; and of the values
that a thread may sum up, the fewest and the most before others share its work."""


def rounded(size: int) -> int:
    return -(-size // ROUND_BYTES) * ROUND_BYTES


class Tally(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, every new storage counts until it is freed. `peak` is the most since `restart`.

    What operations take on a GPU beside their results counts for as long as they last: partial sums with `gpu`, and
    with `copies` those of convolutions, which are given copies of what is not laid out as the GPU likes.
    """

    def __init__(self, *, gpu: bool = False, copies: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        self.peak_at = 0
        self.multiplied = False
        """Whether matrices were multiplied since `restart`: the library that does this takes a workspace."""
        self._gpu, self._copies = gpu, copies
        self._clock = 0
        self._held: weakref.WeakKeyDictionary[torch.UntypedStorage, tuple[int, int]] = (
            weakref.WeakKeyDictionary()
        )

    def restart(self) -> None:
        """Look for the highest point from here on."""
        self.peak, self.peak_at, self.multiplied = self.now, self._clock, False

    def hold(self, tensor: Tensor) -> None:
        """Count the storage of `tensor`, once, until it is freed."""
        for storage in storages(tensor):
            if storage not in self._held:
                size = rounded(storage.nbytes())
                self._held[storage] = size, self._clock
                self.now += size
                weakref.finalize(storage, self._free, size)
                self._look(self.now)

    def held(self, tensors: Iterator[Tensor], *, at_peak: bool = False) -> int:
        """The bytes of `tensors`, each storage once; with `at_peak` of those that were there at the peak."""
        found = {id(storage): storage for tensor in tensors for storage in storages(tensor)}
        entries = [self._held.get(storage, (rounded(storage.nbytes()), 0)) for storage in found.values()]
        return sum(size for size, born in entries if not at_peak or born <= self.peak_at)

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
            self.hold(tensor)
        name = getattr(operation, "overloadpacket", operation).__name__
        if name in PRODUCTS:
            self.multiplied = True
        elif self._copies and name in CONVOLUTIONS:
            self._look(self.now + sum(tensor.nbytes for tensor in tensors_in((args, found))))
        elif self._gpu and name == "sum" and len(args) > 1:
            self._look(self.now + partial_sums(*rows_and_columns(args[0], args[1])))
        return found

    def _look(self, size: int) -> None:
        if size > self.peak:
            self.peak, self.peak_at = size, self._clock

    def _free(self, size: int) -> None:
        self.now -= size


def rows_and_columns(tensor: Tensor, summed: Any) -> tuple[int, int]:
    """The matrix whose rows are summed up where the first dimensions of `tensor` are; (0, 0) where they are others."""
    count = len(summed) if isinstance(summed, list | tuple) else 0
    if not count or sorted(each % tensor.dim() for each in summed) != list(range(count)):
        return 0, 0
    return math.prod(tensor.shape[:count]), math.prod(tensor.shape[count:])


def partial_sums(rows: int, columns: int) -> int:
    """The bytes that torch takes on a GPU to sum up the rows of a matrix, in fp32; none where there are few."""
    if columns < THREADS or columns % VECTOR:
        return 0
    height = min(rows, THREADS // WARP)
    each = -(-rows // max(1, height))
    if each < MOST_EACH:
        return 0
    across = -(-columns // (VECTOR * WARP))
    busy = -(-PROCESSORS * THREADS_OF_EACH // (THREADS * across))
    blocks = max(min(busy, -(-each // LEAST_EACH)), -(-each // MOST_EACH))
    return 4 * columns * blocks * WARP * VECTOR


def storages(tensor: Tensor) -> list[torch.UntypedStorage]:
    """Where the bytes of `tensor` lie; of a sparse one, those of its indices and its values."""
    if tensor.layout is torch.strided:
        return [tensor.untyped_storage()]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices().untyped_storage(), tensor._values().untyped_storage()]
    return []


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of arguments or results, which are nested at most in lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)
