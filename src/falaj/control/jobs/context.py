"""State that the reconciler shares with its attempts: the host of jobs, and the controller's identity and lease."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, NoReturn

from falaj.control import lease
from falaj.control.jobs.agent_server import RemoteAgentServer
from falaj.control.jobs.storage_limits import StorageLimits
from falaj.control.services import Services
from falaj.governance import objects
from falaj.governance.operations.caller import Caller
from falaj.governance.operations.gate import Gate
from falaj.governance.operations.idempotency import hold_fence
from falaj.ports.launcher import Launcher, PodImage, VolumeMount, WorkerHost
from falaj.ports.parsers import ParserPool
from falaj.records.governance.residency import UNKNOWN
from falaj.records.names import ObjectId
from falaj.records.scheduling.hardware import MPS_DIRECTORY
from falaj.records.scheduling.snapshot import Node
from falaj.training import store
from falaj.training.logs import attempt_name

LONGEST_ATTEMPT = 100


@dataclass(frozen=True)
class RemoteHost:
    """Machines other than the controller's that jobs run on: workers there connect to `listen` over TLS.

    `certificate` and `key` are the PEM files of the controller; `workers` returns what the workers of an attempt fetch
    and report; `sweep` removes what is left there of attempts for which a function returns False. Jobs run `python`, as
    their image has it: `image`, or the one of `environments` that they name. `image_of` returns what is known of the
    image of an attempt. If `is_store_open` they reach the object store, and upload their checkpoints there.
    """

    listen: tuple[str, int]
    certificate: Path
    key: Path
    workers: Callable[[str], WorkerHost]
    sweep: Callable[[Callable[[str], bool]], list[str]]
    image: str
    image_of: Callable[[str], PodImage]
    environments: Mapping[str, str] = field(default_factory=dict)
    python: str = "python3"
    is_store_open: bool = False


@dataclass(frozen=True)
class JobHost:
    """The host that jobs run on. `folder` holds the directories of attempts; `hidden` are paths that jobs do not see.

    The code of jobs is read by `parsers`. A preempted job has `preemption_grace_s` to save a checkpoint. NVIDIA's MPS
    daemon listens in `mps`. Checkpoints are subject to `limits`. `home` tells its launcher from those of other
    machines on the database; its attempts stop after `fence_s` without renewal, unless that is none. Jobs that name
    no memory or disk get the defaults, or else their share of the node. The secrets with which attempts present
    themselves to their agents are derived from `agent_key`. With `remote`, jobs run on other machines. With a
    `waiting_limit` the queue of the cluster decides when and where they run, and so many of each queue wait there.
    `volumes` returns the volumes of these names for jobs of a workspace, and raises InvalidInput for any other.
    `is_unseen` says of a node that its cluster has not answered yet: it may be there.
    """

    folder: Path
    launcher: Launcher
    nodes: Callable[[], tuple[Node, ...]]
    parsers: ParserPool
    hidden: tuple[Path, ...] = ()
    preemption_grace_s: float = 60.0
    mps: Path = Path(MPS_DIRECTORY)
    environments: Mapping[str, Path] = field(default_factory=dict)
    limits: StorageLimits = field(default_factory=StorageLimits)
    home: str | None = None
    fence_s: int | None = None
    memory_default_bytes: int | None = None
    disk_default_bytes: int | None = None
    agent_key: bytes = field(default_factory=lambda: os.urandom(32), repr=False)
    remote: RemoteHost | None = None
    waiting_limit: int | None = None
    volumes: Callable[[Sequence[str], str], tuple[VolumeMount, ...]] = lambda _names, _workspace: ()
    is_unseen: Callable[[str], bool] = lambda node: False


@dataclass(frozen=True)
class ControllerContext:
    """The acting controller: its service user, the fencing number of its lease, and its agents for other machines."""

    gate: Gate
    services: Services
    service: Caller
    fence: int
    on_lost: Callable[[], NoReturn]
    agents: RemoteAgentServer | None = None

    def update_job(self, job: str, **values: Any) -> None:
        """Update the row of a job; Fenced if another controller has taken over."""
        with self.gate.database.write() as tx:
            hold_fence(self.fence, lease.current_fence(tx))
            store.update_job(tx, job, **values)

    def output_zone(self, job: ObjectId) -> str | None:
        """Return the zone for what a job makes: none for the default one, or that of this machine.

        The machine is in a zone that the label of the job permits, else it would not run here; the default one need not
        be.
        """
        with self.gate.database.read() as tx:
            found = objects.by_id(tx, job)
        zones = self.gate.zones
        is_default = found is None or found.label.permits(zones.default.jurisdiction)
        return None if is_default or zones.here is UNKNOWN else zones.here.name

    def require_lease(self) -> None:
        """Raise Fenced if another controller has taken over."""
        with self.gate.database.read() as tx:
            hold_fence(self.fence, lease.current_fence(tx))


def one_line(text: str) -> str:
    """Return `text` on one line; invalid characters, as in file names, are escaped."""
    return " ".join(text.encode(errors="backslashreplace").decode().split())


def remove_attempt(host: JobHost, job: str, number: int) -> None:
    """Remove the files of an ended attempt; may be repeated after an interruption."""
    home = host.folder / job
    host.launcher.delete(attempt_name(job, number))
    for left in [home / str(number), home / f"{number}.agent", *home.glob(f".{number}-*")]:
        shutil.rmtree(left, ignore_errors=True)
    with suppress(OSError):
        home.rmdir()


def agent_secret(key: bytes, job: str, attempt: int) -> str:
    """Return what an attempt presents to its agent; whichever controller serves that has the same."""
    return blake2b(f"{job} {attempt}".encode(), key=key, digest_size=32).hexdigest()


def secret_of(key: bytes, attempt: str) -> str | None:
    """Return the secret of an attempt by its name; none for what is not a name."""
    job, _, number = attempt.rpartition("/")
    is_name = job and len(attempt) <= LONGEST_ATTEMPT and number.isascii() and number.isdigit()
    return agent_secret(key, job, int(number)) if is_name else None
