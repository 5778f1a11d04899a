"""The witness: signed heads in a file outside the home. The key's own store remembers the newest head and the file."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import IO

from falaj.errors import Fault, Tampered
from falaj.ports.keys import KeyService
from falaj.records.governance.audit import SignedHead

ACCEPT = "restore it from your copy; if there is none, record the loss: falaj audit accept --reason TEXT"


@dataclass(frozen=True)
class Extent:
    """How far a witness file reached: its size, and a digest that chains its lines."""

    size_bytes: int = 0
    chain: str = ""

    def after(self, lines: bytes) -> Extent:
        """Return the extent after `lines` were appended."""
        chain = self.chain
        for line in lines.splitlines(keepends=True):
            chain = sha256(chain.encode() + line).hexdigest()
        return Extent(self.size_bytes + len(lines), chain)


@dataclass(frozen=True)
class Memory:
    """The newest head that this home signed or saw, and the extent of its witness files, by path."""

    size: int = 0
    root: str = ""
    at: str = ""
    files: dict[str, Extent] = field(default_factory=dict)


class Witness:
    """The witness file of one home, and the memory of it in the key's store.

    A file that is missing or shorter than remembered is neither made nor appended to: the loss stays visible.
    """

    def __init__(self, path: Path, keys: KeyService, *, log_id: str, home: str) -> None:
        self.path = path
        self.home = home
        self._keys = keys
        self._name = f"{log_id}-{home}"

    def begin(self) -> None:
        """Make file and memory, unless the memory knows this file already."""
        known = self.memory() or Memory()
        if str(self.path) not in known.files:
            with open(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
                reached = Extent().after(_lines_from(file, 0))
                os.fsync(file.fileno())
                _sync_entry(self.path)  # first: what is remembered must be there
                self._remember(replace(known, files={**known.files, str(self.path): reached}))

    def begin_again(self, head: SignedHead) -> Path | None:
        """Begin a new file with `head`, and forget the old memory; where the old file lies now."""
        aside = None
        if self.path.exists():
            aside = self.path.with_name(f"{self.path.name}.until-{head.size}")
            self.path.rename(aside)
            _sync_entry(aside)
        self._remember(Memory())
        self.begin()
        self.add(head)
        return aside

    def adopt(self, head: SignedHead) -> None:
        """Append `head` to the file as it is, and remember both: a restored log may be shorter than before."""
        with open(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
            reached = Extent().after(append_line(file, head.model_dump_json()))
            _sync_entry(self.path)
            self._remember(Memory(head.size, head.root, head.at, {str(self.path): reached}))

    def memory(self) -> Memory | None:
        kept = self._keys.kept(self._name)
        if kept is None:
            return None
        try:
            found = json.loads(kept)
            files = {path: Extent(**extent) for path, extent in found.pop("files").items()}
            return Memory(**found, files=files)
        except (ValueError, TypeError, KeyError):
            raise Tampered("what the key's store remembers of the audit log cannot be read") from None

    def add(self, head: SignedHead) -> None:
        """Append `head` unless it is remembered already. Tampered if the file is shorter than remembered."""
        with _locked(self.path) as file:
            known = self.memory()
            extent = None if known is None else known.files.get(str(self.path))
            if known is None or extent is None:
                raise _lost(self.path, "is unknown to the key's store: its memory was removed")
            if (stored := file.seek(0, os.SEEK_END)) < extent.size_bytes:
                raise _lost(self.path, _cut(stored, extent))
            if head.size > known.size:
                reached = extent.after(append_line(file, head.model_dump_json(), start=extent.size_bytes))
                self._remember(
                    Memory(head.size, head.root, head.at, {**known.files, str(self.path): reached})
                )

    def problems(self, path: Path) -> list[str]:
        """Say what is wrong with the witness file at `path`, which the log says is kept for this home."""
        try:
            known = self.memory()
        except Tampered as error:
            return [f"{error.message[0].upper()}{error.message[1:]}. {_fix()}"]
        if known is None or str(path) not in known.files:
            return [f"The key's store has no memory of the witness {path}: it was removed. {_fix()}"]
        try:
            content = path.read_bytes()
        except OSError as fault:
            return [f"The witness {path} binds this log, and is gone ({fault.strerror}). {_fix()}"]
        return [f"The witness {path} {fault}. {_fix()}" for fault in _faults(content, known.files[str(path)])]

    def _remember(self, memory: Memory) -> None:
        self._keys.keep(self._name, json.dumps(asdict(memory)).encode())


def _sync_entry(path: Path) -> None:
    """Flush the folder of `path`: a file whose name is not on disk is lost with the power."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def append_line(file: IO[bytes], line: str, *, start: int = 0) -> bytes:
    """Append one line and make it durable; the lines from byte `start` on. What a crash left unfinished is cut off."""
    lines = _lines_from(file, start)
    file.truncate(start + len(lines))
    file.seek(start + len(lines))
    file.write(line.encode() + b"\n")
    file.flush()
    os.fsync(file.fileno())
    return lines + line.encode() + b"\n"


def _lines_from(file: IO[bytes], start: int) -> bytes:
    """Return the complete lines from byte `start` on."""
    file.seek(start)
    content = file.read()
    return content[: content.rfind(b"\n") + 1]


def _cut(stored: int, extent: Extent) -> str:
    return f"was cut: it had {extent.size_bytes} bytes, and has {stored}"


def _faults(content: bytes, extent: Extent) -> list[str]:
    if len(content) < extent.size_bytes:
        return [_cut(len(content), extent)]
    if Extent().after(content[: extent.size_bytes]) != extent:
        return ["was altered: its lines are not those that were written"]
    return []


@contextmanager
def _locked(path: Path) -> Iterator[IO[bytes]]:
    """Open the witness for one process at a time."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as fault:
        raise _lost(path, f"is gone ({fault.strerror})") from None
    with open(handle, "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def _lost(path: Path, why: str) -> Tampered:
    return Tampered(
        f"the witness {path}, which binds the audit log, {why}", faults=[Fault(where=str(path), fix=ACCEPT)]
    )


def _fix() -> str:
    return f"{ACCEPT[0].upper()}{ACCEPT[1:]}."
