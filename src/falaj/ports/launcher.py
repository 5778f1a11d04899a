"""The port for launching attempts at jobs: as processes of this machine, or on a cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:  # records load pydantic, which would delay the start of every attempt
    from falaj.records.training.jobs import Framework

WHOLE_GPU = 1000
"""A whole GPU in thousandths, as in `records.scheduling`."""

Phase = Literal["unknown", "starting", "running", "ended", "lost"]


@dataclass(frozen=True)
class Launch:
    """One attempt at a job: the user's command, its resources and its limits.

    Identity and files:
    - `attempt` is its permanent name ("job_…/1").
    - `directory` is its private folder, which the caller has filled: `code/` (the working directory), `inputs/` and
      `outputs/`. The launcher may give it to another uid. Do not trust its content afterwards, in particular links.
    - `readable` are further paths that it may read, `hidden` are paths that it must not reach.

    Program:
    - `command` is the complete command of one process, program first. For torch it is Python, its options, and the
      script or `-m module` with its arguments.
    - `environment` is the whole environment. The launcher adds only what it decides: threads, visible GPUs, unbuffered
      output, and the variables of a rank.
    - `secrets` are further environment variables, which are neither written to disk nor shown in the log.
    - `framework` selects the launch contract. `processes` start and end together: workers of torchrun, or copies with
      FALAJ_RANK and FALAJ_WORLD_SIZE. `processes_min` is the smallest world size with which torch may continue.
      `roles` count the processes of each role, for frameworks that have roles.
    - With `nsys` its processes run under Nsight Systems, which writes its reports to `outputs/`.

    Resources, for all processes together:
    - `cpus`, `memory_bytes`, and `disk_bytes`, which is how much it may add to its directory.
    - `gpus` are the UUIDs of its cards or MIG slices. `gpu_milli` below 1000 is a fraction of one card in thousandths,
      by MPS, with `gpu_memory_bytes` of its memory; the MPS daemon listens in `mps_directory`.
    - `network` is whether it may use the network.

    Time:
    - After `timeout_s` it is stopped, and killed `grace_s` later.
    - After `hang_s` without a heartbeat of a rank, the stacks of all ranks are written to the log, and it fails.
    """

    attempt: str
    directory: Path
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    framework: Framework = "plain"
    processes: int = 1
    processes_min: int | None = None
    roles: Mapping[str, int] = field(default_factory=dict)
    cpus: int = 1
    gpus: tuple[str, ...] = ()
    gpu_milli: int = WHOLE_GPU
    gpu_memory_bytes: int = 0
    mps_directory: str = "/tmp/nvidia-mps"  # noqa: S108 - MPS_DIRECTORY of `records.hardware`
    memory_bytes: int | None = None
    disk_bytes: int | None = None
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    network: bool = False
    readable: Sequence[Path] = ()
    hidden: Sequence[Path] = ()
    timeout_s: float | None = None
    hang_s: float | None = None
    grace_s: float = 10.0
    nsys: bool = False


@dataclass(frozen=True)
class AttemptUsage:
    """The resources that an attempt used; none where it could not be measured."""

    cpu_s: float | None = None
    peak_memory_bytes: int | None = None
    cpu_energy_j: float | None = None
    gpu_energy_j: float | None = None


@dataclass(frozen=True)
class AttemptState:
    """The state of an attempt.

    - `unknown`: none of its code has run, and none will unless `start` is called.
    - `starting`: it was accepted, and its code does not run yet.
    - `running`: its code runs.
    - `ended`: with an `exit_code`, by a `signal`, or with neither if its code could not be started. It succeeded if and
      only if `exit_code` is 0.
    - `lost`: its supervisor was killed. Its processes are gone, its progress is unknown, and it will not run again.
      `node_restarted` is true if that was because its node went down; the node may be back by now.

    `reason` says in one sentence why it failed. `limits` say how each limit is enforced ("memory: cgroup"). `stopped`
    says of an ended attempt whether `stop` caused the end; none if that is not known.
    """

    phase: Phase
    exit_code: int | None = None
    signal: int | None = None
    reason: str | None = None
    started_at: datetime | None = None
    ended_at: datetime | None = None
    used: AttemptUsage = AttemptUsage()
    limits: tuple[str, ...] = ()
    stopped: bool | None = None
    node_restarted: bool = False


class Launcher(Protocol):
    """Runs attempts independently of the platform: they continue when the process that started them is killed.

    All methods but `start` need only the attempt's name, so that any process can take over from another.
    """

    def start(self, launch: Launch) -> None:
        """Run `launch`, at most once per attempt name, however many callers there are.

        Further calls have no effect, also concurrent ones of other processes and calls after the first caller was
        killed. InvalidInput, IsolationRefused and Unavailable mean that nothing was started and that the call may be
        repeated; later failures are reported by `state`. InvalidInput also if `nsys` is requested and not installed.
        """
        ...

    def state(self, attempt: str) -> AttemptState:
        """Return the current state."""
        ...

    def stop(self, attempt: str, *, grace_s: float) -> None:
        """Send SIGTERM to all its processes, and SIGKILL after `grace_s`.

        Return at once; `state` reports the end. Without effect if the attempt has ended or is unknown.
        """
        ...

    def log(self, attempt: str, *, offset: int, limit: int) -> bytes:
        """Return up to `limit` bytes of its output from `offset` on; empty at the current end."""
        ...

    def delete(self, attempt: str) -> None:
        """Kill its remaining processes, and remove its directory, its log and its state.

        The name is unknown afterwards: `start` would run it as a new attempt.
        """
        ...
