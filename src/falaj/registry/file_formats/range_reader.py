"""Bounded random reads in a file that may be huge or malicious."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any, BinaryIO

from falaj.errors import Fault, InvalidInput

BLOCK_BYTES = 64 << 10
READ_LIMIT = 16 << 20
"""Largest single read; no genuine archive has a larger directory."""

TOTAL_LIMIT = 1 << 30


class RangeReader(io.RawIOBase):
    """A file given by its size and a function that reads a range of it. The last block is cached."""

    def __init__(self, name: str, size_bytes: int, read_range: Callable[[int, int], bytes]) -> None:
        super().__init__()
        self.name = name
        self.size_bytes = size_bytes
        self._read_range = read_range
        self._position = 0
        self._block = (0, b"")
        self._read_bytes = 0

    def at(self, offset: int, length: int) -> bytes:
        """Return `length` bytes from `offset`; fewer at the end of the file."""
        length = max(0, min(length, self.size_bytes - offset))
        if length > READ_LIMIT:
            raise self.rejection("a file with a part that is too large to inspect")
        start, block = self._block
        if not (start <= offset and offset + length <= start + len(block)):
            wanted = min(max(length, BLOCK_BYTES), self.size_bytes - offset)
            start, block = self._block = (offset, self._fetch(offset, wanted)) if length else (offset, b"")
        return block[offset - start : offset - start + length]

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
    "ONNX, torch export (.pt2), safetensors, LiteRT, XGBoost JSON or UBJ, LightGBM text, CatBoost, Python "
    "source (model.py); in addition Arrow, "
    "Parquet, NumPy arrays, JSON and text"
)
