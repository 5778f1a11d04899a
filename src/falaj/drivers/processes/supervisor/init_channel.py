"""The supervisor's end of the channel to the init process inside the sandbox."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
from pathlib import Path
from typing import Any, NamedTuple

SOCKET = ".falaj"
REPORT_LIMIT_BYTES = 4096
LARGEST_NUMBER = 100_000
CREDENTIALS = struct.Struct("3i")  # ucred: pid, uid, gid


class InitReport(NamedTuple):
    """How the ranks ended: the first one that failed, if any."""

    rank: int | None
    exit_code: int | None
    signal: int | None


class InitChannel:
    """A socket in the attempt's directory for one peer, which connects before any user code runs."""

    def __init__(self, directory: Path) -> None:
        os.chdir(directory)  # the path of a socket is limited to 108 bytes: both ends use the bare name
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(SOCKET)
        os.chmod(SOCKET, 0o666)  # noqa: S103 - the peer may have another uid; the directory keeps others out
        self._socket.listen(1)
        self._received = b""
        self.is_connected = False

    def fileno(self) -> int:
        return self._socket.fileno()

    def accept(self) -> None:
        with self._socket as listener:
            self._socket, _ = listener.accept()
        self.is_connected = True
        with contextlib.suppress(FileNotFoundError):
            os.unlink(SOCKET)

    def peer_pid(self) -> int:
        """Return the pid of the peer in our pid namespace."""
        pid, _uid, _gid = CREDENTIALS.unpack(
            self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
        )
        return int(pid)

    def receive(self) -> bool:
        """Receive what is there. Return False once the peer is gone."""
        try:
            said = self._socket.recv(REPORT_LIMIT_BYTES)
        except ConnectionError:
            return False
        self._received = (self._received + said)[-REPORT_LIMIT_BYTES:]
        return bool(said)

    def send(self, word: str) -> None:
        with contextlib.suppress(OSError):  # the peer has just ended
            self._socket.sendall(word.encode() + b"\n")

    def request(self) -> str | None:
        """Return the cgroup that the peer asks to be moved to, if any."""
        *lines, unfinished = self._received.split(b"\n")
        for at, line in enumerate(lines):
            leaf = (parse_message(line) or {}).get("enter")
            if isinstance(leaf, str):
                self._received = b"\n".join([*lines[at + 1 :], unfinished])
                return leaf
        return None

    def report(self) -> InitReport | None:
        """Return how the ranks ended; none if the peer did not report it."""
        for line in reversed(self._received.splitlines()):
            with contextlib.suppress(ValueError, KeyError, TypeError):
                found = parse_message(line) or {}
                return InitReport(**{name: checked_number(found[name]) for name in InitReport._fields})
        return None


def parse_message(line: bytes) -> dict[str, Any] | None:
    """Return one message; none if it is invalid: user code may have obtained the socket."""
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(line)
        return found if isinstance(found, dict) else None
    return None


def checked_number(value: object) -> int | None:
    if value is None or (isinstance(value, int) and 0 <= value < LARGEST_NUMBER):
        return value
    raise TypeError
