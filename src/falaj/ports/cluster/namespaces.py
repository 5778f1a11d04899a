"""The port for the namespaces of workspaces in a cluster."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from falaj.ports.cluster.manifests import Manifest
from falaj.records.scheduling.snapshot import Quota

GRANT = "falaj clusters render | kubectl apply --server-side -f -"
"""How an administrator gives the platform all the rights and namespaces that it needs."""


class Tenant(NamedTuple):
    """A workspace, and the most that its running jobs may hold together."""

    workspace: str
    limits: Quota = Quota()


class ClusterNamespaces(Protocol):
    """A namespace for each workspace, in which its jobs run apart from those of others."""

    def render(self, tenants: Iterable[Tenant]) -> list[Manifest]:
        """Return what an administrator applies before the first job: the platform's account and its rights, and the
        namespaces if the platform is not to make them. The cluster is not asked."""
        ...

    def ensure(self, tenant: Tenant) -> str:
        """Make the namespace of a workspace as it is to be, and return its name.

        Raise Unavailable if it is someone else's, is being deleted, or if the platform may not make it.
        """
        ...

    def existing(self) -> dict[str, str]:
        """Return the namespaces of this platform's workspaces that are not being deleted, with their workspaces."""
        ...
