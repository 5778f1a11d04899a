"""The queue of the writers of a table: one at a time, in the order in which they came, across threads and processes.

Every writer holds a lock on a ticket file of its own. The kernel drops the lock when the process ends, however it ends,
so the ticket of a killed writer is seen to be left behind, and is removed by the next one.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from falaj.errors import Unavailable

POLL_S = 0.01
LOCK, LOCK_S = "lock", 10.0
"""The file whose lock is held for a moment while tickets are drawn or looked at, and how long it is waited for."""


@contextmanager
def turn(folder: Path, *, wait_s: float, subject: str) -> Iterator[None]:
    """Wait for the turn of this writer, and hold it. Raise Unavailable if it has not come after `wait_s` seconds."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    number, ticket = _draw(folder)
    try:
        _wait(folder, number, wait_s=wait_s, subject=subject)
        yield
    finally:
        (folder / str(number)).unlink(missing_ok=True)
        os.close(ticket)


def _draw(folder: Path) -> tuple[int, int]:
    """Create the next ticket, and return its number and the handle that locks it."""
    with _locked(folder):
        number = max(_numbers(folder), default=0) + 1
        ticket = os.open(folder / str(number), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(ticket, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return number, ticket


def _wait(folder: Path, number: int, *, wait_s: float, subject: str) -> None:
    until = time.monotonic() + wait_s
    while ahead := _living(folder, before=number):
        while _is_held(folder / str(ahead[-1])):
            if time.monotonic() > until:
                raise Unavailable(
                    f"{subject}: {len(ahead)} other{'s are' if len(ahead) > 1 else ' is'} before this one, which has "
                    f"waited for {wait_s:g} s; nothing was changed; try again later"
                )
            time.sleep(POLL_S)


def _living(folder: Path, *, before: int) -> list[int]:
    """Return the tickets of living writers that came earlier, and remove those of the others."""
    with _locked(folder):
        living = []
        for number in sorted(each for each in _numbers(folder) if each < before):
            if _is_held(folder / str(number)):
                living.append(number)
            else:
                (folder / str(number)).unlink(missing_ok=True)
        return living


def _numbers(folder: Path) -> list[int]:
    return [int(name) for name in os.listdir(folder) if name.isdecimal()]


def _is_held(ticket: Path) -> bool:
    try:
        handle = os.open(ticket, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    until = time.monotonic() + LOCK_S
    try:
        while not _locks(handle):
            if time.monotonic() > until:
                raise Unavailable(f"{folder / LOCK} stays locked: a process that holds it is stopped; end it")
            time.sleep(POLL_S / 10)
        yield
    finally:
        os.close(handle)


def _locks(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
