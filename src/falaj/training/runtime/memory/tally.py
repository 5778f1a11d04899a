"""Counts the bytes that tensors hold while a step is computed, real ones or fake ones, as CUDA's allocator would."""

from __future__ import annotations

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


def rounded(size: int) -> int:
    return -(-size // ROUND_BYTES) * ROUND_BYTES


class Tally(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, every new storage counts until it is freed. `peak` is the most since `restart`.

    Convolutions that are not laid out as the GPU likes are given copies that are: with `copies` these count as well,
    for as long as the operation lasts.
    """

    def __init__(self, *, copies: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        self.peak_at = 0
        self.multiplied = False
        """Whether matrices were multiplied since `restart`: the library that does this takes a workspace."""
        self._copies = copies
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
        return found

    def _look(self, size: int) -> None:
        if size > self.peak:
            self.peak, self.peak_at = size, self._clock

    def _free(self, size: int) -> None:
        self.now -= size


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
