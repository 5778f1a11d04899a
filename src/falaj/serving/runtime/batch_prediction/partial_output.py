"""The unfinished output of a run: row groups in one growing file, and a journal of what of it counts.

A part counts once its bytes and then its line in the journal are on disk. What a killed run has written beyond that is
cut off when the next one goes on, so that no row is lost or written twice. The file gets its footer, and so becomes
Parquet, when all rows are there; whoever started the run then gives it its name.
"""

from __future__ import annotations

import base64
import errno
import fcntl
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

from falaj.errors import Conflict, Damaged, Unavailable
from falaj.serving.runtime.batch_prediction.parquet_footers import MAGIC, TAIL_BYTES, footer_of, joined_footer

DATA, JOURNAL, LOCK = "data", "journal", "lock"
FORMAT = 1
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class CountedOutput(NamedTuple):
    """What of an unfinished output counts: its rows, and the lengths of its files up to there."""

    rows: int
    data_bytes: int
    journal_bytes: int


class OutputKeeper(Protocol):
    """Keeps what of an unfinished output counts in another place as well, so that another process can go on there."""

    def begin(self, rows: int) -> None:
        """Note that the run goes on behind so many rows, which are not always those that were kept."""
        ...

    def offer(self, counted: CountedOutput, *, total: int) -> None:
        """Keep the output if it is time for that; `total` are the rows of the whole."""
        ...

    def keep(self, counted: CountedOutput) -> None:
        """Keep the output now: the run ends."""
        ...

    def is_stopping(self) -> bool:
        """Return whether the run is to end."""
        ...


class KeptHere:
    """The output is in its folder, and nowhere else."""

    def begin(self, rows: int) -> None: ...
    def offer(self, counted: CountedOutput, *, total: int) -> None: ...
    def keep(self, counted: CountedOutput) -> None: ...

    def is_stopping(self) -> bool:
        return False


