"""The compute of the platform: its nodes, the isolation of user code, and the launcher of jobs.

It is the local machine, or the clusters that falaj.toml names.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from falaj.assembly.cluster_nodes import ClusterPools, is_lost
from falaj.assembly.clusters import AttemptTerms, ClusterCompute, launcher_for
from falaj.assembly.deferred import deferred
from falaj.assembly.home import Home
from falaj.control.clusters import tenants
from falaj.control.jobs.context import JobHost, RemoteHost, secret_of
from falaj.control.jobs.environments import image_for, python_for
from falaj.control.jobs.reconciler import JobReconciler
from falaj.control.jobs.storage_limits import StorageLimits
from falaj.control.jobs.volumes import cluster_volumes, machine_volumes
from falaj.errors import InvalidInput, IsolationRefused, Unavailable
from falaj.governance import isolation
from falaj.governance.bootstrap import count_users
from falaj.ports.cluster.namespaces import Tenant
from falaj.ports.cluster.placeholders import Placeholders
from falaj.ports.launcher import Launcher, VolumeMount
from falaj.ports.machine.hardware import NodeFacts, NodeTelemetry
from falaj.ports.metadata import Database
from falaj.ports.parsers import ParserPool
from falaj.ports.sandbox import MachineFacts
from falaj.records.config import Config, KubernetesConfig, Pkcs11Config
from falaj.records.governance.residency import Zone
from falaj.records.scheduling.snapshot import Node
from falaj.scheduling import node_from

if TYPE_CHECKING:
    from falaj.assembly.platform import LocalPlatform
    from falaj.drivers.kubernetes.launcher import KubernetesLauncher
    from falaj.drivers.kubernetes.routing import RoutedLauncher
    from falaj.drivers.processes.attempt_spec import SandboxSpec

REFRESH_S = 10.0
SHARED_ROOT = Path("/var/lib/falaj")


class LocalCompute:
    """This machine, in its zone, or the nodes of clusters; discovered at the first use.

    What attempts present to the platform is derived from `agent_key`.
    """

    def __init__(
        self, home: Home, config: Config, database: Database, zone: Zone, *, agent_key: bytes = b""
    ) -> None:
        self._home, self._config, self._database, self._zone = home, config, database, zone
        self._agent_key = agent_key
        self._lock = threading.Lock()
        self._seen: tuple[tuple[NodeFacts, Node], ...] = ()
        self._seen_at = float("-inf")

    def nodes(self) -> tuple[Node, ...]:
        """Return the nodes that answer."""
        return tuple(node for facts, node in self.machines() if not is_lost(facts))

    def machines(self) -> tuple[tuple[NodeFacts, Node], ...]:
        """Return the machines as discovered at most a few seconds ago, and as nodes; also those that are lost."""
        if self._clusters:  # kept current by watches
            return self._pools.machines()
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

    def telemetry(self) -> tuple[NodeTelemetry, ...]:
        """Return what the machines report now; of a cluster nothing, whose own exporters know more."""
        if self._clusters:
            return ()
        from falaj.drivers.machine.telemetry import read_telemetry

        volumes = [self._home.path, *plain_stores(self._config)]
        return tuple(read_telemetry(node.name, volumes=volumes) for node in self.nodes())

    def require_isolation(self, *, users: int) -> None:
        if not self._clusters:  # else each job has its own pods
            self._decide(users=users)

    def refusal(self) -> str | None:
        """Why jobs are refused in this home now, with the fix, in one line; none where they are not."""
        if self._clusters:
            return None
        with self._database.read() as tx:
            users = count_users(tx)
        try:
            self._decide(users=users)
        except IsolationRefused as refused:
            return f"jobs are refused: {refused.message}"
        return None

    def require_environment(self, name: str) -> None:
        if self._clusters:
            image_for(self._pods.environments, name)
        else:
            python_for(self._config.jobs.environments, name)

    def require_network(self) -> None:
        if self._clusters and not self._pods.egress:
            from falaj.drivers.kubernetes.launcher import no_network

            raise no_network()

    def volumes(self, names: Sequence[str], workspace: str) -> tuple[VolumeMount, ...]:
        if self._clusters:
            return cluster_volumes(self._pods.volumes, names, workspace)
        return machine_volumes(self._config.jobs.volumes, names, workspace)

    def require_storage(
        self, volumes: Sequence[VolumeMount], workspace: str, *, disk_bytes: int | None
    ) -> None:
        if not self._clusters:
            return
        from falaj.drivers.kubernetes.storage import require_disk

        require_disk(disk_bytes, self._scratch_bytes)
        for name, cluster in self._clusters.items():
            with contextlib.suppress(Unavailable):  # the attempt waits for the cluster, and says so
                for each in volumes:
                    if (why := cluster.explain_claim(str(each.claim), workspace)) is not None:
                        where = "" if name is None else f"in cluster {name}: "
                        raise InvalidInput.at("spec.volumes", given=each.name, allowed=where + why)

    @property
    def _scratch_bytes(self) -> int | None:
        """The disk space of a pod; none where the cluster does not limit it, or jobs run on this machine."""
        there = self._config.kubernetes if self._clusters else None
        return None if there is None or there.scratch is None else there.scratch.size

    def log(self, attempt: str, *, offset: int, limit: int) -> bytes:
        return self.launcher.log(attempt, offset=offset, limit=limit)

    @cached_property
    def launcher(self) -> Launcher:
        if self._clusters:
            return self._cluster_launcher
        from falaj.drivers.processes.launcher import ProcessLauncher

        root, cgroup = self._home.path / "launches", self._config.node.cgroup
        lease = None if self._fence_s is None else self._lease
        return ProcessLauncher(root, sandbox=self._sandbox, cgroup=cgroup, lease=lease)

    @cached_property
    def _clusters(self) -> dict[str | None, ClusterCompute]:
        """The clusters that jobs run on, by name; none if they run on this machine."""
        if self._config.kubernetes_of_jobs is None:
            return {}
        terms = AttemptTerms(
            grace_s=self._config.jobs.preemption_grace.total_seconds(),
            fence_s=math.ceil(self._config.jobs.fence_after.total_seconds()),
            lease=self._lease,
            secret_of=lambda attempt: secret_of(self._agent_key, attempt) or "",
            tenant_of=self._tenant,
            is_kueue=self._config.kueue_waiting_limit is not None,
        )
        return {
            name: ClusterCompute(self._home, each, terms) for name, each in self._pods.each_cluster().items()
        }

    @cached_property
    def _pools(self) -> ClusterPools:
        inventories = {name: each.open_nodes for name, each in self._clusters.items()}
        return ClusterPools(inventories, self._config)

    def placeholders(self) -> dict[str | None, Placeholders]:
        """Return what asks the autoscalers of clusters for nodes, opened at the first use."""
        return {name: deferred(each.open_placeholders) for name, each in self._clusters.items()}

    def _tenant(self, workspace: str) -> Tenant:
        known = (each for each in tenants(self._database) if each.workspace == workspace)
        return next(known, Tenant(workspace))

    @property
    def _pods(self) -> KubernetesConfig:
        assert self._config.kubernetes is not None  # noqa: S101 - the configuration was checked
        return self._config.kubernetes

    @cached_property
    def _cluster_launcher(self) -> KubernetesLauncher | RoutedLauncher:
        return launcher_for(self._clusters, self._home)

    def _remote(self) -> RemoteHost | None:
        """Return how the machines of the cluster reach the controller; none if jobs run on this machine."""
        if not self._clusters:
            return None
        from falaj.drivers.kubernetes.certificate import ensure_certificate

        file = ensure_certificate(self._home.agent_certificate)
        return RemoteHost(
            self._pods.agent_address,
            certificate=file,
            key=file,
            workers=self._cluster_launcher.worker_host,
            sweep=self._cluster_launcher.sweep,
            image=str(self._pods.image),
            image_of=self._cluster_launcher.image_of,
            environments=self._pods.environments,
            is_store_open=bool(self._pods.store),
        )

    def close(self) -> None:
        """Close what was opened to reach clusters."""
        for each in self._clusters.values():
            each.close()

    def renew_attempts(self, since: float) -> None:
        """Extend the lease of the attempts of this home: its controller was in charge at `since`, in boot time."""
        from falaj.drivers.processes.attempt_lease import AttemptLease

        if self._fence_s is not None:
            AttemptLease(self._lease, self._fence_s).renew(since)

    @property
    def _lease(self) -> Path:
        return self._home.path / "attempts.lease"

    @property
    def _fence_s(self) -> int | None:
        """After how long without renewal attempts stop; none if no other machine can take over: SQLite is a file.

        In a cluster the next attempt may run on another machine, so that they always have a lease.
        """
        if not self._config.metadata.is_shared and not self._clusters:
            return None
        return math.ceil(self._config.jobs.fence_after.total_seconds())

    def job_host(self, parsers: ParserPool, *, agent_key: bytes) -> JobHost:
        private = (*secret_files(self._config), *plain_stores(self._config))
        hidden = (self._home.path, self._home.config_dir, *private)
        grace_s = self._config.jobs.preemption_grace.total_seconds()
        return JobHost(
            self._folder,
            self.launcher,
            self.nodes,
            parsers,
            hidden=hidden,
            preemption_grace_s=grace_s,
            mps=self._config.node.mps,
            environments=self._config.jobs.environments,
            limits=allowance_in(self._config.default_zone, self._config, self._home),
            home=self._home.ident,
            fence_s=self._fence_s,
            memory_default_bytes=self._config.jobs.memory_default,
            disk_default_bytes=smallest(self._config.jobs.disk_default, self._scratch_bytes),
            agent_key=agent_key,
            remote=self._remote(),
            waiting_limit=self._config.kueue_waiting_limit,
            volumes=self.volumes,
            is_unseen=lambda node: bool(self._clusters) and self._pools.is_unseen(node),
        )

    @property
    def _folder(self) -> Path:
        """In the home, which is closed to every other uid. A job with a uid of its own must be able to pass through
        the folders above its directory, unless bubblewrap brings it there."""
        if self._clusters:
            return self._home.path / "jobs"
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

    def _sandbox(self) -> SandboxSpec:
        """Return the isolation to use now: it depends on the number of users."""
        from falaj.drivers.processes.attempt_spec import SandboxSpec

        with self._database.read() as tx:
            users = count_users(tx)
        return SandboxSpec(self._decide(users=users).mechanism, self._facts)


def smallest(*amounts: int | None) -> int | None:
    """Return the smallest of the amounts that are known; none if there is none."""
    return min((each for each in amounts if each is not None), default=None)


def allowance_in(zone: str, config: Config, home: Home) -> StorageLimits:
    """Return the storage allowance of checkpoints, whose blobs are in `zone`: on a local disk, or in a bucket."""
    blobs, limit = config.zones[zone].blobs, config.jobs.checkpoint_limit
    return StorageLimits(limit, disk=None if blobs.address is not None else blobs.path or home.blobs)


def secret_files(config: Config) -> tuple[Path, ...]:
    """Return the files with secrets that falaj.toml names: they must be hidden from jobs."""
    named = [tls.key for tls in (config.server.tls, config.serving.tls) if tls is not None]
    secrets = [config.metadata.url]
    for zone in config.zones.values():
        secrets += zone.blobs.secrets
    if isinstance(config.keys, Pkcs11Config):
        secrets.append(config.keys.pin)
    elif config.keys.path is not None:
        named.append(config.keys.path)
    if config.serving.triton is not None:
        secrets += [config.serving.triton.token, *config.serving.triton.headers.values()]
    if config.kubernetes is not None:
        clusters = (config.kubernetes, *config.kubernetes.each_cluster().values())
        named += [each.kubeconfig for each in clusters if each.kubeconfig is not None]
    named += [Path(each.removeprefix("file:")) for each in secrets if each and each.startswith("file:")]
    return tuple(path.absolute() for path in named)


def plain_stores(config: Config) -> tuple[Path, ...]:
    """Return the folders outside the home with tables, which are not encrypted: they must be hidden from jobs."""
    named = [zone.tables.path for zone in config.zones.values()]
    named += [zone.blobs.path for zone in config.zones.values()]
    return tuple(path.absolute() for path in named if path is not None)


def job_reconciler(platform: LocalPlatform) -> Callable[[int, Callable[[], NoReturn]], JobReconciler]:
    """Return the factory of the job reconciler; it takes the controller's fence and a callback for a lost lease."""

    def make(fence: int, on_lost: Callable[[], NoReturn]) -> JobReconciler:
        job_host = platform.compute.job_host(platform.parsers, agent_key=platform.agent_key)
        if (refusal := platform.compute.refusal()) is not None:
            with contextlib.suppress(OSError, ValueError):  # nobody can read it
                print(f"warning: {refusal}", file=sys.stderr, flush=True)
        return JobReconciler(platform.gate, platform.services, job_host, fence=fence, on_lost=on_lost)

    return make
