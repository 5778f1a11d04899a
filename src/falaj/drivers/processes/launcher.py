"""Launches attempts at jobs as processes of this machine."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote
from uuid import uuid4

from falaj.drivers.processes.folder import Folder, read, write
from falaj.drivers.processes.order import Order, Walls
from falaj.errors import InvalidInput, Unavailable
from falaj.ports.launcher import AttemptState, Launch

LOG_LIMIT_BYTES = 256 * 1024 * 1024
LONGEST_NAME = 200
START_SECONDS = 30
END_SECONDS = 10
LOST = "What watched over it was killed, and its code with it"
PACKAGES = Path(__file__).parents[3]


class ProcessLauncher:
    """Attempts as local processes; `root` holds what is known of each, closed to user code.

    `walls` is asked at each start how user code is kept apart here; it raises IsolationRefused where it may not
    run at all. Attempts' own directories must lie outside of `root`.
    """

    def __init__(
        self, root: Path, *, walls: Callable[[], Walls], log_limit_bytes: int = LOG_LIMIT_BYTES
    ) -> None:
        self._root = root.absolute()
        self._walls = walls
        self._log_limit_bytes = log_limit_bytes

    def start(self, launch: Launch) -> None:
        folder = self._folder(launch.attempt)
        if folder.started.exists() or folder.is_held():
            return
        check(launch)
        order = Order(launch, self._walls(), self._log_limit_bytes)
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.path.mkdir(mode=0o700, exist_ok=True)
        write(folder.launch, order.to_json())
        try:
            said = start_shim(folder)
        except subprocess.TimeoutExpired:
            said = f"no sign of life within {START_SECONDS} s"
        if said:
            raise Unavailable(f"{launch.attempt} could not be started: {said}")

    def state(self, attempt: str) -> AttemptState:
        folder = self._folder(attempt)
        ended = read(folder.ended)
        if ended is None and folder.is_held():
            running = read(folder.running)
            return (
                AttemptState("running", started_at=moment(running)) if running else AttemptState("starting")
            )
        ended = ended or read(folder.ended)  # it may have ended between the two looks
        if ended is not None:
            return AttemptState(
                "ended",
                exit_code=ended["exit_code"],
                signal=ended["signal"],
                reason=ended["reason"],
                started_at=moment(ended),
                ended_at=moment(ended, "ended_at"),
            )
        if folder.started.exists():
            return AttemptState("lost", reason=why_lost(folder), started_at=moment(read(folder.running)))
        return AttemptState("unknown")

    def stop(self, attempt: str, *, grace_s: float) -> None:
        folder = self._folder(attempt)
        if folder.is_held() and not folder.ended.exists():
            write(folder.stop, {"grace_s": grace_s})

    def log(self, attempt: str, *, offset: int, limit: int) -> bytes:
        try:
            with open(self._folder(attempt).log, "rb") as file:
                file.seek(offset)
                return file.read(limit)
        except FileNotFoundError:
            return b""

    def forget(self, attempt: str) -> None:
        folder = self._folder(attempt)
        self.stop(attempt, grace_s=0)
        deadline = time.monotonic() + END_SECONDS
        while folder.is_held():
            if time.monotonic() > deadline:
                raise Unavailable(f"{attempt} does not end: it was killed {END_SECONDS} s ago")
            time.sleep(0.01)
        order = read(folder.launch)
        if order is not None:
            remove(Path(order["launch"]["directory"]))
        remove(folder.path)

    def _folder(self, attempt: str) -> Folder:
        name = quote(attempt, safe="")
        if not name.strip(".") or len(name) > LONGEST_NAME:
            allowed = f"1 to {LONGEST_NAME} characters, and not only dots"
            raise InvalidInput.at("attempt", given=attempt, allowed=allowed)
        return Folder(self._root / name)


def start_shim(folder: Folder) -> str:
    """Empty as soon as a shim has the lock, and goes its own way; or what went wrong.

    It gets nothing of our environment, which holds secrets.
    """
    done = subprocess.run(
        [sys.executable, "-P", "-m", "falaj.drivers.processes.shim", str(folder.path)],
        cwd="/",
        env={"PATH": os.defpath, "PYTHONPATH": str(PACKAGES)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        start_new_session=True,
        timeout=START_SECONDS,
    )
    if done.returncode == 0:
        return ""
    said = done.stderr.decode(errors="replace").strip().splitlines()
    return said[-1] if said else f"exit code {done.returncode}"


def check(launch: Launch) -> None:
    """Refuse what could never run."""
    if not launch.command:
        raise InvalidInput.at("command", given="nothing", allowed="a program and its arguments")
    if launch.processes < 1:
        raise InvalidInput.at("processes", given=launch.processes, allowed="1 or more")
    if not (launch.directory / "code").is_dir():
        raise InvalidInput.at(
            str(launch.directory), given="no folder code/ in it", allowed="a folder that holds code/"
        )


def why_lost(folder: Folder) -> str:
    said = folder.faults.read_text(errors="replace").split("\n") if folder.faults.exists() else []
    fault = next((line for line in reversed(said) if line), "")
    return f"What watched over it failed: {fault}" if fault else LOST


def moment(found: dict[str, Any] | None, name: str = "started_at") -> datetime | None:
    return None if found is None else datetime.fromtimestamp(found[name], UTC)


def remove(folder: Path) -> None:
    """Remove a folder that user code has filled, however deep: links in it are not followed, closed folders are opened.

    Folders are moved up to the top before they are emptied, so neither depth nor open files add up. Nobody is left
    who could put a link in the place of one meanwhile.
    """
    if not folder.exists():
        return
    top = opened(folder)
    try:
        while inside := empty(top, into=None):
            for name in inside:
                below = opened(name, top)
                try:
                    empty(below, into=top)
                finally:
                    os.close(below)
                os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)
    folder.rmdir()


def empty(folder: int, *, into: int | None) -> list[str]:
    """Unlink what is no folder in `folder`, and move its folders `into` another; the names of those that stay."""
    staying = []
    for name in os.listdir(folder):
        if not stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            os.unlink(name, dir_fd=folder)
        elif into is None:
            staying.append(name)
        else:
            os.close(opened(name, folder))  # a closed one could not be moved
            os.rename(name, f".{uuid4().hex}", src_dir_fd=folder, dst_dir_fd=into)
    return staying


def opened(folder: str | Path, above: int | None = None) -> int:
    """A descriptor of a folder, in which we may change everything from now on."""
    os.chmod(folder, 0o700, dir_fd=above)
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
