"""The state of one attempt on disk: written by the launcher and the supervisor, hidden from user code."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from falaj.drivers.fsync import sync_directory
from falaj.ports.machine.boot import boot_identity

LOCK_TIMEOUT_S = 1.0
LOST = "Its supervisor was killed, and its processes with it"


@dataclass(frozen=True)
class AttemptFolder:
    """The folder of one attempt.

    The supervisor holds `lock` while it lives. It creates `started` just before it starts the user's code; the file
    holds the identity of the boot, and is never removed before the folder is.
    """

    path: Path

    @property
    def launch(self) -> Path:
        return self.path / "launch.json"

    @property
    def started(self) -> Path:
        return self.path / "started"

    @property
    def running(self) -> Path:
        return self.path / "running.json"

    @property
    def stop(self) -> Path:
        return self.path / "stop.json"

    @property
    def ended(self) -> Path:
        return self.path / "ended.json"

    @property
    def log(self) -> Path:
        return self.path / "log"

    @property
    def usage(self) -> Path:
        """An empty file whose length is the disk usage of the attempt, written while the volume is short of space."""
        return self.path / "usage"

    @property
    def cgroup(self) -> Path:
        """The path of its cgroup, so that it can be removed after its supervisor was killed."""
        return self.path / "cgroup.json"

    @property
    def error_log(self) -> Path:
        """Errors of the supervisor itself: empty unless it has a bug."""
        return self.path / "supervisor.err"

    def is_from_earlier_boot(self) -> bool:
        """Return whether the machine has been restarted since the attempt started."""
        with contextlib.suppress(OSError):
            started_in = self.started.read_text()
            return bool(started_in) and started_in != boot_identity()
        return False

    def explain_loss(self) -> str:
        """Return why there is no result of a supervisor that has ended."""
        lines = self.error_log.read_text(errors="replace").split("\n") if self.error_log.exists() else []
        fault = next((line for line in reversed(lines) if line), "")
        return f"Its supervisor failed: {fault}" if fault else LOST

    def acquire(self) -> int | None:
        """Acquire the lock until the returned descriptor is closed; none if a supervisor holds it or held it before."""
        lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                # `is_locked` holds the lock for microseconds; another supervisor keeps it, and creates `started` soon.
                if self.started.exists() or time.monotonic() > deadline:
                    os.close(lock)
                    return None
                time.sleep(0.005)
                continue
            if not self.started.exists():
                return lock
            os.close(lock)
            return None

    def is_locked(self) -> bool:
        """Return whether a supervisor is alive."""
        try:
            lock = os.open(self.path / "lock", os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(lock)
        return False


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write `content` atomically and durably."""
    with _draft(path) as draft:
        with open(draft, "x", encoding="utf-8", opener=open_private) as file:
            json.dump(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    sync_directory(path.parent)


@contextlib.contextmanager
def _draft(path: Path) -> Iterator[Path]:
    """Yield a path beside `path`, which is removed afterwards if it is still there."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}")
    try:
        yield draft
    finally:
        draft.unlink(missing_ok=True)


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the content of a file that `write_json` wrote; none if it does not exist."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return found


def create_marker(path: Path, text: str = "") -> None:
    """Create a short file durably, whole or not at all. Raise FileExistsError if it exists."""
    with _draft(path) as draft:
        with open(draft, "x", encoding="utf-8", opener=open_private) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.link(draft, path)
    sync_directory(path.parent)


def open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
