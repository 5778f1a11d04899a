"""The port for launching attempts at jobs: as processes of this machine, or on a cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:  # records load pydantic, which would delay the start of every attempt
    from falaj.records.training.jobs import Framework

WHOLE_GPU = 1000
"""A whole GPU in thousandths, as in `records.scheduling`."""

FENCE_GRACE_S = 5.0
"""How long an attempt may take to end after its lease has run out."""


def fence_wait_s(fence_s: float) -> float:
    """Return after how long without renewal an attempt on another machine has certainly ended: the time of its lease,
    and a margin for its end and for clocks that run at different speeds."""
    return fence_s + max(2 * FENCE_GRACE_S, fence_s / 4)


Phase = Literal["unknown", "starting", "running", "ended", "lost"]


@dataclass(frozen=True)
class OpenPlacement:
    """What the queue of a cluster is told of an attempt that it places itself.

    `priority` is that of the job. It may run in `zones` only, unless that is none, and on `machines` only, unless there
    are none. With `spread` each node is on a machine of its own; with `together` all are on one fabric.
    """

    priority: int = 0
    zones: tuple[str, ...] | None = None
    machines: tuple[str, ...] = ()
    spread: bool = False
    together: bool = False


VOLUMES = "/volumes"
"""Where pods have their volumes, each by its name."""


@dataclass(frozen=True)
class VolumeMount:
    """A volume of an attempt: a `folder` of this machine, or a `claim` in its namespace, of which `path` is mounted.

    It lies in `zone`, if that is known.
    """

    name: str
    read_only: bool = True
    zone: str | None = None
    folder: Path | None = None
    claim: str | None = None
    path: str | None = None


@dataclass(frozen=True)
class Launch:
    """One attempt at a job: the user's command, its resources and its limits.

    Identity and files:
    - `attempt` is its permanent name ("job_…/1").
    - `directory` is its private folder, which the caller has filled: `code/` (the working directory), `inputs/` and
      `outputs/`. The launcher may give it to another uid. Do not trust its content afterwards, in particular links.
    - `readable` are further paths that it may read, `hidden` are paths that it must not reach.
    - `volumes` are claims that its pods mount, for launchers that make pods.

    Program:
    - `command` is the complete command of one process, program first. For torch it is Python, its options, and the
      script or `-m module` with its arguments.
    - `environment` is the whole environment. The launcher adds only what it decides: threads, visible GPUs, unbuffered
      output, and the variables of a rank.
    - `secrets` are further environment variables, which are neither written to disk nor shown in the log.
    - `framework` selects the launch contract. `processes` start and end together: workers of torchrun, or copies with
      FALAJ_RANK and FALAJ_WORLD_SIZE. `processes_min` is the smallest number of them with which torch may continue.
      `roles` count the processes of each role on all nodes, for frameworks that have roles.
    - A job of several `nodes` runs `processes` on each. `peers` are the addresses of all nodes, or names that are
      resolved before its code starts, and this launch is the one of number `node_rank`; without peers it runs the
      processes of all nodes. Nodes do not watch each other: whoever starts several stops the others as soon as one has
      failed, or all have ended whose end decides.
    - `hosts` are the names of the machines on which the scheduler placed the nodes, and `labels` say whose it is
      (`name`, `workspace`, `queue`), for launchers that show it. `image` is the container image that it runs in, for
      launchers that need one; none: the launcher's own. `open_placement` is for an attempt that the scheduler did not
      place: the queue of the cluster does.
    - With `nsys` its processes run under Nsight Systems, which writes its reports to `outputs/`.

    Resources of one node, for all its processes together; a launch without peers has those of all its nodes:
    - `cpus`, `memory_bytes`, and `disk_bytes`, which is how much it may add to its directory.
    - `gpus` are the UUIDs of all its cards or MIG slices here. `gpu_milli` below 1000 is a fraction of one card in
      thousandths, by MPS, with `gpu_memory_bytes` of its memory; the MPS daemon listens in `mps_directory`.
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
    nodes: int = 1
    node_rank: int = 0
    peers: tuple[str, ...] = ()
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
    hosts: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    image: str | None = None
    open_placement: OpenPlacement | None = None
    volumes: tuple[VolumeMount, ...] = ()


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
    - `starting`: it was accepted, and its code does not run yet; `reason` may say what it waits for.
    - `running`: its code runs.
    - `ended`: with an `exit_code`, by a `signal`, or with neither if its code could not be started. It succeeded if and
      only if `exit_code` is 0.
    - `lost`: its supervisor was killed. Its processes are gone, its progress is unknown, and it will not run again.
      `node_restarted` is true if that was because its node went down; the node may be back by now.

    `reason` says in one sentence why it failed. `limits` say how each limit is enforced ("memory: cgroup"). `stopped`
    says of an ended attempt whether `stop` caused the end; none if that is not known. `fenced` says that it was stopped
    because no controller renewed the lease of the attempts of its home. `evicted` says in a sentence why the cluster
    ended it although nothing was wrong with it: its machine was drained, or was lost; `preempted` that it did so for
    another one. `hosts` are the machines that its nodes run or ran on, where the cluster placed it.
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
    fenced: bool = False
    evicted: str | None = None
    preempted: bool = False
    hosts: tuple[str, ...] = ()


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


