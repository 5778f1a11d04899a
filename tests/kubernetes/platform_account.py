"""The platform's own account in the cluster of the tests, with the rights that `falaj clusters render` prints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cluster_testbed import ClusterTestbed
from falaj.drivers.kubernetes.client import ClusterClient, connect
from falaj.drivers.kubernetes.isolation.namespaces import KubernetesNamespaces
from falaj.drivers.kubernetes.isolation.rights import (
    CLUSTER_ROLE,
    Right,
    account_manifests,
    platform_role,
    workspace_role,
)
from falaj.drivers.kubernetes.manifests import KubernetesManifests
from falaj.records.config import KubernetesConfig
from polling import eventually


@dataclass(frozen=True)
class PlatformAccount:
    """The account: `config` has its token, `admin` is someone who may change its roles."""

    cluster: ClusterTestbed
    config: KubernetesConfig
    admin: KubernetesManifests
    client: ClusterClient

    def namespaces(self) -> KubernetesNamespaces:
        return KubernetesNamespaces(self.config, partial(connect, self.config))

    def has(self, right: Right, namespace: str) -> bool:
        within = namespace if right.scope == "workspace" else None
        return self.client.may(
            right.verb, right.resource, group=right.group, namespace=within, name=right.name
        )

    @contextmanager
    def without(self, right: Right, namespace: str) -> Iterator[None]:
        """Take one right away."""
        name = (platform_role if right.scope == "cluster" else workspace_role)(self.config)
        role = next(
            each
            for each in account_manifests(self.config)
            if (each["kind"], each["metadata"]["name"]) == ("ClusterRole", name)
        )
        self.admin.apply(CLUSTER_ROLE, role | {"rules": less(role["rules"], right)})
        try:
            eventually(lambda: not self.has(right, namespace))
            yield
        finally:
            self.admin.apply(CLUSTER_ROLE, role)
            eventually(lambda: self.has(right, namespace))


def less(rules: list[dict[str, Any]], right: Right) -> list[dict[str, Any]]:
    """Return the rules of a role without one right."""
    found = []
    for rule in rules:
        is_it = (rule["apiGroups"], rule["resources"]) == ([right.group], [right.resource])
        verbs = [verb for verb in rule["verbs"] if not (is_it and verb == right.verb)]
        found += [rule | {"verbs": verbs}] if verbs else []
    return found


@contextmanager
def platform_account(cluster: ClusterTestbed, folder: Path, **settings: Any) -> Iterator[PlatformAccount]:
    """Yield the account of a platform with these `settings`; an administrator has applied what it needs."""
    wanted = KubernetesConfig(kubeconfig=cluster.kubeconfig, **settings)
    everything = KubernetesNamespaces(wanted, partial(connect, wanted)).render([])
    listed = {"apiVersion": "v1", "kind": "List", "items": everything}
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=json.dumps(listed))
    path = folder / "platform.kubeconfig"
    path.write_text(json.dumps(kubeconfig_of(cluster, wanted.prefix)))
    config = wanted.model_copy(update={"kubeconfig": path})
    admin, client = KubernetesManifests(wanted), connect(config)
    try:
        yield PlatformAccount(cluster, config, admin, client)
    finally:
        admin.close()
        client.close()
        ours = ("--selector", f"falaj.dev/platform={wanted.prefix}", "--wait=false", "--ignore-not-found")
        kinds = "clusterrole,clusterrolebinding,validatingadmissionpolicy,validatingadmissionpolicybinding"
        cluster.kubectl("delete", f"{kinds},namespace", *ours)


def kubeconfig_of(cluster: ClusterTestbed, account: str) -> dict[str, Any]:
    """Return a kubeconfig with a token of the account, as its pod would have."""
    found = cluster.kubectl(
        *("config", "view", "--raw", "--minify", "--flatten", "--output"),
        "jsonpath={.clusters[0].cluster.server} {.clusters[0].cluster.certificate-authority-data}",
    )
    address, authority = found.split()
    token = cluster.kubectl("create", "token", account, "--namespace", account).strip()
    server = {"server": address, "certificate-authority-data": authority}
    return {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": server}],
        "users": [{"name": "u", "user": {"token": token}}],
    }
