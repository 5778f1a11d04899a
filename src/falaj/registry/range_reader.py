"""Small reads anywhere in a file that may be huge and hostile."""

from __future__ import annotations

import io
from collections.abc import Callable

from falaj.errors import Fault, InvalidInput

BLOCK_BYTES = 64 << 10
READ_LIMIT = 16 << 20
"""The most that one look may read: a directory of an archive that is larger is not honest."""

TOTAL_LIMIT = 256 << 20


class RangeReader(io.RawIOBase):
    """A file by its size and a way to read a range of it; the last block is kept, because looks are close together."""

    def __init__(self, name: str, size_bytes: int, read_range: Callable[[int, int], bytes]) -> None:
        super().__init__()
        self.name = name
        self.size_bytes = size_bytes
        self._read_range = read_range
        self._position = 0
        self._block = (0, b"")
        self._read_bytes = 0

    def at(self, offset: int, length: int) -> bytes:
        """The bytes from `offset`; fewer than `length` at the end of the file."""
        length = max(0, min(length, self.size_bytes - offset))
        if length > READ_LIMIT:
            raise self.rejection("a part of it that has to be read at once is too large")
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

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size_bytes}[whence]
        if origin + offset < 0:
            raise OSError("a position before the beginning")
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
            raise self.rejection("too much of it has to be read to tell what it is")
        return self._read_range(offset, length)


ALLOWED = (
    "ONNX, torch export (.pt2), safetensors, LiteRT, XGBoost JSON or UBJ, LightGBM text, CatBoost; beside them Arrow, "
    "Parquet, NumPy arrays, JSON and text"
)
