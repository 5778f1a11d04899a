"""What a cluster offers the platform: its version, kinds, rights, namespaces, and whether it enforces NetworkPolicy."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from falaj.drivers.kubernetes.client import ClusterClient, connect, resource_of, translated
from falaj.drivers.kubernetes.isolation.policies import NAMESPACE, POD_SECURITY, WORKSPACE_ANNOTATION
from falaj.drivers.kubernetes.isolation.rights import Right, rights_for
from falaj.errors import FalajError
from falaj.ports.cluster.manifests import ObjectKind, is_owned
from falaj.records.config import KubernetesConfig

ANSWER_S = 3.0
"""How long one request may take."""
LONGEST_S = 10.0
"""After so long nothing further is asked."""

SERVED = {
    "trainer.kubeflow.org": "TrainJob",
    "jobset.x-k8s.io": "JobSet",
    "kueue.x-k8s.io": "Kueue",
    "resource.k8s.io": "DRA",
}
DAEMON_SET = ObjectKind("apps", "v1", "DaemonSet", "daemonsets", namespaced=True)
ENFORCING_DAEMONS = {
    "cilium": "Cilium",
    "anetd": "Cilium (GKE Dataplane V2)",
    "calico-node": "Calico",
    "canal": "Calico (Canal)",
    "antrea-agent": "Antrea",
    "kube-router": "kube-router",
    "ovnkube-node": "OVN-Kubernetes",
    "kube-ovn-cni": "Kube-OVN",
    "weave-net": "Weave Net",
    "azure-npm": "Azure Network Policy Manager",
}
"""DaemonSets of network plugins that enforce NetworkPolicy."""
ENFORCING_GROUPS = {
    "cilium.io": "Cilium",
    "crd.projectcalico.org": "Calico",
    "projectcalico.org": "Calico",
    "crd.antrea.io": "Antrea",
    "k8s.ovn.org": "OVN-Kubernetes",
    "kubeovn.io": "Kube-OVN",
}
"""API groups of the same, for an account that may not list DaemonSets."""


@dataclass(frozen=True)
class ClusterNamespace:
    """A namespace of a workspace, and the Pod Security Standard that it enforces."""

    name: str
    enforces: str | None


@dataclass(frozen=True)
class ClusterExamination:
    """What was found. `missing` are rights that the account lacks, with the namespace; `unasked` those left out for
    lack of time. `policy_engine` is what is known to enforce NetworkPolicy; `sees_daemons` whether it could be looked
    for everywhere."""

    server: str
    version: str
    served: tuple[str, ...]
    missing: tuple[str, ...]
    asked: int
    unasked: int
    namespaces: tuple[ClusterNamespace, ...]
    policy_engine: str | None
    sees_daemons: bool


def examine_cluster(config: KubernetesConfig) -> ClusterExamination:
    """Return what a cluster offers; raise FalajError if it does not answer. It takes some seconds at most."""
    until = time.monotonic() + LONGEST_S
    with closing(connect(config, timeout_s=ANSWER_S)) as client:
        with translated("reach the cluster"):
            version, groups = client.server_version(), client.served_groups()
        namespaces = _namespaces(client, config)
        missing, asked, unasked = _rights(client, config, namespaces, until)
        daemons = _daemons(client) if time.monotonic() < until else None
        return ClusterExamination(
            server=client.config.cluster.server,
            version=version,
            served=tuple(name for group, name in SERVED.items() if group in groups),
            missing=tuple(missing),
            asked=asked,
            unasked=unasked,
            namespaces=namespaces,
            policy_engine=policy_engine(groups, daemons),
            sees_daemons=daemons is not None,
        )


def _namespaces(client: ClusterClient, config: KubernetesConfig) -> tuple[ClusterNamespace, ...]:
    """Return the namespaces of the platform's workspaces; none where they may not be listed, as the rights say."""
    try:
        with translated("list namespaces"):
            found = list(client.list(resource_of(NAMESPACE), chunk_size=500))
    except FalajError:
        return ()
    return tuple(
        ClusterNamespace(
            each["metadata"]["name"], (each["metadata"].get("labels") or {}).get(f"{POD_SECURITY}/enforce")
        )
        for each in found
        if is_owned(each, config.prefix)
        and WORKSPACE_ANNOTATION in (each["metadata"].get("annotations") or {})
    )


def _rights(
    client: ClusterClient, config: KubernetesConfig, namespaces: Iterable[ClusterNamespace], until: float
) -> tuple[list[str], int, int]:
    """Return the missing rights, and how many were asked for and not asked for. One namespace stands for all."""
    within = next((each.name for each in namespaces), None)
    wanted = [each for each in rights_for(config) if each.scope == "cluster" or within is not None]
    missing: list[str] = []
    for number, right in enumerate(wanted):
        if time.monotonic() > until:
            return missing, number, len(wanted) - number
        where = within if right.scope == "workspace" else None
        with translated("ask for rights"):
            has = client.may(right.verb, right.resource, group=right.group, namespace=where, name=right.name)
        if not has:
            missing.append(_described(right, where))
    return missing, len(wanted), 0


def _described(right: Right, namespace: str | None) -> str:
    named = f" {right.name}" if right.name else ""
    return f"{right.verb} {right.full_resource}{named}" + (f" in {namespace}" if namespace else "")


def _daemons(client: ClusterClient) -> list[Mapping[str, Any]] | None:
    """Return the DaemonSets of the cluster; none where they may not be listed."""
    try:
        with translated("list DaemonSets"):
            return list(client.list(resource_of(DAEMON_SET), namespace="*", chunk_size=500))
    except FalajError:
        return None


def policy_engine(groups: Iterable[str], daemons: Iterable[Mapping[str, Any]] | None) -> str | None:
    """Return what enforces NetworkPolicy; none where nothing is known to. DaemonSets say more than definitions."""
    if daemons is None:
        return next((ENFORCING_GROUPS[group] for group in sorted(groups) if group in ENFORCING_GROUPS), None)
    for daemon in daemons:
        name = daemon["metadata"]["name"]
        if name in ENFORCING_DAEMONS:
            return ENFORCING_DAEMONS[name]
        if name == "aws-node" and "--enable-network-policy=true" in _arguments(daemon):
            return "Amazon VPC CNI with its network policy agent"
    return None


def _arguments(daemon: Mapping[str, Any]) -> list[str]:
    containers = daemon["spec"]["template"]["spec"]["containers"]
    return [word for each in containers for word in each.get("args") or ()]
