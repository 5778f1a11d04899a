"""What an administrator applies to a cluster, and the namespaces that the platform keeps there."""

from __future__ import annotations

from typing import Any, Literal

from falaj.records.record import Record


class ClusterManifests(Record):
    """The objects that let the platform work in a cluster, in the order of their creation."""

    manifests: tuple[dict[str, Any], ...]


class NamespaceState(Record):
    """The namespace of a workspace: `kept` as it is to be, `refused` for a reason, or `extra`: of no workspace.

    `cluster` is none if there is only one.
    """

    workspace: str
    namespace: str
    state: Literal["kept", "refused", "extra"]
    reason: str | None = None
    cluster: str | None = None


class ClusterNamespaceSync(Record):
    """The namespaces of all workspaces, and those of workspaces that are not there any more."""

    namespaces: tuple[NamespaceState, ...]
