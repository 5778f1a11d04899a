"""Starts user code under Landlock and a seccomp filter, for machines that forbid namespaces, as containers do.

The kernel's own list of what the job may open, and of ports it may use, needs no privileges (Linux 5.13). As root, the
job also gets a uid of its own where that uid can reach Python. What Landlock cannot say is listed in `gaps`
(decision 0016).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from falaj.drivers.sandbox import seccomp
from falaj.drivers.sandbox.identity import hand_over, job_uid
from falaj.drivers.sandbox.launch import launch
from falaj.drivers.sandbox.refusals import refused, refused_at
from falaj.drivers.sandbox.system_paths import NETWORK_SETTINGS, SETTINGS, SYSTEM, python_folders
from falaj.drivers.sandbox.uid import refuse_unreachable
from falaj.ports.sandbox import Gap, MachineFacts, Mechanism, UserCode

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, REMOVE_DIR, REMOVE_FILE = (1 << bit for bit in range(6))
MAKE_CHAR, MAKE_DIR, MAKE_REG, MAKE_SOCK, MAKE_FIFO, MAKE_BLOCK, MAKE_SYM = (1 << bit for bit in range(6, 13))
REFER, TRUNCATE, IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
BIND_TCP, CONNECT_TCP = 1, 2
SCOPE_ABSTRACT_SOCKETS, SCOPE_SIGNALS = 1, 2

READ = EXECUTE | READ_FILE | READ_DIR
OWN = (1 << 15) - 1 & ~(MAKE_CHAR | MAKE_BLOCK)
DEVICE = READ_FILE | WRITE_FILE | IOCTL_DEV | READ_DIR
SHARED_MEMORY = READ_FILE | WRITE_FILE | MAKE_REG | REMOVE_FILE | TRUNCATE
"""No listing: a name must be known."""

DEVICES = ("/dev/full", "/dev/null", "/dev/random", "/dev/urandom", "/dev/zero")
READABLE_SYSTEM = (
    "/proc",
    "/sys/bus/pci",
    "/sys/class/infiniband",
    "/sys/class/net",
    "/sys/devices",
    "/sys/fs/cgroup",
)
"""Of /sys, what gloo and NCCL read to find cards and interfaces, and DuckDB to find its limits: they fail where it is
there and closed."""

PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
USUAL_PORTS = (32768, 60999)
TMP = ".tmp"
LONGEST_TMP = 107 - len("/pymp-abcdefgh/listener-abcdefgh")
NO_GPUS_AS_ROOT = (
    "a job with GPUs cannot run under Landlock as root: CUDA must write to /proc, where root could change the kernel's "
    "settings; let other users reach Python (o+rx on every folder above it)"
)
LIMITS = {"RLIMIT_CORE": 0, "RLIMIT_MSGQUEUE": 0}


class Interface(NamedTuple):
    """What a version of Landlock governs, and the size of the structure that says so."""

    files: int
    ports: int
    scopes: int
    size: int


def interface(abi: int) -> Interface:
    files = (1 << 13) - 1
    files |= REFER if abi >= 2 else 0
    files |= TRUNCATE if abi >= 3 else 0
    files |= IOCTL_DEV if abi >= 5 else 0
    ports = BIND_TCP | CONNECT_TCP if abi >= 4 else 0
    scopes = SCOPE_ABSTRACT_SOCKETS | SCOPE_SIGNALS if abi >= 6 else 0
    return Interface(files, ports, scopes, size=24 if abi >= 6 else 16 if abi >= 4 else 8)


@dataclass(frozen=True)
class LandlockSandbox:
    """A process that may open what is listed for it, and nothing else."""

    facts: MachineFacts

    @property
    def name(self) -> Mechanism:
        return "landlock"

    @property
    def gaps(self) -> tuple[Gap, ...]:
        return tuple(find_gaps(self.facts))

    def start(self, code: UserCode, *, stdout: int, stderr: int) -> subprocess.Popen[bytes]:
        if not self.facts.landlock_abi:
            raise refused("user code cannot run under Landlock: the kernel does not offer it")
        uid = None
        if self.facts.landlock_own_uid:
            uid = job_uid(code.directory, self.facts.spare_uids)
            refuse_unreachable(code, uid)
        elif code.devices and self.facts.is_root:
            raise refused(NO_GPUS_AS_ROOT)
        refuse_hidden_in_own(code)
        tmp = make_tmp(code.directory)
        if uid is not None:
            hand_over(code.directory, uid)
        plan = plan_for(code, self.facts, uid=uid)
        rules = seccomp.landlock_rules(
            abi=self.facts.landlock_abi, shares_uid=uid is None, network=code.network, loopback=code.loopback
        )
        code = replace(code, environment={"TMPDIR": str(tmp), **code.environment})
        return launch([], code, rules, python=self.facts.python, stdout=stdout, stderr=stderr, landlock=plan)


def plan_for(code: UserCode, facts: MachineFacts, *, uid: int | None) -> dict[str, Any]:
    """Everything that the last step needs to know of Landlock."""
    governed = interface(facts.landlock_abi)
    return {
        **governed._asdict(),
        "ports": 0 if code.network else governed.ports,
        "path_rules": [(str(path), rights) for path, rights in path_rules(code)],
        "port_rules": port_rules(code) if governed.ports else [],
        "uid": uid,
        "limits": LIMITS,
        "parent": os.getpid(),
    }


def path_rules(code: UserCode) -> Iterable[tuple[Path, int]]:
    """The paths that the job may use, and how: the system, Python, inputs, devices, its own directory."""
    named = SETTINGS + NETWORK_SETTINGS if code.network or code.loopback else SETTINGS
    readable = [*map(Path, (*SYSTEM, *READABLE_SYSTEM, *named)), *python_folders(), *code.readable]
    for path in readable:
        yield from ((part, READ) for part in without(path.resolve(), code.hidden))
    yield from ((path, READ_DIR) for path in import_folders(code))
    yield from ((Path(path), DEVICE) for path in DEVICES)
    yield from ((path, DEVICE) for path in code.devices)
    if code.devices:  # CUDA names its threads there (/proc/self/task/N/comm), and does not start if it cannot
        yield Path("/proc"), WRITE_FILE | TRUNCATE
    yield Path("/dev/shm"), SHARED_MEMORY
    yield code.directory.resolve(), OWN


def import_folders(code: UserCode) -> list[Path]:
    """The folders that hold packages among the inputs: Python imports only what it can list."""
    found = {path.resolve().parent for path in code.readable if (path / "__init__.py").exists()}
    return sorted(path for path in found if without(path, code.hidden) == [path])


def without(path: Path, hidden: Sequence[Path]) -> list[Path]:
    """`path`, or where it holds hidden ones, all that lies around them: Landlock can only allow, for whole folders."""
    inside = [each for each in (secret.resolve() for secret in hidden) if each.is_relative_to(path)]
    if not inside:
        return [path]
    if path in inside or not path.is_dir():
        return []
    # A rule for a link would be one for what it leads to.
    return [
        part for child in sorted(path.iterdir()) if not child.is_symlink() for part in without(child, inside)
    ]


def port_rules(code: UserCode) -> list[tuple[int, int, int]]:
    """First and last port, and what is allowed: the ports that the kernel gives out, for a job that needs some."""
    if code.network or not code.loopback:
        return []
    try:
        first, last = map(int, PORT_RANGE.read_text().split())
    except (OSError, ValueError):
        first, last = USUAL_PORTS
    return [(0, 0, BIND_TCP), (first, last, BIND_TCP | CONNECT_TCP)]


def refuse_hidden_in_own(code: UserCode) -> None:
    """Refuse where the job's own directory holds a hidden path: Landlock cannot close a part of a folder."""
    own = code.directory.resolve()
    for path in code.hidden:
        if path.resolve().is_relative_to(own) and path.exists():
            raise refused_at(
                str(path),
                given="in the directory of the job",
                allowed="a path outside of what the job may write",
            )


