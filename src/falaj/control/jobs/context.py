"""State that the reconciler shares with its attempts: the host of jobs, and the controller's identity and lease."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from falaj.control import lease
from falaj.control.jobs.storage_limits import StorageLimits
from falaj.control.services import Services
from falaj.governance.operations.caller import Caller
from falaj.governance.operations.gate import Gate
from falaj.governance.operations.idempotency import hold_fence
from falaj.ports.launcher import Launcher
from falaj.records.scheduling.hardware import MPS_DIRECTORY
from falaj.records.scheduling.snapshot import Node
from falaj.training import store
from falaj.training.logs import attempt_name


@dataclass(frozen=True)
class JobHost:
    """The host that jobs run on. `folder` holds the directories of attempts; `hidden` are paths that jobs do not see.

    A preempted job has `preemption_grace_s` to save a checkpoint. NVIDIA's MPS daemon listens in `mps`. Checkpoints
    are subject to `limits`.
    """

    folder: Path
    launcher: Launcher
    nodes: Callable[[], tuple[Node, ...]]
    hidden: tuple[Path, ...] = ()
    preemption_grace_s: float = 60.0
    mps: Path = Path(MPS_DIRECTORY)
    environments: Mapping[str, Path] = field(default_factory=dict)
    limits: StorageLimits = field(default_factory=StorageLimits)


@dataclass(frozen=True)
class ControllerContext:
    """The acting controller: its service user and the fencing number of its lease."""

    gate: Gate
    services: Services
    service: Caller
    fence: int
    on_lost: Callable[[], NoReturn]

    def update_job(self, job: str, **values: Any) -> None:
        """Update the row of a job; Fenced if another controller has taken over."""
        with self.gate.database.write() as tx:
            hold_fence(self.fence, lease.current_fence(tx))
            store.update_job(tx, job, **values)

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
