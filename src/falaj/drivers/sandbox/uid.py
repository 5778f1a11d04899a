"""Starts user code as another uid, by setpriv, with its own network and process list where unshare can."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from falaj.drivers.sandbox import seccomp
from falaj.drivers.sandbox.identity import become, hand_over, job_uid, reached, readable
from falaj.drivers.sandbox.launch import launch
from falaj.drivers.sandbox.refusals import refused, refused_at
from falaj.ports.sandbox import Gap, MachineFacts, Mechanism, UserCode

if TYPE_CHECKING:
    from falaj.errors import IsolationRefused

# A new network has its loopback down (bwrap lifts it, unshare does not); training across processes needs it.
# 0x8914 is SIOCSIFFLAGS; the flag 1 is IFF_UP.
LIFT_LOOPBACK = """\
import fcntl, os, socket, struct, sys
with socket.socket() as any_socket:
    fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh22x", b"lo", 1))
os.execv(sys.argv[1], sys.argv[1:])
"""


@dataclass(frozen=True)
class UidSandbox:
    """Each job as a uid that owns nothing but the job's directory. The platform must be root.

    File modes are all that hides a file: the hidden paths are verified before each start.
    """

    facts: MachineFacts

    @property
    def name(self) -> Mechanism:
        return "uid"

    @property
    def gaps(self) -> tuple[Gap, ...]:
        return tuple(find_gaps(self.facts))

    def start(self, code: UserCode, *, stdout: int, stderr: int) -> subprocess.Popen[bytes]:
        if not self.facts.spare_uids:
            raise refused("user code cannot run as another uid: there is no spare uid")
        uid = job_uid(code.directory, self.facts.spare_uids)
        refuse_reachable(code, uid)
        refuse_unreachable(code, uid)
        hand_over(code.directory, uid)
        launcher = enter(self.facts, uid, network=code.network)
        rules = filter_rules(self.facts, code)
        return launch(launcher, code, rules, python=self.facts.python, stdout=stdout, stderr=stderr)


def enter(facts: MachineFacts, uid: int, *, network: bool) -> list[str]:
    """The launcher that ends as `uid`: in its own process list, and in an empty network unless `network`."""
    if not facts.setpriv:
        raise refused("user code cannot run as another uid: setpriv (util-linux) is not installed")
    drop = become(facts.setpriv, uid)
    if not facts.unshare:
        return drop
    own = ["--ipc", "--pid", "--mount-proc", "--fork", "--kill-child"]
    apart = [facts.setpriv, "--pdeathsig=KILL", "--", facts.unshare, *own]
    if network:
        return [*apart, "--", *drop]
    return [*apart, "--net", "--", facts.python, "-I", "-S", "-c", LIFT_LOOPBACK, *drop]


def filter_rules(facts: MachineFacts, code: UserCode) -> list[seccomp.SyscallRule]:
    """The rules of the filter: without a network namespace, it is the filter that keeps the job from the network."""
    has_own_network = facts.unshare is not None
    return seccomp.kernel_rules(network=code.network or has_own_network, loopback=code.loopback)


def refuse_reachable(code: UserCode, uid: int) -> None:
    """Refuse where a hidden path is open to `uid`."""
    for path in code.hidden:
        if path.exists() and reached(path, uid):
            raise refused_at(
                str(path),
                given=f"mode {path.stat().st_mode & 0o777:04o}, open to other users",
                allowed="a path that no other user can reach",
                fix=f"chmod go= {path}",
            )


def refuse_unreachable(code: UserCode, uid: int) -> None:
    """Refuse where `uid` cannot get to its inputs or its directory: later it would fail without a reason."""
    for path in code.readable:
        if not readable(path, reached(path, uid)):
            raise refused_at(
                str(path), given="closed to other users", allowed="an input that the job's uid can read"
            )
    above = code.directory.resolve().parent
    if not reached(above, uid) & 1:
        raise closed(above)


def closed(folder: Path) -> IsolationRefused:
    return refused_at(
        str(folder),
        given="closed to other users",
        allowed="a folder that the job's uid can pass through",
        fix=f"keep job directories outside of it, or chmod o+x {folder} and the folders above it",
    )


def find_gaps(facts: MachineFacts) -> Iterable[Gap]:
    """The promises that another uid alone does not keep, by what `unshare` and the spare uids add to it."""
    yield Gap("names", "a job can list and read what is open to every user of the machine")
    yield Gap("writes", "a job can write where every user of the machine can")
    yield Gap("tmp", "/tmp is the machine's, for all jobs")
    if len(facts.spare_uids) < 2:
        yield Gap("jobs", "jobs share one spare uid, and reach each other's files and processes")
        yield Gap("shared-memory", "jobs share one spare uid, and reach each other's shared memory")
    yield from seccomp.kernel_gaps()
    if facts.unshare:
        return
    yield Gap("processes", "a job sees the machine's processes and their command lines")
    if not seccomp.is_known():
        yield Gap("network", "a job can reach the network")
    others = "a job of one process has no TCP at all, not even to itself"
    yield Gap("gang-network", f"a job of several processes can reach the network by TCP; {others}")
    yield Gap("abstract-sockets", "a job can connect to abstract unix sockets")
    yield Gap(
        "children", "a process that leaves its session ends with the job only while the platform watches it"
    )