class PartialOutput:
    """The files of a run in a folder of their own; use `open_partial`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows = 0
        self.header: dict[str, Any] = {}
        self.files: list[list[str]] = []
        """Names and fingerprints of the input files whose rows are done, the last one perhaps in part."""
        self._footers: list[tuple[bytes, int]] = []
        self._uncounted: list[dict[str, Any]] = []
        self._size = len(MAGIC)
        self._data: BinaryIO
        self._journal: BinaryIO

    def open(self, opened: ExitStack, *, restart: bool) -> None:
        """Open the files of an earlier run at the last part that counts, or empty ones; `opened` closes them."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._journal, self._data = (
            opened.enter_context(os.fdopen(os.open(self.folder / name, flags, 0o600), "r+b", buffering=0))
            for name in (JOURNAL, DATA)
        )
        if restart:
            self._journal.truncate(0)
        lines = self._counted_lines()
        if not any(line.get("rows") for _, line in lines):
            lines = []  # it did nothing, so nothing of it binds this run
        self._journal.seek(0)
        length = 0
        for text, line in lines:
            length += len(text)
            self._count(line)
        self._journal.truncate(length)
        self._journal.seek(length)
        if os.fstat(self._data.fileno()).st_size < self._size and self.rows:
            raise Damaged(
                f"{self.folder / DATA} is shorter than what its journal says; --restart begins anew"
            )
        self._data.truncate(self._size)
        os.pwrite(self._data.fileno(), MAGIC, 0)
        self._data.seek(self._size)

    def begin(self, header: dict[str, Any]) -> None:
        """Record what this run reads and with which model, before its first part."""
        self.header = {"format": FORMAT, **header}
        try:
            self._write_lines([self.header])
            _sync_folder(self.folder)
        except OSError as error:
            self._journal.truncate(0)
            raise self._failed(error) from None

    def forget(self) -> None:
        """Begin anew: nothing of the earlier run counts."""
        self.rows, self.header, self.files = 0, {}, []
        self._footers, self._uncounted, self._size = [], [], len(MAGIC)
        for file, length in ((self._journal, 0), (self._data, self._size)):
            file.truncate(length)
            file.seek(length)

    def counted(self) -> CountedOutput:
        """Return what counts, after a `commit`."""
        return CountedOutput(self.rows, self._size, self._journal.tell())

    def append(self, part: memoryview, *, rows: int, files: Sequence[tuple[str, str]]) -> None:
        """Write the row groups of a part, a whole Parquet file. It counts after the next `commit`.

        `files` are the input files that its rows come from, with their fingerprints.
        """
        footer = footer_of(part)
        groups = part[len(MAGIC) : len(part) - TAIL_BYTES - len(footer)]
        try:
            _write_all(self._data, groups)
        except OSError as error:
            self._data.truncate(self._size)
            self.commit()
            raise self._failed(error) from None
        known = {name for name, _ in self.files}
        line = {
            "rows": rows,
            "bytes": [self._size, self._size + len(groups)],
            "footer": base64.b64encode(zlib.compress(footer)).decode(),
            "files": [[name, mark] for name, mark in files if name not in known],
        }
        self._uncounted.append(line)
        self._count(line)

    def commit(self) -> None:
        """Make the parts that were appended count: they survive a kill and a power failure."""
        if not self._uncounted:
            return
        counted, lines, self._uncounted = self._journal.tell(), self._uncounted, []
        try:
            os.fsync(self._data.fileno())
            self._write_lines(lines)
        except OSError as error:  # what of it counts already is cut off again: this run is over
            self._journal.truncate(counted)
            self._data.truncate(lines[0]["bytes"][0])
            self.rows -= sum(line["rows"] for line in lines)
            raise self._failed(error) from None

    def finish(self) -> None:
        """Write the footer of the whole file. A killed run writes it again."""
        self.commit()
        try:
            _write_all(self._data, memoryview(joined_footer(self._footers)))
            os.fsync(self._data.fileno())
        except OSError as error:
            self._data.truncate(self._size)
            raise self._failed(error) from None

    def _count(self, line: dict[str, Any]) -> None:
        if "format" in line:
            self.header = line
            return
        start, end = line["bytes"]
        self.rows += line["rows"]
        self.files += line["files"]
        self._footers.append((zlib.decompress(base64.b64decode(line["footer"])), start - len(MAGIC)))
        self._size = end

    def _counted_lines(self) -> list[tuple[bytes, dict[str, Any]]]:
        """Return the lines of the journal up to the first that was not written completely."""
        found = []
        for text in self._journal.read().splitlines(keepends=True):
            checksum, _, content = text.partition(b" ")
            if not text.endswith(b"\n") or checksum != b"%08x" % zlib.crc32(content):
                break
            found.append((text, json.loads(content)))
        if found and found[0][1].get("format") != FORMAT:
            raise Conflict(f"{self.folder} was written by another version of Falaj; --restart begins anew")
        return found

    def _write_lines(self, lines: Sequence[dict[str, Any]]) -> None:
        texts = [json.dumps(line).encode() + b"\n" for line in lines]
        content = b"".join(b"%08x %s" % (zlib.crc32(text), text) for text in texts)
        _write_all(self._journal, memoryview(content))
        os.fsync(self._journal.fileno())

    def _failed(self, error: OSError) -> Unavailable:
        why = "the disk is full" if error.errno in FULL else str(error.strerror).lower()
        fix = "make room" if error.errno in FULL else "mend it"
        return Unavailable(
            f"writing the predictions failed after row {self.rows}: {why}; {fix}, then run the same command again: it "
            "goes on there"
        )


@contextmanager
def open_partial(folder: Path, *, restart: bool = False) -> Iterator[PartialOutput]:
    """Open the unfinished output in `folder`; Conflict while another run writes it."""
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise Conflict(f"another run writes to {folder}; wait for it, or choose another output") from None
        with ExitStack() as opened:
            output = PartialOutput(folder)
            output.open(opened, restart=restart)
            yield output
    finally:
        os.close(lock)


def _write_all(file: BinaryIO, content: memoryview) -> None:
    while content:
        content = content[file.write(content) :]


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
