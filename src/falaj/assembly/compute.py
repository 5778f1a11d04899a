"""The compute of the local machine: its nodes, the isolation of user code, and the launcher of jobs."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from falaj.assembly.home import Home
from falaj.control.jobs.context import JobHost
from falaj.control.jobs.environments import python_for
from falaj.control.jobs.reconciler import JobReconciler
from falaj.control.jobs.storage_limits import StorageLimits
from falaj.errors import IsolationRefused
from falaj.governance import isolation
from falaj.governance.bootstrap import count_users
from falaj.ports.hardware import NodeFacts
from falaj.ports.launcher import Launcher
from falaj.ports.metadata import Database
from falaj.ports.sandbox import MachineFacts
from falaj.records.config import Config, Pkcs11Config, S3Bucket
from falaj.records.governance.residency import Zone
from falaj.records.scheduling.snapshot import Node
from falaj.scheduling import node_from

if TYPE_CHECKING:
    from falaj.assembly.platform import LocalPlatform
    from falaj.drivers.processes.attempt_spec import SandboxSpec

REFRESH_S = 10.0
SHARED_ROOT = Path("/var/lib/falaj")


class LocalCompute:
    """This machine, in the default zone of the platform; discovered at the first use."""

    def __init__(self, home: Home, config: Config, database: Database, zone: Zone) -> None:
        self._home, self._config, self._database, self._zone = home, config, database, zone
        self._lock = threading.Lock()
        self._seen: tuple[tuple[NodeFacts, Node], ...] = ()
        self._seen_at = float("-inf")

    def nodes(self) -> tuple[Node, ...]:
        return tuple(node for _, node in self.machines())

    def machines(self) -> tuple[tuple[NodeFacts, Node], ...]:
        """Return the machines as discovered at most a few seconds ago, and as nodes."""
        from falaj.drivers.machine.inventory import LocalMachine

        with self._lock:
            if time.monotonic() - self._seen_at > REFRESH_S:
                here = self._config.node
                found = LocalMachine(mps_directory=here.mps).nodes()
                self._seen = tuple(
                    (facts, node_from(facts, zone=self._zone, pool=here.pool, labels=here.labels))
                    for facts in found
                )
                self._seen_at = time.monotonic()
            return self._seen

    def require_isolation(self, *, users: int) -> None:
        self._decide(users=users)

    def refusal(self) -> str | None:
        """Why jobs are refused in this home now, with the fix, in one line; none where they are not."""
        with self._database.read() as tx:
            users = count_users(tx)
        try:
            self._decide(users=users)
        except IsolationRefused as refused:
            return f"jobs are refused: {refused.message}"
        return None

    def require_environment(self, name: str) -> None:
        python_for(self._config.jobs.environments, name)

    def log(self, attempt: str, *, offset: int, limit: int) -> bytes:
        return self.launcher.log(attempt, offset=offset, limit=limit)

    @cached_property
    def launcher(self) -> Launcher:
        from falaj.drivers.processes.launcher import ProcessLauncher

        root, cgroup = self._home.path / "launches", self._config.node.cgroup
        return ProcessLauncher(root, sandbox=self._walls, cgroup=cgroup)

    @property
    def job_host(self) -> JobHost:
        hidden = (self._home.path, self._home.config_dir, *secret_files(self._config))
        grace_s = self._config.jobs.preemption_grace.total_seconds()
        return JobHost(
            self._folder,
            self.launcher,
            self.nodes,
            hidden=hidden,
            preemption_grace_s=grace_s,
            mps=self._config.node.mps,
            environments=self._config.jobs.environments,
            limits=allowance_in(self._zone.name, self._config, self._home),
        )

    @property
    def _folder(self) -> Path:
        """In the home, which is closed to every other uid. A job with a uid of its own must be able to pass through
        the folders above its directory, unless bubblewrap brings it there."""
        with contextlib.suppress(IsolationRefused):  # then none will start
            mechanism = self._decide(users=1).mechanism
            if mechanism == "uid" or (mechanism == "landlock" and self._facts.landlock_own_uid):
                return SHARED_ROOT / self._home.ident / "jobs"
        return self._home.path / "jobs"

    def _decide(self, *, users: int) -> isolation.Isolation:
        from falaj.drivers.sandbox import gaps_of

        return isolation.decide(self._facts, users=users, gaps=gaps_of, prefer=self._config.isolation)

    @cached_property
    def _facts(self) -> MachineFacts:
        from falaj.drivers.sandbox import probe

        return probe()

    def _walls(self) -> SandboxSpec:
        """Return the isolation to use now: it depends on the number of users."""
        from falaj.drivers.processes.attempt_spec import SandboxSpec

        with self._database.read() as tx:
            users = count_users(tx)
        return SandboxSpec(self._decide(users=users).mechanism, self._facts)


def allowance_in(zone: str, config: Config, home: Home) -> StorageLimits:
    """Return the storage allowance of checkpoints, whose blobs are in `zone`: on a local disk, or in a bucket."""
    blobs, limit = config.zones[zone].blobs, config.jobs.checkpoint_limit
    if isinstance(blobs, S3Bucket):
        return StorageLimits(limit)
    return StorageLimits(limit, disk=blobs.path or home.blobs)


def secret_files(config: Config) -> tuple[Path, ...]:
    """Return the files with secrets that falaj.toml names: they must be hidden from jobs."""
    named = [tls.key for tls in (config.server.tls, config.serving.tls) if tls is not None]
    secrets = [config.metadata.url]
    for zone in config.zones.values():
        if isinstance(zone.blobs, S3Bucket):
            secrets += [zone.blobs.access_key, zone.blobs.secret_key]
    if isinstance(config.keys, Pkcs11Config):
        secrets.append(config.keys.pin)
    elif config.keys.path is not None:
        named.append(config.keys.path)
    named += [Path(each.removeprefix("file:")) for each in secrets if each and each.startswith("file:")]
    return tuple(path.absolute() for path in named)


def job_reconciler(platform: LocalPlatform) -> Callable[[int, Callable[[], NoReturn]], JobReconciler]:
    """Return the factory of the job reconciler; it takes the controller's fence and a callback for a lost lease."""

    def make(fence: int, on_lost: Callable[[], NoReturn]) -> JobReconciler:
        job_host = platform.compute.job_host
        if (refusal := platform.compute.refusal()) is not None:
            print(f"warning: {refusal}", file=sys.stderr, flush=True)
        return JobReconciler(platform.gate, platform.services, job_host, fence=fence, on_lost=on_lost)

    return make
