"""A platform with a fake machine: its launcher runs a function of the test."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from falaj.control import lease
from falaj.control.jobs.agent_server import SOCKET
from falaj.control.jobs.context import JobHost, agent_secret
from falaj.control.jobs.reconciler import JobReconciler
from falaj.errors import InvalidInput, IsolationRefused
from falaj.governance.operations.caller import acting_as, on_terms
from falaj.ports.launcher import AttemptState, Launch, VolumeMount
from falaj.records.scheduling.snapshot import Gpu, Node, Placement
from falaj.records.training.jobs import Job, JobSpec
from falaj.training.runtime.agent.protocol import SECRET_VARIABLE
from falaj.training.service import Jobs
from platforms import OwnPlatform

NODE = Node(name="here", zone="local", jurisdiction="AE", cpus=4, memory_bytes=8 << 30)
GPU_NODE = NODE.model_copy(update={"gpus": (Gpu(id="GPU-0", model="fake", memory_bytes=1 << 34),)})

Program = Callable[[Launch], AttemptState]

DONE = AttemptState("ended", exit_code=0)
STOPPED = AttemptState("ended", signal=15, reason="It was stopped on request")
FAILED = AttemptState("ended", exit_code=1, reason="Exit code 1: ValueError: no")


class FakeLauncher:
    """Implements the port without processes; `runs` counts how often the code of each attempt ran."""

    def __init__(self) -> None:
        self.program: Program = lambda _: DONE
        self.runs: dict[str, int] = {}
        self.known: dict[str, AttemptState] = {}
        self.stopped: list[str] = []
        self.graces: list[float] = []
        self.ends_with: AttemptState | None = STOPPED
        self.output = b"what it printed\n"

    def start(self, launch: Launch) -> None:
        if launch.attempt not in self.known:
            assert (launch.directory / "code").is_dir()
            self.runs[launch.attempt] = self.runs.get(launch.attempt, 0) + 1
            self.known[launch.attempt] = self.program(launch)

    def state(self, attempt: str) -> AttemptState:
        return self.known.get(attempt, AttemptState("unknown"))

    def stop(self, attempt: str, *, grace_s: float) -> None:
        self.stopped.append(attempt)
        self.graces.append(grace_s)
        if self.ends_with is not None and attempt in self.known and self.known[attempt].phase == "running":
            self.known[attempt] = self.ends_with

    def log(self, attempt: str, *, offset: int, limit: int) -> bytes:
        return self.output[offset : offset + limit] if attempt in self.known else b""

    def delete(self, attempt: str) -> None:
        self.known.pop(attempt, None)


@dataclass
class FakeMachine:
    """An execution backend with the node and the isolation that the test wants."""

    launcher: FakeLauncher = field(default_factory=FakeLauncher)
    node: Node = NODE
    refuses: bool = False

    def nodes(self) -> tuple[Node, ...]:
        return (self.node,)

    def require_isolation(self, *, users: int) -> None:
        if self.refuses and users > 1:
            raise IsolationRefused(f"nothing keeps user code apart, and this home has {users} users")

    def require_environment(self, name: str) -> None:
        raise InvalidInput.at("environment", given=name, allowed="none")

    def require_network(self) -> None:
        pass

    def volumes(self, names: Sequence[str], workspace: str) -> tuple[VolumeMount, ...]:
        return ()

    def require_storage(
        self, volumes: Sequence[VolumeMount], workspace: str, *, disk_bytes: int | None
    ) -> None:
        pass

    def log(self, attempt: str, *, offset: int, limit: int) -> bytes:
        return self.launcher.log(attempt, offset=offset, limit=limit)


class JobHarness:
    """A platform, its job service on the fake machine, and reconcilers for it."""

    def __init__(self, platform: OwnPlatform, folder: Path) -> None:
        self.platform = platform
        self.machine = FakeMachine()
        self.launcher = self.machine.launcher
        self.wanted = 0
        real = platform.jobs
        self.jobs = Jobs(
            platform.parts.gate,
            runs=real._runs,
            scheduler=real._scheduler,
            backend=self.machine,
            blobs=real._blobs,
            accounts=real._accounts,
            wanted=self._want,
        )
        self.services = replace(platform.parts.services, jobs=self.jobs)
        self.host = JobHost(folder / "jobs", self.launcher, self.machine.nodes, platform.parts.parsers)
        self.fence = 0

    def agent_variables(self, job: Job) -> dict[str, str]:
        """Return the variables with which the first attempt of a job finds its agent."""
        path = self.host.folder / job.id / "1.agent" / SOCKET
        return {"FALAJ_AGENT": str(path), SECRET_VARIABLE: agent_secret(self.host.agent_key, job.id, 1)}

    def _want(self) -> None:
        self.wanted += 1

    def submit(self, *, files: dict[str, str] | None = None, **spec: Any) -> Job:
        """Submit a job whose script is train.py."""
        given = {"name": "fitting", "script": "train.py", **spec}
        code = self.platform.blobs.upload(iter([archive(files or {"train.py": "print(1)"})]))
        return self.jobs.submit(JobSpec.model_validate(given), code=code.id)

    def reconciler(self, *, on_lost: Callable[[], NoReturn] | None = None) -> JobReconciler:
        """Return a new reconciler, whose lease replaces the one before."""
        clock, database = self.platform.clock, self.platform.database
        clock.advance(timedelta(seconds=11))
        lease.release(database, self.fence, now=clock())  # PostgreSQL has a clock of its own
        fence = lease.acquire(database, "test", now=clock(), lasts=timedelta(seconds=10))
        assert fence is not None
        self.fence = fence
        services, gate = self.services, self.platform.parts.gate
        return JobReconciler(gate, services, self.host, fence=fence, on_lost=on_lost or lease_lost)

    def as_controller(self) -> Any:
        """Act as the controller's service account."""
        return acting_as(self.reconciler()._context.service)

    def begin(self, job: Job, attempt: int = 1) -> Job:
        with self.as_controller(), on_terms(fence=self.fence):
            return self.jobs.begin(job.id, attempt=attempt, placements=(Placement(replica=0, node="here"),))

    def finish(self, job: Job, verdict: Any, attempt: int = 1, **values: Any) -> Job:
        with self.as_controller(), on_terms(fence=self.fence):
            return self.jobs.finish(job.id, attempt=attempt, verdict=verdict, **values)


def lease_lost() -> NoReturn:
    raise AssertionError("the lease was lost")


def archive(files: dict[str, str]) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:gz") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))
    return raw.getvalue()
