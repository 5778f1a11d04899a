"""The small files beside the checkpoints of a run: metrics and parameters, which end no run when they give trouble.

What finds no room on the disk is said once and written with what comes next; what cannot be read is passed over.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path


class WriteFailures:
    """Says once of each file that it cannot be written, until it can be again."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        self._notify = notify
        self._failing: set[str] = set()

    def attempt(self, name: str, write: Callable[[], None]) -> None:
        """Call `write`; if the system refuses it, say so and go on."""
        try:
            write()
        except OSError as error:
            if name not in self._failing:
                self._failing.add(name)
                why = error.strerror or error
                self._notify(
                    f"{name} cannot be written: {why}. Going on; it is tried again from time to time"
                )
        else:
            self._failing.discard(name)


class AppendOnlyFile:
    """A file that lines are appended to, all of them or none: one that is there twice would count twice."""

    def __init__(self, path: Path) -> None:
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        size = os.fstat(self._handle).st_size
        is_cut = size > 0 and os.pread(self._handle, 1, size - 1) != b"\n"
        self._waiting = b"\n" if is_cut else b""  # what comes next must not be appended to half a line

    @property
    def waiting(self) -> int:
        """How many lines have found no room so far."""
        return self._waiting.removeprefix(b"\n").count(b"\n")

    def append(self, lines: bytes = b"") -> None:
        """Write what is waiting, and `lines`. OSError: all of it is waiting now."""
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
    """A file of names and values, of which the first value of a name stays."""

    def __init__(self, path: Path) -> None:
        self._path, self._damaged = path, path.with_name(f"{path.name}.damaged")
        self._waiting: dict[str, str] = {}

    @property
    def was_damaged(self) -> bool:
        """Whether there was, at some time, a file that could not be read; it lies beside this one."""
        self.read()
        return self._damaged.exists()

    @property
    def waiting(self) -> int:
        """How many values have found no room so far."""
        return len(self._waiting)

    def read(self) -> dict[str, str]:
        """What is there; one that makes no sense is set aside."""
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
        """Write what is waiting, and `values`. OSError: all of it is waiting now."""
        self._waiting = {**(values or {}), **self._waiting}
        if self._waiting:
            replace_file(self._path, json.dumps(self._waiting | self.read()).encode())
            self._waiting = {}


def replace_file(path: Path, data: bytes) -> None:
    """Write aside, then rename: a reader sees the old bytes or the new ones."""
    aside = path.with_name(f".{path.name}.part")
    aside.write_bytes(data)
    aside.replace(path)
