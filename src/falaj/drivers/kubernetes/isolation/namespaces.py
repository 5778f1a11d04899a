"""The namespaces of workspaces, as the platform keeps them in the cluster."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from falaj.drivers.kubernetes.client import ClusterClient, translated
from falaj.drivers.kubernetes.isolation.policies import (
    LIMIT_RANGE,
    NAMESPACE,
    NETWORK_POLICY,
    RESOURCE_QUOTA,
    WORKSPACE_ANNOTATION,
    admission_manifests,
    namespace_manifest,
    network_policies,
    quota_manifests,
)
from falaj.drivers.kubernetes.isolation.rights import ROLE_BINDING, account_manifests, owned, role_binding
from falaj.drivers.kubernetes.manifests import KubernetesManifests
from falaj.errors import Unavailable
from falaj.ports.cluster.manifests import Manifest, is_owned
from falaj.ports.cluster.namespaces import GRANT, Tenant
from falaj.records.config import KubernetesConfig
from falaj.records.scheduling.cluster_names import namespace_of

KEEP_S = 600.0
"""A namespace is looked at again after so long, so that what others changed in it is put back."""
BOUND_WITHIN_S = 5.0
"""The API server knows of a new binding after some milliseconds."""


class LaunchNamespaces(Protocol):
    """What the launcher needs of namespaces."""

    def ensure_for(self, workspace: str) -> str:
        """Make the namespace of a workspace as it is to be, and return its name."""
        ...

    def forget(self, namespace: str) -> None:
        """Look at the namespace again when it is needed next: it was deleted."""
        ...

    def existing(self) -> dict[str, str]:
        """Return the namespaces of this platform, with their workspaces."""
        ...


class KubernetesNamespaces:
    """A namespace for each workspace. `limits_of` returns a workspace with the most that its jobs may hold."""

    def __init__(
        self,
        config: KubernetesConfig,
        connect: Callable[[], ClusterClient],
        *,
        limits_of: Callable[[str], Tenant] = Tenant,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._connect, self._limits_of, self._clock = config, connect, limits_of, clock
        self._lock = threading.RLock()
        self._kept: dict[str, float] = {}
        self._opened: tuple[ClusterClient, KubernetesManifests] | None = None

    def render(self, tenants: Iterable[Tenant]) -> list[Manifest]:
        made: list[Manifest] = [*account_manifests(self._config), *admission_manifests(self._config)]
        if self._config.namespaces == "given":
            for tenant in tenants:
                made += self._contents(tenant)
        return made

    def ensure_for(self, workspace: str) -> str:
        """Make the namespace of a workspace, unless it was looked at lately, and return its name."""
        name = namespace_of(workspace, prefix=self._config.prefix)
        if self._clock() - self._kept.get(name, float("-inf")) < KEEP_S:
            return name
        return self.ensure(self._limits_of(workspace))

    def ensure(self, tenant: Tenant) -> str:
        name = namespace_of(tenant.workspace, prefix=self._config.prefix)
        with self._lock:
            found = self._store.find(NAMESPACE, {"metadata": {"name": name}})
            if found is not None:
                self._require_own(found, tenant)
            if self._config.namespaces == "create":
                self._keep(tenant)
            elif found is None:
                raise Unavailable(
                    f"namespace {name} of workspace {tenant.workspace} does not exist, and kubernetes.namespaces "
                    f"says that an administrator makes it: {GRANT}"
                )
            self._kept[name] = self._clock()
        return name

    def forget(self, namespace: str) -> None:
        self._kept.pop(namespace, None)

    def existing(self) -> dict[str, str]:
        found = {}
        for each in self._store.owned(NAMESPACE):
            metadata = each["metadata"]
            workspace = (metadata.get("annotations") or {}).get(WORKSPACE_ANNOTATION)
            if workspace is not None and "deletionTimestamp" not in metadata:
                found[metadata["name"]] = workspace
        return found

    def close(self) -> None:
        if self._opened is not None:
            self._opened[1].close()

    def _require_own(self, found: Manifest, tenant: Tenant) -> None:
        """Raise Unavailable for a namespace that is not that of the workspace, or not any more."""
        metadata = found["metadata"]
        name, notes = metadata["name"], metadata.get("annotations") or {}
        if "deletionTimestamp" in metadata:
            raise Unavailable(f"namespace {name} is being deleted; it is made again when it is gone")
        if not is_owned(found, self._config.prefix):
            raise Unavailable(
                f"namespace {name} exists, and does not carry the labels of this platform: delete it, or set "
                "kubernetes.prefix so that the names differ"
            )
        if notes.get(WORKSPACE_ANNOTATION) != tenant.workspace:
            raise Unavailable(
                f"namespace {name} belongs to workspace {notes.get(WORKSPACE_ANNOTATION)}, and not to "
                f"{tenant.workspace}"
            )

    def _keep(self, tenant: Tenant) -> None:
        made = self._contents(tenant)
        kinds = {
            each.kind: each for each in (NAMESPACE, ROLE_BINDING, NETWORK_POLICY, RESOURCE_QUOTA, LIMIT_RANGE)
        }
        for manifest in made:
            if manifest["kind"] == ROLE_BINDING.kind:
                self._bind(manifest["metadata"]["namespace"])
            else:
                self._store.apply(kinds[manifest["kind"]], manifest)
        present = {each["kind"] for each in made}
        name = namespace_of(tenant.workspace, prefix=self._config.prefix)
        for kind in (RESOURCE_QUOTA, LIMIT_RANGE):
            if kind.kind not in present:
                self._store.delete(
                    kind, {"metadata": owned(self._config, self._config.prefix, namespace=name)}
                )

    def _contents(self, tenant: Tenant) -> list[Manifest]:
        """Return the namespace and what is in it before any job, in the order of creation."""
        config = self._config
        return [
            namespace_manifest(tenant, config),
            role_binding(config, namespace_of(tenant.workspace, prefix=config.prefix)),
            *network_policies(tenant, config),
            *quota_manifests(tenant, config),
        ]

    def _bind(self, namespace: str) -> None:
        """Give this account its rights in the namespace, if it does not have them already."""
        if self._is_bound(namespace):
            return
        with translated("ask for the name of this account"):
            user = self._client.user_name()
        subject = {"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": user}
        self._store.apply(ROLE_BINDING, role_binding(self._config, namespace, subject))
        until = self._clock() + BOUND_WITHIN_S
        while not self._is_bound(namespace):
            if self._clock() > until:
                raise Unavailable(
                    f"the platform may not create secrets in namespace {namespace}, though its role is bound there; "
                    f"an administrator grants it by {GRANT}"
                )
            time.sleep(0.05)

    def _is_bound(self, namespace: str) -> bool:
        with translated(f"ask for the rights in namespace {namespace}"):
            return self._client.may("create", "secrets", group="", namespace=namespace)

    @property
    def _client(self) -> ClusterClient:
        return self._open()[0]

    @property
    def _store(self) -> KubernetesManifests:
        return self._open()[1]

    def _open(self) -> tuple[ClusterClient, KubernetesManifests]:
        with self._lock:
            if self._opened is None:
                client = self._connect()
                self._opened = client, KubernetesManifests(self._config, client=client)
            return self._opened
