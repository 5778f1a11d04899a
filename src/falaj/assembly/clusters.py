"""The clusters that jobs run on: the connections to each, its nodes, its namespaces and its launcher."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

from falaj.assembly.home import Home
from falaj.ports.cluster.namespaces import Tenant
from falaj.records.config import KubernetesConfig
from falaj.records.scheduling.cluster_names import namespace_of

if TYPE_CHECKING:
    from falaj.drivers.kubernetes.cluster import ApiCluster
    from falaj.drivers.kubernetes.isolation.namespaces import KubernetesNamespaces
    from falaj.drivers.kubernetes.launcher import KubernetesLauncher
    from falaj.drivers.kubernetes.nodes import KubernetesNodes
    from falaj.drivers.kubernetes.placeholders import KubernetesPlaceholders
    from falaj.drivers.kubernetes.pods import PodSettings
    from falaj.drivers.kubernetes.routing import RoutedLauncher
    from falaj.drivers.kubernetes.workloads import KueueWorkloads


@dataclass(frozen=True)
class AttemptTerms:
    """What holds for attempts in all clusters.

    `grace_s` is how long a pod may take to end. `secret_of` returns what an attempt presents to the platform,
    `tenant_of` a workspace with the most that its jobs may hold. After `fence_s` without a renewed lease, which is in
    the file `lease`, workers stop by themselves. With `is_kueue` Kueue decides when they start.
    """

    grace_s: float
    fence_s: int
    lease: Path
    secret_of: Callable[[str], str]
    tenant_of: Callable[[str], Tenant]
    is_kueue: bool


class ClusterCompute:
    """One cluster; it is reached at the first use."""

    def __init__(self, home: Home, config: KubernetesConfig, terms: AttemptTerms) -> None:
        self._home, self._config, self._terms = home, config, terms

    def open_nodes(self) -> KubernetesNodes:
        """Return the inventory; ConfigInvalid if the kubeconfig is wrong."""
        return self._nodes

    @cached_property
    def _nodes(self) -> KubernetesNodes:
        from falaj.drivers.kubernetes.nodes import KubernetesNodes

        return KubernetesNodes(self._config, home=self._home.ident)

    def open_launcher(self) -> KubernetesLauncher:
        return self._launcher

    @cached_property
    def _launcher(self) -> KubernetesLauncher:
        from falaj.drivers.kubernetes.certificate import ensure_certificate, public_part
        from falaj.drivers.kubernetes.launcher import KubernetesLauncher
        from falaj.drivers.processes.attempt_lease import AttemptLease

        there, terms = self._config, self._terms
        return KubernetesLauncher(
            self._home.path / "launches",
            self._cluster,
            self._settings,
            namespaces=self._namespaces,
            objects=there.objects,
            secret_of=terms.secret_of,
            certificate=lambda: public_part(ensure_certificate(self._home.agent_certificate)),
            lease_left_s=AttemptLease(terms.lease, terms.fence_s).left_s,
            fence_s=terms.fence_s,
            admissions=self._workloads,
        )

    def explain_claim(self, claim: str, workspace: str) -> str | None:
        """Return why jobs of a workspace cannot mount a claim; none if they can."""
        from falaj.drivers.kubernetes.storage import explain_claim

        namespace = namespace_of(workspace, prefix=self._config.prefix)
        return explain_claim(self._cluster, claim, namespace=namespace)

    def open_placeholders(self) -> KubernetesPlaceholders:
        """Return what asks an autoscaler of the cluster for nodes."""
        from falaj.drivers.kubernetes.placeholders import KubernetesPlaceholders

        return KubernetesPlaceholders(self._cluster, self._settings, self._namespaces)

    @cached_property
    def _settings(self) -> PodSettings:
        from falaj.drivers.kubernetes.pods import PodSettings

        there = self._config
        return PodSettings(
            image=str(there.image),
            prefix=there.prefix,
            agent_url=str(there.agent_url),
            home=self._home.ident,
            grace_s=self._terms.grace_s,
            scheduler=there.scheduler,
            tolerate=there.tolerate,
            images=there.images,
            has_egress=bool(there.egress),
            zones=there.zones,
            topology=there.topology,
            scratch_bytes=None if there.scratch is None else there.scratch.size,
            scratch_class=None if there.scratch is None else there.scratch.storage_class,
        )

    @cached_property
    def _cluster(self) -> ApiCluster:
        from falaj.drivers.kubernetes.client import connect
        from falaj.drivers.kubernetes.cluster import ApiCluster

        return ApiCluster(partial(connect, self._config), home=self._home.ident)

    @cached_property
    def _namespaces(self) -> KubernetesNamespaces:
        from falaj.drivers.kubernetes.client import connect
        from falaj.drivers.kubernetes.isolation.namespaces import KubernetesNamespaces

        return KubernetesNamespaces(
            self._config, partial(connect, self._config), limits_of=self._terms.tenant_of
        )

    @cached_property
    def _workloads(self) -> KueueWorkloads | None:
        """What Kueue says about attempts; none unless it decides."""
        if not self._terms.is_kueue:
            return None
        from falaj.drivers.kubernetes.client import connect
        from falaj.drivers.kubernetes.workloads import KueueWorkloads

        return KueueWorkloads(partial(connect, self._config))

    def close(self) -> None:
        """Close what was opened."""
        for name in ("_cluster", "_nodes", "_namespaces", "_workloads"):
            opened = self.__dict__.get(name)
            if opened is not None:
                opened.close()


def launcher_for(
    clusters: Mapping[str | None, ClusterCompute], home: Home
) -> KubernetesLauncher | RoutedLauncher:
    """Return the launcher of the only cluster, or one that starts each attempt in the cluster of its nodes."""
    named = {name: each for name, each in clusters.items() if name is not None}
    if not named:
        return clusters[None].open_launcher()
    from falaj.drivers.kubernetes.routing import RoutedLauncher

    launchers = {name: each.open_launcher for name, each in named.items()}
    return RoutedLauncher(home.path / "launches", launchers)
