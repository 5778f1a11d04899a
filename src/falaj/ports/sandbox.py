"""How user code is started apart from the platform."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

Mechanism = Literal["bubblewrap", "uid", "same-uid"]


@dataclass(frozen=True)
class UserCode:
    """A command of a user's, and all that it may touch.

    `directory` is its working directory (writable; do not trust what is left there, links least of all);
    `readable` are further paths it may read, `devices` further devices it may use; `hidden` are paths that it
    must not reach even where the mechanism shows the rest of the machine. `environment` is the whole
    environment. `scratch_bytes` is what a private /tmp may hold, `shared_memory_bytes` a private /dev/shm, where the
    mechanism has them.
    """

    command: Sequence[str]
    directory: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    readable: Sequence[Path] = ()
    hidden: Sequence[Path] = ()
    network: bool = False
    devices: Sequence[Path] = ()
    scratch_bytes: int | None = None
    shared_memory_bytes: int | None = None


class Sandbox(Protocol):
    """One way of starting user code. `name` is what audit and doctor call it."""

    @property
    def name(self) -> str: ...

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
    `bubblewrap_bounds`: it can say how large a file system in memory may grow (bwrap 0.7).
    """

    is_root: bool
    python: str
    bubblewrap: str | None = None
    bubblewrap_works: bool = False
    bubblewrap_fault: str = ""
    bubblewrap_bounds: bool = True
    user_namespaces: bool = False
    setpriv: str | None = None
    unshare: str | None = None
    spare_uids: range = range(0)
    uid_works: bool = False
    uid_fault: str = ""
