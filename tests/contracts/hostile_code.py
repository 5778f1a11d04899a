"""What hostile user code tries. Run by the sandbox tests inside each sandbox; standard library only.

Its one argument is a JSON object of targets; it prints a JSON object with what each attack brought home.
"""

from __future__ import annotations

import ctypes
import glob
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

PTRACE_SEIZE = 0x4206


def main(targets: dict[str, Any]) -> None:
    attacks: dict[str, Callable[[], str]] = {
        "read key": lambda: Path(targets["key"]).read_text(),
        "read database": lambda: Path(targets["database"]).read_text(),
        "list home": lambda: " ".join(os.listdir(targets["home"])),
        "write into home": lambda: str(Path(targets["home"], "planted").write_text("planted")),
        "read neighbour": lambda: Path(targets["neighbour"], "secret").read_text(),
        "list neighbour": lambda: " ".join(os.listdir(targets["neighbour"])),
        "write into neighbour": lambda: str(Path(targets["neighbour"], "planted").write_text("planted")),
        "read any environment": read_every_environment,
        "read platform environment": lambda: read_environment(f"/proc/{targets['pid']}/environ"),
        "read platform memory": lambda: read_memory(targets["pid"], targets["address"], targets["length"]),
        "trace platform": lambda: trace(targets["pid"]),
        "write outside": lambda: str(Path(targets["open"], "planted").write_text("planted")),
        "connect": lambda: connect(targets["port"]),
        "own environment": lambda: json.dumps(dict(os.environ)),
        "own status": lambda: Path("/proc/self/status").read_text(),
        "signal platform": lambda: terminate(targets["pid"]),
    }
    print(json.dumps({name: attempt(attack) for name, attack in attacks.items()}))


def attempt(attack: Callable[[], str]) -> dict[str, str]:
    try:
        return {"loot": attack()}
    except OSError as error:
        return {"error": str(error)}


def read_environment(path: str) -> str:
    return Path(path).read_bytes().decode(errors="replace")


def read_every_environment() -> str:
    paths = glob.glob("/proc/[0-9]*/environ")
    return " ".join(attempt(partial(read_environment, path)).get("loot", "") for path in paths)


def read_memory(pid: int, address: int, length: int) -> str:
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        memory.seek(address)
        return memory.read(length).decode(errors="replace")


def trace(pid: int) -> str:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.restype = ctypes.c_long
    if libc.ptrace(PTRACE_SEIZE, pid, None, None) != 0:
        raise OSError(ctypes.get_errno(), "ptrace")
    return "attached"


def terminate(pid: int) -> str:
    os.kill(pid, signal.SIGTERM)
    return "sent"


def connect(port: int) -> str:
    with socket.create_connection(("127.0.0.1", port), timeout=5):
        return "connected"


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
