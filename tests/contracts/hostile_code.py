"""Attacks of hostile user code inside a sandbox: takes targets as JSON, and prints the result of each attack."""

from __future__ import annotations

import ctypes
import glob
import json
import mmap
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

PTRACE_SEIZE = 0x4206
IN_CREATE = 0x100
IPPROTO_MPTCP = 262
AF_ALG, AF_VSOCK = 38, 40
KOBJECT_UEVENT, NETFILTER = 15, 12
PROCESS_KEYRING = -2
CLONE_NEWUSER = 0x1000_0000
READ_IMPLIES_EXEC = 0x40_0000
NUMBERS = {
    # name: (x86_64, aarch64)
    "add_key": (248, 217),
    "bpf": (321, 280),
    "clone": (56, 220),
    "io_uring_setup": (425, 425),
    "keyctl": (250, 219),
    "mount": (165, 40),
    "name_to_handle_at": (303, 264),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "personality": (135, 92),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
}


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
        "read other job": lambda: Path(targets["other_job"], "secret").read_text(),
        "list other job": lambda: " ".join(os.listdir(targets["other_job"])),
        "write into other job": lambda: str(Path(targets["other_job"], "planted").write_text("planted")),
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
        "use vsock": lambda: open_socket(AF_VSOCK, socket.SOCK_STREAM, 0),
        "use the kernel's ciphers": lambda: open_socket(AF_ALG, socket.SOCK_SEQPACKET, 0),
        "listen to the kernel's events": lambda: open_socket(
            socket.AF_NETLINK, socket.SOCK_RAW, KOBJECT_UEVENT
        ),
        "change the firewall": lambda: open_socket(socket.AF_NETLINK, socket.SOCK_RAW, NETFILTER),
        "make a user namespace": make_user_namespace,
        "clone into a user namespace": clone_into_user_namespace,
        "use io_uring": lambda: call("io_uring_setup", 1, bytes(120)),
        "store a key": lambda: call("add_key", b"user", b"falaj", b"x", 1, PROCESS_KEYRING),
        "read keys": lambda: call("keyctl", 0, PROCESS_KEYRING, 1),
        "load BPF": lambda: call("bpf", 0, bytes(120), 72),
        "count events": lambda: call("perf_event_open", perf_attributes(), 0, -1, -1, 0),
        "handle page faults": lambda: call("userfaultfd", 1),
        "open by handle": lambda: call(
            "name_to_handle_at", -100, b"/", handle(), ctypes.byref(ctypes.c_int()), 0
        ),
        "mount": mount,
        "open a mount": lambda: call("open_tree", -100, b"/", 0),
        "call as a 32-bit program": call_as_32_bit_program,
        "execute what it reads": lambda: call("personality", READ_IMPLIES_EXEC),
        "truncate key": lambda: str(os.truncate(targets["key"], 0)),
        "signal platform": lambda: terminate(pid),
    }
    print(json.dumps({name: attempt(attack) for name, attack in attacks.items()}))


def attempt(attack: Callable[[], str]) -> dict[str, str]:
    try:
        return {"obtained": attack()}
    except OSError as error:
        return {"error": str(error)}


def read_environment(path: str) -> str:
    return Path(path).read_bytes().decode(errors="replace")


def read_every_environment() -> str:
    paths = glob.glob("/proc/[0-9]*/environ")
    return " ".join(attempt(partial(read_environment, path)).get("obtained", "") for path in paths)


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
    with socket.socket() as caller:  # without a timeout: with one, connect() returns EINPROGRESS
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


def open_socket(family: int, kind: int, protocol: int) -> str:
    socket.socket(family, kind, protocol).close()
    return "open"


def call(name: str, *arguments: Any) -> str:
    """Make a system call that no library makes for us."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    number = NUMBERS[name][os.uname().machine == "aarch64"]
    given = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    if (found := libc.syscall(ctypes.c_long(number), *given)) < 0:
        raise OSError(ctypes.get_errno(), name)
    return str(found)


def make_user_namespace() -> str:
    """In a child, which is alone in it and has every right there."""
    child = os.fork()
    if child == 0:
        os._exit("error" in attempt(lambda: call("unshare", CLONE_NEWUSER)))
    if os.waitpid(child, 0)[1]:
        raise PermissionError("unshare")
    return "made"


def clone_into_user_namespace() -> str:
    child = int(call("clone", CLONE_NEWUSER | signal.SIGCHLD, 0, 0, 0, 0))
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return "made"


def mount() -> str:
    """On a folder that does not exist, to do no harm without a sandbox: the kernel looks for it before any right."""
    try:
        return call("mount", b"none", b"/no/such/folder", b"tmpfs", 0, None)
    except FileNotFoundError:
        return "looked for the folder"


def call_as_32_bit_program() -> str:
    """Ask for the pid by the entry of 32-bit programs, in a child: mov eax, 20; int 0x80; ret."""
    if os.uname().machine != "x86_64":
        raise PermissionError("there is no such entry")
    child = os.fork()
    if child == 0:
        code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        code.write(b"\xb8\x14\0\0\0\xcd\x80\xc3")
        entry = ctypes.addressof(ctypes.c_char.from_buffer(code))
        os._exit(ctypes.CFUNCTYPE(ctypes.c_int)(entry)() != os.getpid())
    if os.waitpid(child, 0)[1]:
        raise PermissionError("killed")
    return "answered"


def perf_attributes() -> bytes:
    """Of an event that a process counts for itself: PERF_TYPE_SOFTWARE, PERF_COUNT_SW_TASK_CLOCK, not of the kernel."""
    return struct.pack("=IIQQQQQ", 1, 112, 1, 0, 0, 0, 1 << 5 | 1 << 6).ljust(112, b"\0")


def handle() -> Any:
    return ctypes.create_string_buffer(struct.pack("=Ii", 128, 0), 136)


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
