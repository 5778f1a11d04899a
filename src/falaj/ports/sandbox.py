"""How user code is started apart from the platform."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

Mechanism = Literal["bubblewrap", "landlock", "uid", "same-uid"]

Promise = Literal[
    "files",
    "names",
    "jobs",
    "platform",
    "signals",
    "processes",
    "writes",
    "modes",
    "network",
    "gang-network",
    "sockets",
    "abstract-sockets",
    "shared-memory",
    "tmp",
    "renames",
    "identity",
    "children",
    "gpus",
    "out-of-memory",
    "kernel",
]

PROMISES: Mapping[Promise, str] = {
    "files": "the platform's keys, database and other files cannot be read or changed",
    "names": "files outside of the job's view look as if they did not exist",
    "jobs": "the files, memory and environment of other jobs cannot be reached",
    "platform": "the memory, environment and limits of the platform's processes cannot be reached",
    "signals": "processes that are not the job's own get no signals from it",
    "processes": "other processes and their command lines cannot be listed",
    "writes": "nothing outside of the job's own directory can be written",
    "modes": "the job can change the modes of its own files, and of no others",
    "network": "the network cannot be reached, unless the job is granted it",
    "gang-network": "processes of one job reach each other over TCP, and nobody else",
    "sockets": "unix sockets of other processes cannot be reached by their paths",
    "abstract-sockets": "abstract unix sockets of other processes cannot be reached",
    "shared-memory": "the shared memory of other processes cannot be reached by its name",
    "tmp": "the folder /tmp is the job's own",
    "renames": "the job can move files between the folders of its directory",
    "identity": "processes and files of the job are not root's",
    "children": "no process outlives the job",
    "gpus": "the job can use the GPUs that it was given",
    "out-of-memory": "the job cannot choose which other process the kernel ends when memory runs out",
    "kernel": "parts of the kernel that no job needs cannot be used: io_uring, keys, BPF, new namespaces, vsock",
}
"""Everything that a sandbox promises."""


class Gap(NamedTuple):
    """A promise that a mechanism does not keep on this machine, and what happens instead, in a sentence."""

    promise: Promise
    sentence: str


@dataclass(frozen=True)
class UserCode:
    """A command of a user's, and all that it may touch.

    `directory` is its working directory (writable; do not trust what is left there, links least of all);
    `readable` are further paths it may read, `devices` further devices it may use; `hidden` are paths that it
    must not reach even where the mechanism shows the rest of the machine. `environment` is the whole
    environment. `loopback` says that its processes speak TCP with each other; `network` grants it the network;
    without `children` it can start threads, but no process.
    `scratch_bytes` is what a private /tmp may hold, `shared_memory_bytes` a private /dev/shm, where the
    mechanism has them.
    """

    command: Sequence[str]
    directory: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    readable: Sequence[Path] = ()
    hidden: Sequence[Path] = ()
    network: bool = False
    loopback: bool = False
    children: bool = True
    devices: Sequence[Path] = ()
    scratch_bytes: int | None = None
    shared_memory_bytes: int | None = None


class Sandbox(Protocol):
    """One way of starting user code. `name` is what audit and doctor call it; `gaps` are the promises it breaks."""

    @property
    def name(self) -> str: ...

    @property
    def gaps(self) -> tuple[Gap, ...]: ...

    def start(self, code: UserCode, *, stdout: int, stderr: int) -> subprocess.Popen[bytes]:
        """Start `code` with its output going to the two file descriptors.

        The process leads a session of its own: `os.killpg(process.pid, SIGKILL)` ends it and its children.
        It may also end when the thread that started it ends (the kernel counts threads as parents), so start
        it from a thread that outlives it. IsolationRefused where `code` cannot be kept apart.
        """
        ...


@dataclass(frozen=True)
class MachineFacts:
    """What this machine offers for starting user code apart from the platform: tried, not guessed.

    `spare_uids` are numbers that no account uses, so that each job can have its own; `unshare` is set only
    where it can give a process its own network and process list; a `_fault` says why its `_works` is False.
    `bubblewrap_bounds`: it can say how large a file system in memory may grow (bwrap 0.7); `bubblewrap_bundled`: it
    is the one that was installed with Falaj. `landlock_abi` is the version of the kernel's interface, 0 without one;
    `landlock_own_uid`: jobs in it also get a uid of their own. `python_blocked_at` is the folder or file, behind all
    links, that other users may not pass on the way to `python`.
    """

    is_root: bool
    python: str
    bubblewrap: str | None = None
    bubblewrap_bundled: bool = False
    bubblewrap_works: bool = False
    bubblewrap_fault: str = ""
    bubblewrap_bounds: bool = True
    landlock_abi: int = 0
    landlock_works: bool = False
    landlock_fault: str = ""
    landlock_own_uid: bool = False
    user_namespaces: bool = False
    setpriv: str | None = None
    unshare: str | None = None
    spare_uids: range = range(0)
    uid_works: bool = False
    uid_fault: str = ""
    python_blocked_at: str | None = None
