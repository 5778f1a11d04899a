"""Where attempts at jobs run: this machine's processes, or a cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:  # not loaded with it: records take pydantic, for which every start of an attempt would wait
    from falaj.records.training.jobs import Framework

WHOLE_GPU = 1000
"""As in `records.scheduling`."""

Phase = Literal["unknown", "starting", "running", "ended", "lost"]


@dataclass(frozen=True)
class Launch:
    """One attempt at a job: the user's command, and all that it may use.

    `attempt` names it for good ("job_…/1"). `directory` is its private folder, which the caller has filled:
    `code/` (the working directory), `inputs/` and `outputs/`; the launcher may hand it to another uid, so do
    not trust what is left there, links least of all. `command` is complete for one process, program first;
    with the framework torch it is Python, its options, and the script or `-m module` with its arguments.
    `environment` is the whole environment: nothing of the platform's is added, only what the launcher decides
    (threads, visible GPUs, unbuffered output, a rank's own variables).

    `processes` are copies that live and die together: torchrun's workers, or plain copies with FALAJ_RANK and
    FALAJ_WORLD_SIZE. `cpus` and `memory_bytes` are for all of them together.
    `processes_min` is with how many torch may go on when some are lost; `roles` count the processes of each role, for
    frameworks that tell them apart. `gpus` are the UUIDs of its cards or MIG slices; `gpu_milli` below 1000 is so many
    thousandths of one card, by MPS, with `gpu_memory_bytes` of its memory, for all processes together; the daemon
    listens in `mps_directory`. `disk_bytes` is what it may add to its directory. `secrets` are further variables of its
    environment, which are neither written to a disk nor shown in its log. `readable` are further paths that it may
    read, `hidden` are paths that it must not reach. After `timeout_s` it is stopped, and killed `grace_s` later. After
    `hang_s` without a sign of life from a rank, the stacks of all ranks go to its log and it ends as failed. With
    `nsys` its processes run under Nsight Systems, which leaves its reports in `outputs/`; InvalidInput where it is not
    installed.
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
class ResourceUsage:
    """What an attempt has used, as far as it could be measured; none: it could not be."""

    cpu_s: float | None = None
    peak_memory_bytes: int | None = None
    cpu_energy_j: float | None = None
    gpu_energy_j: float | None = None


@dataclass(frozen=True)
class AttemptState:
    """How far an attempt is.

    `unknown`: none of its code has run, and none will unless `start` is called (again). `starting`: it was
    accepted, its code does not run yet. `ended`: with an `exit_code`, or by a `signal`, or with neither where
    the code could not be started at all; it went well if and only if `exit_code` is 0. `lost`: what watched
    over it was killed; its code is gone, how far it came is not known, and it will not run again. `reason`
    says in one sentence why it did not go well. `limits` say what holds it to its share here ("memory: cgroup").
    `stopped` says of one that has ended whether that was because of `stop`; none: it is not known. `went_down` is
    one that is lost because its machine was, and may be there again by now.
    """

    phase: Phase
    exit_code: int | None = None
    signal: int | None = None
    reason: str | None = None
    started_at: datetime | None = None
    ended_at: datetime | None = None
    used: ResourceUsage = ResourceUsage()
    limits: tuple[str, ...] = ()
    stopped: bool | None = None
    node_restarted: bool = False


class Launcher(Protocol):
    """Runs attempts apart from the platform: they go on when the process that started them is killed.

    Everything but `start` needs only the attempt's name, so that any process can take up where another was
    killed.
    """

    def start(self, launch: Launch) -> None:
        """Run `launch`, at most once for each attempt, whoever calls and however often.

        A second call, one by another process at the same time, or one after the first caller was killed,
        changes nothing. InvalidInput, IsolationRefused and Unavailable mean that nothing was started, and that
        it may be tried again; what goes wrong later is told by `state`.
        """
        ...

    def state(self, attempt: str) -> AttemptState: ...

    def stop(self, attempt: str, *, grace_s: float) -> None:
        """Ask all its processes to end (SIGTERM), and kill them after `grace_s`.

        Returns at once; `state` tells when it has ended. Nothing happens if it has ended or is unknown.
        """
        ...

    def log(self, attempt: str, *, offset: int, limit: int) -> bytes:
        """Up to `limit` bytes of its output from `offset` on; empty at the end of what there is by now."""
        ...

    def delete(self, attempt: str) -> None:
        """Kill what is left of it, and remove its directory, its log and its state.

        Its name is unknown from then on: a later `start` would run it as a new one.
        """
        ...
