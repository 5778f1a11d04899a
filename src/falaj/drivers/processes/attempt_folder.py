"""The files by which one attempt is known: written by the launcher and the shim, never seen by user code."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOCK_TIMEOUT_S = 1.0
BOOT_ID, PROCESSES = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")


@dataclass(frozen=True)
class AttemptFolder:
    """`lock` is held while the shim lives; `started` is made just before the user's code is, and stays.

    It tells in which run of the machine that was.
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
        """Empty; its length is what the attempt holds on the disk, once that has become of interest."""
        return self.path / "usage"

    @property
    def cgroup(self) -> Path:
        """Which cgroup was made for it, so that it can be removed after a shim that was killed."""
        return self.path / "cgroup.json"

    @property
    def error_log(self) -> Path:
        """What the shim itself had to say: empty unless it has a bug."""
        return self.path / "shim.err"

    def is_from_earlier_boot(self) -> bool:
        """Whether the machine was started anew since: whatever ran then went down with it."""
        with contextlib.suppress(OSError):
            told = self.started.read_text()
            return bool(told) and told != boot_identity()
        return False

    def acquire(self) -> int | None:
        """The lock, for as long as the descriptor is open; none if another shim has it or had it before."""
        lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                # A look by `is_held` lasts for microseconds; another shim stays, and says so soon.
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
        """Whether a shim lives."""
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
    """Put `content` there, whole or not at all, for good."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}")
    try:
        with open(draft, "x", encoding="utf-8", opener=open_private) as file:
            json.dump(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    sync_directory(path.parent)


def read_json(path: Path) -> dict[str, Any] | None:
    """What `write` put there; none if it did not."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return found


def create_marker(path: Path, text: str = "") -> None:
    """Make a short file for good; FileExistsError if it is there."""
    with open(path, "x", encoding="utf-8", opener=open_private) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    sync_directory(path.parent)


def boot_identity() -> str:
    """One boot of this machine, or of the container with processes of its own; empty where that cannot be told."""
    try:
        return f"{BOOT_ID.read_text().strip()} {os.readlink(PROCESSES)}"
    except OSError:
        return ""


def sync_directory(folder: Path) -> None:
    """Have the names in `folder` survive a power cut."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