def make_tmp(directory: Path) -> Path:
    """A folder for temporary files in the job's directory, made while that is still the platform's.

    By a short name: the address of a unix socket has 107 bytes, and Python makes some below the folder.
    """
    tmp = directory.absolute() / TMP
    if directory.stat().st_uid == os.geteuid():
        tmp.mkdir(mode=0o700, exist_ok=True)
    if len(os.fsencode(tmp)) <= LONGEST_TMP:
        return tmp
    link = short_name(directory)
    with contextlib.suppress(OSError):
        if not os.path.lexists(link):
            link.symlink_to(tmp)
        if link.lstat().st_uid == os.geteuid() and link.readlink() == tmp:
            return link
    return tmp


def short_name(directory: Path) -> Path:
    digest = hashlib.sha256(os.fsencode(directory.absolute())).hexdigest()
    return Path("/tmp") / f"falaj-{digest[:16]}"


def remove_short_name(directory: Path) -> None:
    """Remove the short name of a job's temporary files; nothing, if it is not ours."""
    link = short_name(directory)
    with contextlib.suppress(OSError):
        if link.is_symlink() and link.lstat().st_uid == os.geteuid():
            link.unlink()


def find_gaps(facts: MachineFacts) -> Iterable[Gap]:
    """The promises that Landlock does not keep, by its version and by whether jobs have uids of their own."""
    abi, own_uid = facts.landlock_abi, facts.landlock_own_uid
    yield Gap("names", "a job can ask whether a path exists, and how large it is, but not open it")
    yield Gap("processes", "a job sees the machine's processes and their command lines")
    ports = "the ports that the kernel gives out (by default 32768 to 60999)" if abi >= 4 else "all ports"
    others = "a job of one process has no TCP at all, not even to itself"
    yield Gap("gang-network", f"a job of several processes can reach {ports} of any host by TCP; {others}")
    yield Gap("tmp", "/tmp is closed to a job; TMPDIR names a folder in its own directory instead")
    yield Gap(
        "children", "a process that leaves its session ends with the job only while the platform watches it"
    )
    if abi < 6:
        yield Gap("abstract-sockets", "a job can connect to abstract unix sockets (Linux 6.12 closes them)")
    if abi < 2:
        yield Gap(
            "renames", "a job must copy a file to bring it into another folder (Linux 5.19 allows moves)"
        )
    if own_uid and len(facts.spare_uids) < 2:
        yield Gap(
            "shared-memory", "jobs share one spare uid, and reach each other's shared memory by its name"
        )
    if own_uid:
        return
    if abi < 6:
        yield Gap("signals", "a job can end the platform and other jobs by signals (Linux 6.12 stops them)")
    bus = "a session bus or a container daemon there would run programs for it"
    yield Gap("sockets", f"a job can connect to unix sockets that are open to the platform's own user; {bus}")
    yield Gap(
        "shared-memory", "a job can open shared memory of the platform's own user, if it knows its name"
    )
    yield Gap("modes", "changes of the mode and owner of a file report success and have no effect")
    if facts.is_root:
        yield Gap("identity", "a job runs as root, without root's capabilities, and its files are root's")
        yield Gap("gpus", "a job with GPUs is refused: as root it could change the kernel's settings")
    else:
        yield Gap("out-of-memory", "a job with GPUs can have the platform ended first when memory runs out")
