"""Where attempts at jobs run, and in whose name they are kept."""

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
    """Where jobs run: `folder` has the directories of attempts; `hidden` is kept from them.

    One that makes room for another job has `preemption_grace_s` to save itself. NVIDIA's MPS daemon listens in `mps`.
    What a job saves is within its `allowance`.
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
    """In whose name attempts are kept: the controller's, as long as its lease holds."""

    gate: Gate
    services: Services
    service: Caller
    fence: int
    on_lost: Callable[[], NoReturn]

    def note(self, job: str, **values: Any) -> None:
        """Write down something about a job, unless another controller has taken over."""
        with self.gate.database.write() as tx:
            hold_fence(self.fence, lease.current_fence(tx))
            store.update_job(tx, job, **values)

    def require_lease(self) -> None:
        with self.gate.database.read() as tx:
            hold_fence(self.fence, lease.current_fence(tx))


def one_line(words: str) -> str:
    """On one line; what is no text, as in the names of files, is escaped."""
    return " ".join(words.encode(errors="backslashreplace").decode().split())


def remove_attempt(host: JobHost, job: str, number: int) -> None:
    """Remove all that is left of an attempt that is over; again, if it was interrupted."""
    home = host.folder / job
    host.launcher.delete(attempt_name(job, number))
    for left in [home / str(number), home / f"{number}.agent", *home.glob(f".{number}-*")]:
        shutil.rmtree(left, ignore_errors=True)
    with suppress(OSError):
        home.rmdir()
