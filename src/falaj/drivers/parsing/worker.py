"""The parser process: imports the parsers once, then forks a child for each call, which parses and ends.

    python -I -m falaj.drivers.parsing.worker

Its standard output is a socket of the platform's. The first message names the parsers; each later one is a call, with
a socket of its own for the child. A child shares nothing with the next: what bad bytes do to it ends with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from falaj.drivers.parsing.messages import (
    RANGE_LIMIT,
    Broken,
    receive_into,
    receive_message,
    send_message,
)
from falaj.errors import FalajError
from falaj.ports.parsers import ByteSource, Parsed, Parser

PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4
OPEN_FILES = 64
ADDRESSES_BYTES = 8 << 30
"""Addresses of libraries, stacks and reserves, beside the memory; shared memory counts here only."""
NICE = 5
"""The platform itself goes first."""


def main() -> None:
    control = socket.socket(fileno=os.dup(1))
    os.dup2(2, 1)  # nothing but messages goes to the platform
    os.chdir("/")  # the platform removes the directory that the sandbox was started in
    settings = receive_message(control)
    sys.path.extend(settings["folders"])
    parsers = load(settings["parsers"])
    refuse_tracing()
    silence()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries the children
    gc.freeze()  # children share these pages as long as nobody touches them
    send_message(control, {"ready": True})
    with contextlib.suppress(Broken, OSError):
        while True:
            call, channel = receive_call(control)
            if os.fork() == 0:
                control.close()
                work(channel, call, parsers)
            channel.close()


def load(named: Mapping[str, str]) -> dict[str, Parser]:
    """The functions that are named as `package.module:function`. Their modules may `warm_up` what children share."""
    found = {}
    for name, place in named.items():
        path, _, function = place.partition(":")
        module = importlib.import_module(path)
        found[name] = getattr(module, function)
        getattr(module, "warm_up", lambda: None)()
    return found


def refuse_tracing() -> None:
    """Keep the children, which have the same uid, from reading or changing this process."""
    control_process(PR_SET_DUMPABLE, 0)


def silence() -> None:
    """Drop what is printed from now on: nobody reads it, and a full pipe would hold up the children."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    os.close(nothing)


def control_process(option: int, value: int) -> None:
    """Call prctl, where there is one."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, *(ctypes.c_ulong(each) for each in (value, 0, 0, 0)))


def receive_call(control: socket.socket) -> tuple[dict[str, Any], socket.socket]:
    mark, descriptors, _, _ = socket.recv_fds(control, 1, 1)
    if not mark or len(descriptors) != 1:
        raise Broken("the platform has closed the channel")
    return receive_message(control), socket.socket(fileno=descriptors[0])


def work(channel: socket.socket, call: Mapping[str, Any], parsers: Mapping[str, Parser]) -> NoReturn:
    """Answer one call, and end."""
    try:
        limit(memory_bytes=call["memory_bytes"], seconds=call["seconds"])
        answer(channel, call, parsers)
    except BaseException:
        os._exit(1)
    os._exit(0)


def limit(*, memory_bytes: int, seconds: int) -> None:
    """Limit this process for good. The alarm kills it: its default action is kept, and no library changes it."""
    control_process(PR_SET_PDEATHSIG, signal.SIGKILL)  # when the process that forked it ends
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.nice(NICE)
    signal.alarm(seconds)
    limits = {
        resource.RLIMIT_CPU: 4 * seconds,  # several threads
        resource.RLIMIT_DATA: memory_bytes,
        resource.RLIMIT_AS: memory_bytes + ADDRESSES_BYTES,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: OPEN_FILES,
    }
    for name, value in limits.items():
        resource.setrlimit(name, (value, value))


def answer(channel: socket.socket, call: Mapping[str, Any], parsers: Mapping[str, Parser]) -> None:
    try:
        parsed = run(channel, call, parsers)
    except MemoryError:  # pyarrow's is one, too
        return send_message(channel, {"no_memory": True})
    except FalajError as error:
        faults = [fault.model_dump() for fault in error.faults]
        return send_message(channel, {"error": [error.code, error.message, faults]})
    except Exception:
        return send_message(channel, {"failed": traceback.format_exc()})
    size_bytes = memoryview(parsed.content).nbytes
    send_message(channel, {"facts": dict(parsed.facts), "size_bytes": size_bytes})
    channel.sendall(parsed.content)


def run(channel: socket.socket, call: Mapping[str, Any], parsers: Mapping[str, Parser]) -> Parsed:
    sources: Sequence[ByteSource] = [
        remote_source(channel, number, size_bytes) for number, size_bytes in enumerate(call["sizes"])
    ]
    return parsers[call["name"]](sources, call["options"])


def remote_source(channel: socket.socket, number: int, size_bytes: int) -> ByteSource:
    """A source whose bytes the platform sends when it is asked for a range."""

    def read_range(offset: int, length: int) -> bytes:
        length = max(0, min(length, size_bytes - offset))
        content, place = bytearray(length), 0
        while place < length:
            wanted = min(length - place, RANGE_LIMIT)
            send_message(channel, {"read": [number, offset + place, wanted]})
            receive_into(channel, memoryview(content)[place : place + wanted])
            place += wanted
        return bytes(content)

    return ByteSource(size_bytes, read_range)


if __name__ == "__main__":
    main()
