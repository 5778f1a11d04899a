"""What `fj.open` and `fj.connect` both give."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from falaj.control.platform import Rooms
from falaj.records.audit import LogCheck
from falaj.records.blobs import Blob

CHUNK_BYTES = 1 << 20


class Platform(Rooms):
    """Every room under its name, near or far. Use it as a context manager, or close it."""

    def __init__(self, rooms: Rooms, *, where: str, on_close: Callable[[], None]) -> None:
        super().__init__(**vars(rooms))
        self.where = where
        self._on_close = on_close

    def put(self, name: str, data: bytes | Path | IO[bytes] | Iterable[bytes], **where: Any) -> Blob:
        """Upload `data` and commit it under `name`: blob.upload and blob.commit in one."""
        staged = self.blob.upload(chunks(data), **where)
        return self.blob.commit(staged.id, name=name)

    def get(self, blob: str) -> bytes:
        """All the bytes of a blob."""
        return b"".join(self.blob.read(blob))

    def verify_audit(self) -> LogCheck:
        """The verdict on the audit log: the last word of audit.verify."""
        *_, verdict = self.audit.verify()
        return verdict

    def close(self) -> None:
        self._on_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Falaj platform at {self.where}>"


def chunks(data: bytes | Path | IO[bytes] | Iterable[bytes]) -> Iterator[bytes]:
    """`data` in pieces, whatever it is."""
    if isinstance(data, bytes):
        yield from (data[i : i + CHUNK_BYTES] for i in range(0, len(data), CHUNK_BYTES))
    elif isinstance(data, Path):
        with data.open("rb") as file:
            yield from chunks(file)
    elif hasattr(data, "read"):
        while piece := data.read(CHUNK_BYTES):
            yield piece
    else:
        yield from data