@dataclass(frozen=True)
class PodImage:
    """The image of an attempt's pods: the `reference` that they were created with, the digest that they `ran` as the
    cluster reports it, and the list of its Python packages as its worker reports it; empty until then."""

    reference: str
    ran: str | None = None
    packages: str = ""

    @property
    def digest(self) -> str | None:
        """What ran, or the reference where it fixes that; none if neither is known."""
        return self.ran or (self.reference if "@sha256:" in self.reference else None)


@dataclass(frozen=True)
class WorkerOrder:
    """The answer to a worker that renews its lease: how long the lease lasts from now on, and whether to stop."""

    lease_s: float
    stop_grace_s: float | None = None


class WorkerHost(Protocol):
    """What the workers of an attempt fetch from the platform and report to it.

    A worker runs the processes of one node on another machine than the platform (decision 0034). All methods may be
    repeated: a worker sends again what was not answered. A node is claimed by one pod for good, and the methods that
    take a `pod` raise Conflict if it is not the one.
    """

    def claim(self, node_rank: int, pod: str) -> None:
        """Let `pod` run this node. Conflict if another one does or did, or if the attempt is over."""
        ...

    def launch(self, node_rank: int, pod: str) -> dict[str, Any]:
        """Return what to run, as JSON, without secrets."""
        ...

    def files(self) -> bytes:
        """Return the code and the inputs as JSON: a list of objects with `path`, `size`, `sha256` and `mode`."""
        ...

    def read_file(self, path: str, *, offset: int, length: int) -> tuple[int, Iterator[bytes]]:
        """Return up to `length` bytes of a file from `offset` on, and their number. NotFound for any other path."""
        ...

    def append_log(self, node_rank: int, pod: str, *, offset: int, body: Iterator[bytes]) -> int:
        """Append to the log of a node, and return its length. What lies before its present end is skipped."""
        ...

    def save_output(
        self, node_rank: int, pod: str, path: str, *, size: int, sha256: str, body: Iterator[bytes]
    ) -> None:
        """Store an output file, once it is complete. InvalidInput if it is not what was announced."""
        ...

    def save_packages(self, node_rank: int, pod: str, body: Iterator[bytes]) -> None:
        """Store which Python packages a node has, as a text; that of node 0 counts."""
        ...

    def renew(self, node_rank: int, pod: str) -> WorkerOrder:
        """Return for how long the node may go on, and whether it is to stop."""
        ...

    def end(self, node_rank: int, pod: str, result: Mapping[str, Any]) -> None:
        """Record how the node ended; the first result counts."""
        ...
