"""The metrics and parameters files of a run. Failures to write or read them do not end the run.

A failed write is reported once and retried with the next write; unreadable content is skipped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path


class WriteFailures:
    """Reports once per file that it cannot be written, until it can be written again."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        self._notify = notify
        self._failing: set[str] = set()

    def attempt(self, name: str, write: Callable[[], None]) -> None:
        """Call `write`; report an OSError instead of raising it."""
        try:
            write()
        except OSError as error:
            if name not in self._failing:
                self._failing.add(name)
                why = error.strerror or error
                self._notify(f"{name} cannot be written: {why}. Training continues; the write is retried")
        else:
            self._failing.discard(name)


class AppendOnlyFile:
    """A file to which lines are appended all or none, since a repeated line would count twice."""

    def __init__(self, path: Path) -> None:
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        size = os.fstat(self._handle).st_size
        is_cut = size > 0 and os.pread(self._handle, 1, size - 1) != b"\n"
        self._waiting = b"\n" if is_cut else b""  # the next line must not be appended to an incomplete one

    @property
    def waiting(self) -> int:
        """The number of lines not written yet."""
        return self._waiting.removeprefix(b"\n").count(b"\n")

    def append(self, lines: bytes = b"") -> None:
        """Write the pending lines and `lines`. After an OSError all of them are pending."""
        self._waiting += lines
        size = os.fstat(self._handle).st_size
        left = memoryview(self._waiting)
        try:
            while left:
                left = left[os.write(self._handle, left) :]
        except OSError:
            os.ftruncate(self._handle, size)
            raise
        self._waiting = b""

    def close(self) -> None:
        os.close(self._handle)


class ParamsFile:
    """A file of names and values; the first value of a name is kept."""

    def __init__(self, path: Path) -> None:
        self._path, self._damaged = path, path.with_name(f"{path.name}.damaged")
        self._waiting: dict[str, str] = {}

    @property
    def was_damaged(self) -> bool:
        """Whether an unreadable file was found at some time; it is kept beside this one."""
        self.read()
        return self._damaged.exists()

    @property
    def waiting(self) -> int:
        """The number of values not written yet."""
        return len(self._waiting)

    def read(self) -> dict[str, str]:
        """Return the content; an invalid file is renamed."""
        if not self._path.exists():
            return {}
        try:
            found = json.loads(self._path.read_bytes())
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            self._path.replace(self._damaged)
            return {}
        return {name: str(value) for name, value in found.items()}

    def add(self, values: Mapping[str, str] | None = None) -> None:
        """Write the pending values and `values`. After an OSError all of them are pending."""
        self._waiting = {**(values or {}), **self._waiting}
        if self._waiting:
            replace_file(self._path, json.dumps(self._waiting | self.read()).encode())
            self._waiting = {}


def replace_file(path: Path, data: bytes) -> None:
    """Write to a temporary file, then rename it: a reader sees the old bytes or the new ones."""
    aside = path.with_name(f".{path.name}.part")
    aside.write_bytes(data)
    aside.replace(path)
