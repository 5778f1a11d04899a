"""Starts user code in bubblewrap: it sees the system, Python, its inputs and its own directory, and no more.

As root, bwrap mounts with root's rights and setpriv then turns the process into a uid of the job's own. A
user namespace would only rename root inside: the files it leaves would be root's, setuid ones included.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from falaj.drivers.sandbox import seccomp
from falaj.drivers.sandbox.identity import allowed, become, hand_over, job_uid, readable
from falaj.drivers.sandbox.launch import launch
from falaj.drivers.sandbox.refusals import refused, refused_at
from falaj.drivers.sandbox.system_paths import NETWORK_SETTINGS, SETTINGS, SYSTEM, python_folders
from falaj.ports.sandbox import Gap, MachineFacts, Mechanism, UserCode

NOBODY = "65534"
# Without the network there is still a loopback, and programs call it by its name.
LOOPBACK_HOSTS = Path(__file__).with_name("hosts")


@dataclass(frozen=True)
class BubblewrapSandbox:
    """A view of the machine made for one job, and processes, users and network of its own."""

    facts: MachineFacts

    @property
    def name(self) -> Mechanism:
        return "bubblewrap"

    @property
    def gaps(self) -> tuple[Gap, ...]:
        return seccomp.kernel_gaps()

    def start(self, code: UserCode, *, stdout: int, stderr: int) -> subprocess.Popen[bytes]:
        if not self.facts.bubblewrap:
            raise refused("user code cannot run in bubblewrap: bwrap is not installed")
        limits, drop = self._prepare_as_root(code) if self.facts.is_root else (as_user(), [])
        if not self.facts.bubblewrap_bounds:
            code = replace(code, scratch_bytes=None, shared_memory_bytes=None)
        launcher = [self.facts.bubblewrap, *apart(code), *limits, *view(code), "--", *drop]
        # Without the grant, the network is a namespace of the job's own.
        rules = seccomp.kernel_rules(network=True, loopback=True)
        return launch(launcher, code, rules, python=self.facts.python, stdout=stdout, stderr=stderr)

    def _prepare_as_root(self, code: UserCode) -> tuple[list[str], list[str]]:
        """bwrap's arguments that leave it the right to change the uid, and the command that changes it."""
        if not self.facts.setpriv or not self.facts.spare_uids:
            raise refused("as root, bubblewrap also needs setpriv (util-linux) and a spare uid")
        uid = job_uid(code.directory, self.facts.spare_uids)
        for path in code.readable:
            if not readable(path, allowed(path, uid)):
                raise refused_at(
                    str(path), given="closed to other users", allowed="an input that the job's uid can read"
                )
        hand_over(code.directory, uid)
        kept = [word for right in ("SETUID", "SETGID", "SETPCAP") for word in ("--cap-add", f"CAP_{right}")]
        return ["--cap-drop", "ALL", *kept], become(self.facts.setpriv, uid)


def as_user() -> list[str]:
    return ["--unshare-user", "--uid", NOBODY, "--gid", NOBODY, "--cap-drop", "ALL"]


def apart(code: UserCode) -> list[str]:
    """bwrap's arguments for namespaces and for the life of the process."""
    network = [] if code.network else ["--unshare-net", "--hostname", "localhost"]
    namespaces = ["--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try", *network]
    return [*namespaces, "--die-with-parent", "--new-session"]


class Mount(NamedTuple):
    """One thing that the job sees: bwrap's `option`, its source (None: made new), and where it appears."""

    option: tuple[str, ...]
    source: Path | None
    destination: Path

    def arguments(self) -> list[str]:
        source = [] if self.source is None else [str(self.source)]
        return [*self.option, *source, str(self.destination)]


def view(code: UserCode) -> list[str]:
    """bwrap's arguments for the file tree. What lies deeper is mounted later, so the narrower rule wins.

    What bwrap makes new belongs to the job where the platform is not root: at the end it is closed to writing.
    """
    fresh = [
        Mount(("--proc",), None, Path("/proc")),
        Mount(("--dev",), None, Path("/dev")),
        Mount(scratch(code.shared_memory_bytes), None, Path("/dev/shm")),
        Mount(scratch(code.scratch_bytes), None, Path("/tmp")),
    ]
    binds = list(visible(code))
    covered = list(covers(code.hidden, binds))
    mounts = [*folders_above(binds), *fresh, *binds, *covered]
    ordered = sorted(mounts, key=lambda mount: len(mount.destination.parts))
    made = [Path("/"), Path("/dev"), *(each.destination for each in covered if each.source is None)]
    closed = [Mount(("--remount-ro",), None, path) for path in made]
    return [word for mount in [*ordered, *closed] for word in mount.arguments()]


def scratch(size_bytes: int | None) -> tuple[str, ...]:
    """bwrap's options for an empty folder in memory that everyone may use; unless told, half of the memory."""
    size = () if size_bytes is None else ("--size", str(size_bytes))
    return (*size, "--perms", "1777", "--tmpfs")


def folders_above(binds: Iterable[Mount]) -> list[Mount]:
    """The folders on the way to each bind: bwrap itself would make them for root's eyes only."""
    above = {folder for bind in binds for folder in bind.destination.parents if folder != Path("/")}
    return [Mount(("--dir",), None, folder) for folder in sorted(above)]


def visible(code: UserCode) -> Iterable[Mount]:
    """The system, Python and the inputs, read-only; then the job's own directory."""
    for path in map(Path, SYSTEM):
        if path.is_symlink():
            yield Mount(("--symlink",), path.readlink(), path)
        elif path.is_dir():
            yield shown(path)
    settings = SETTINGS + NETWORK_SETTINGS if code.network else SETTINGS
    yield from (shown(path) for path in map(Path, settings) if path.exists())
    if not code.network:
        yield Mount(("--ro-bind",), LOOPBACK_HOSTS, Path("/etc/hosts"))
    yield from (shown(path) for path in python_folders())
    yield from (shown(path) for path in code.readable)
    yield from (Mount(("--dev-bind",), path.resolve(), path.absolute()) for path in code.devices)
    yield Mount(("--bind",), code.directory.resolve(), code.directory.absolute())


def shown(path: Path) -> Mount:
    return Mount(("--ro-bind",), path.resolve(), path.absolute())


def covers(hidden: Iterable[Path], binds: Iterable[Mount]) -> Iterable[Mount]:
    """An empty folder or file over each hidden path that a bind would show."""
    for secret in (path.resolve() for path in hidden):
        for bind in binds:
            if bind.source is None or not os.path.lexists(secret) or not secret.is_relative_to(bind.source):
                continue
            place = bind.destination / secret.relative_to(bind.source)
            if secret.is_dir():
                yield Mount(("--perms", "0755", "--tmpfs"), None, place)
            else:
                yield Mount(("--ro-bind",), Path("/dev/null"), place)
