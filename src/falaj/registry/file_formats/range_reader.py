"""Bounded random reads in a file that may be huge or malicious."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any, BinaryIO

from falaj.errors import Fault, InvalidInput

BLOCK_BYTES = 64 << 10
CACHED_BLOCKS = 64
READ_LIMIT = 16 << 20
"""Largest single read; no genuine archive has a larger directory."""

TOTAL_LIMIT = 1 << 30


class RangeReader(io.RawIOBase):
    """A file given by its size and a function that reads a range of it. The last blocks are cached."""

    def __init__(self, name: str, size_bytes: int, read_range: Callable[[int, int], bytes]) -> None:
        super().__init__()
        self.name = name
        self.size_bytes = size_bytes
        self._read_range = read_range
        self._position = 0
        self._blocks: dict[int, bytes] = {}  # the one that was used last is the last one
        self._read_bytes = 0

    def at(self, offset: int, length: int) -> bytes:
        """Return `length` bytes from `offset`; fewer at the end of the file."""
        length = max(0, min(length, self.size_bytes - offset))
        if length > READ_LIMIT:
            raise self.rejection("a file with a part that is too large to inspect")
        if offset < 0 or length == 0:
            return b""
        number = offset // BLOCK_BYTES
        if (offset + length - 1) // BLOCK_BYTES > number:
            return self._fetch(offset, length)
        start = offset - number * BLOCK_BYTES
        return self._block(number)[start : start + length]

    def rejection(self, why: str, *, fix: str | None = None) -> InvalidInput:
        fault = Fault(where=self.name, given=why, allowed=ALLOWED, fix=fix)
        return InvalidInput(f"{self.name} cannot be part of a model version", faults=[fault])

    def read(self, size: int = -1) -> bytes:
        wanted = self.size_bytes - self._position if size is None or size < 0 else size
        data = self.at(self._position, wanted)
        self._position += len(data)
        return data

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def buffered(self) -> BinaryIO:
        """Return the file from its start, for many small reads."""
        self.seek(0)
        return _Buffered(self, BLOCK_BYTES)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size_bytes}[whence]
        if origin + offset < 0:
            raise OSError("negative seek position")
        self._position = origin + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def _block(self, number: int) -> bytes:
        """Return an aligned block; formats with offsets in them jump between a few."""
        block = self._blocks.pop(number, None)
        if block is None:
            start = number * BLOCK_BYTES
            block = self._fetch(start, min(BLOCK_BYTES, self.size_bytes - start))
            if len(self._blocks) >= CACHED_BLOCKS:
                del self._blocks[next(iter(self._blocks))]
        self._blocks[number] = block
        return block

    def _fetch(self, offset: int, length: int) -> bytes:
        self._read_bytes += length
        if self._read_bytes > TOTAL_LIMIT:
            raise self.rejection("a file whose format cannot be determined within the read limit")
        return self._read_range(offset, length)


class _Buffered(io.BufferedReader):
    """Leaves the reader open: others read it afterwards."""

    def close(self) -> None:
        pass


ALLOWED = (
    "ONNX, torch export (.pt2), safetensors, LiteRT, XGBoost JSON or UBJ, LightGBM text, CatBoost, skops, "
    "Python source (model.py); in addition Arrow, Parquet, NumPy arrays, JSON and text"
)
