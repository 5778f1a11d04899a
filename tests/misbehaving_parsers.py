"""Parsers that do what bad bytes could make a parser do; they run in the parser process."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from falaj.errors import Denied, InvalidInput
from falaj.ports.parsers import ByteSource, Parsed

state: list[str] = []


def echo(sources: Sequence[ByteSource], options: Mapping[str, Any]) -> Parsed:
    return Parsed(
        {"options": dict(options)}, b"".join(each.read_range(0, each.size_bytes) for each in sources)
    )


def shout(sources: Sequence[ByteSource], options: Mapping[str, Any]) -> Parsed:
    for descriptor in (1, 2):
        os.write(descriptor, bytes(1 << 20))
    return Parsed({"said": True})


def crash(sources: Sequence[ByteSource], options: Mapping[str, Any]) -> Parsed:
    ctypes.string_at(1)
    return Parsed()


def hang(sources: Sequence[ByteSource], options: Mapping[str, Any]) -> Parsed:
    if options["stubborn"]:
        signal.alarm(0)
    time.sleep(600)
    return Parsed()


def fill_memory(sources: Sequence[ByteSource], options: Mapping[str, Any]) -> Parsed:
    return Parsed(content=bytearray(options["size_bytes"]))


def write_file(sources: Sequence[ByteSource], options: Mapping[str, Any]) -> Parsed:
    Path("/tmp/written-by-a-parser").write_bytes(b"x")
    return Parsed()


def refuse(sources: Sequence[ByteSource], options: Mapping[str, Any]) -> Parsed:
    raise InvalidInput.at("content", given="nonsense", allowed="sense")


def stumble(sources: Sequence[ByteSource], options: Mapping[str, Any]) -> Parsed:
    raise IndexError("nobody has thought of such bytes")


def pretend(sources: Sequence[ByteSource], options: Mapping[str, Any]) -> Parsed:
    raise Denied("a parser cannot say this")


def kill_parent(sources: Sequence[ByteSource], options: Mapping[str, Any]) -> Parsed:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(5)
    return Parsed()


def remember(sources: Sequence[ByteSource], options: Mapping[str, Any]) -> Parsed:
    state.append("x")
    return Parsed({"count": len(state)})


def look_around(sources: Sequence[ByteSource], options: Mapping[str, Any]) -> Parsed:
    """What the process can see of the platform."""
    return Parsed(
        {
            "environment": sorted(os.environ),
            "secret": _reads(Path(options["secret"])),
            "parent_memory": _reads(Path(f"/proc/{os.getppid()}/environ")),
            "network": _connects(options["port"]),
            "descriptors": _open_files(),
        }
    )


def read_wildly(sources: Sequence[ByteSource], options: Mapping[str, Any]) -> Parsed:
    """Ask the platform for bytes that are not of the source."""
    (source,) = sources
    closure = source.read_range.__closure__
    assert closure is not None
    channel = next(cell.cell_contents for cell in closure if isinstance(cell.cell_contents, socket.socket))
    from falaj.drivers.parsing.messages import receive_bytes, send_message

    send_message(channel, {"read": options["asked"]})
    return Parsed(content=receive_bytes(channel, limit=1 << 20))


def _open_files() -> list[str]:
    """What the descriptors of this process lead to, but for those that every process of this Python has."""
    usual = {os.devnull, "/dev/urandom", os.path.realpath(sys.executable)}
    descriptors = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    found = {os.readlink(path) for path in descriptors if path.is_symlink()}  # one was that of listdir
    return sorted(found - usual)


def _reads(path: Path) -> bool:
    try:
        return bool(path.read_bytes())
    except OSError:
        return False


def _connects(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
    except OSError:
        return False
