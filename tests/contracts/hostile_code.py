"""What hostile user code tries. Run by the sandbox tests inside each sandbox; standard library only.

Its one argument is a JSON object of targets; it prints a JSON object with what each attack brought home.
"""

from __future__ import annotations

import ctypes
import glob
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

PTRACE_SEIZE = 0x4206
IN_CREATE = 0x100
IPPROTO_MPTCP = 262


def main(targets: dict[str, Any]) -> None:
    home, outside, pid = Path(targets["home"]), Path(targets["open"]), targets["pid"]
    attacks: dict[str, Callable[[], str]] = {
        "read key": lambda: Path(targets["key"]).read_text(),
        "read database": lambda: Path(targets["database"]).read_text(),
        "read key by hard link": lambda: linked(os.link, targets["key"]),
        "read key by symbolic link": lambda: linked(os.symlink, targets["key"]),
        "list home": lambda: " ".join(os.listdir(home)),
        "watch home": lambda: watch(home),
        "write into home": lambda: str((home / "planted").write_text("planted")),
        "open key to everyone": lambda: open_to_everyone(targets["key"]),
        "read neighbour": lambda: Path(targets["neighbour"], "secret").read_text(),
        "list neighbour": lambda: " ".join(os.listdir(targets["neighbour"])),
        "write into neighbour": lambda: str(Path(targets["neighbour"], "planted").write_text("planted")),
        "read shared memory": lambda: Path(targets["shared_memory"]).read_text(),
        "read any environment": read_every_environment,
        "read platform environment": lambda: read_environment(f"/proc/{pid}/environ"),
        "read platform memory": lambda: read_memory(pid, targets["address"], targets["length"]),
        "copy platform memory": lambda: copy_memory(pid, targets["address"], targets["length"]),
        "trace platform": lambda: trace(pid),
        "limit platform": lambda: str(resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))),
        "slow platform down": lambda: str(os.setpriority(os.PRIO_PROCESS, pid, 5)),
        "pin platform": lambda: pin(pid),
        "list processes": lambda: read_environment(f"/proc/{pid}/cmdline"),
        "ask for a path": lambda: str(outside.stat().st_mode),
        "write outside": lambda: str((outside / "planted").write_text("planted")),
        "delete outside": lambda: str((outside / "deleted").unlink()),
        "move out": lambda: move_out(outside / "moved-out"),
        "move in": lambda: str((outside / "moved").rename("moved-in")),
        "truncate": lambda: str(os.truncate(targets["given"], 0)),
        "truncate by opening": lambda: str(os.close(os.open(targets["input"], os.O_RDONLY | os.O_TRUNC))),
        "connect": lambda: connect(targets["port"]),
        "connect by sending": lambda: fast_open(targets["port"]),
        "connect on several paths": lambda: connect(targets["port"], protocol=IPPROTO_MPTCP),
        "send datagram": lambda: datagram(targets["datagram_port"]),
        "connect to unix socket": lambda: connect_unix(targets["unix"]),
        "connect to abstract socket": lambda: connect_unix("\0" + targets["abstract"]),
        "own environment": lambda: json.dumps(dict(os.environ)),
        "own status": lambda: Path("/proc/self/status").read_text(),
        "truncate key": lambda: str(os.truncate(targets["key"], 0)),
        "signal platform": lambda: terminate(pid),
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


def connect(port: int, *, protocol: int = 0) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, protocol) as caller:
        caller.settimeout(5)
        caller.connect(("127.0.0.1", port))
        return "connected"


def fast_open(port: int) -> str:
    with socket.socket() as caller:  # without a time limit: with one, it says that it has only begun
        return str(caller.sendto(b"hello", socket.MSG_FASTOPEN, ("127.0.0.1", port)))


def datagram(port: int) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as caller:
        caller.settimeout(2)
        caller.connect(("127.0.0.1", port))
        caller.send(b"hello")
        return caller.recv(100).decode()


def connect_unix(address: str) -> str:
    with socket.socket(socket.AF_UNIX) as caller:
        caller.settimeout(5)
        caller.connect(address)
        return "connected"


def linked(link: Callable[[str, str], None], target: str) -> str:
    Path("link").unlink(missing_ok=True)
    link(target, "link")
    return Path("link").read_text()


def move_out(target: Path) -> str:
    Path("mine").write_text("mine")
    return str(Path("mine").rename(target))


def open_to_everyone(path: str) -> str:
    os.chmod(path, 0o604)
    if os.stat(path).st_mode & 0o777 != 0o604:
        raise PermissionError("the mode is as it was")
    return "open"


def pin(pid: int) -> str:
    before = os.sched_getaffinity(pid)
    os.sched_setaffinity(pid, {min(before)})
    if os.sched_getaffinity(pid) == before:
        raise PermissionError("it runs where it ran")
    return "pinned"


def watch(folder: Path) -> str:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.inotify_add_watch(libc.inotify_init(), os.fsencode(folder), IN_CREATE) < 0:
        raise OSError(ctypes.get_errno(), "inotify")
    return "watching"


def copy_memory(pid: int, address: int, length: int) -> str:
    class Span(ctypes.Structure):
        _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]

    libc = ctypes.CDLL(None, use_errno=True)
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    copied = ctypes.create_string_buffer(length)
    here, there = Span(ctypes.addressof(copied), length), Span(address, length)
    ulong = ctypes.c_ulong
    if libc.process_vm_readv(pid, ctypes.byref(here), ulong(1), ctypes.byref(there), ulong(1), ulong(0)) < 0:
        raise OSError(ctypes.get_errno(), "process_vm_readv")
    return copied.raw.decode(errors="replace")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
