"""The rights that the platform's account needs in a cluster, with reasons, and the objects that grant them. Pure.

What is sensitive is granted in the namespaces of workspaces only: the role for those is bound in each of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from falaj.ports.cluster.manifests import OWNER, OWNER_LABEL, PLATFORM_LABEL, ObjectKind
from falaj.records.config import KubernetesConfig

Scope = Literal["cluster", "workspace"]
"""Where a right holds: everywhere, or in the namespaces of workspaces."""
Needed = Literal["always", "create", "kueue", "volumes"]
"""When a right is needed: always; where the platform makes the namespaces; where Kueue decides; where jobs may ask for
volumes."""

RBAC = "rbac.authorization.k8s.io"
KUEUE = "kueue.x-k8s.io"
SERVICE_ACCOUNT = ObjectKind("", "v1", "ServiceAccount", "serviceaccounts", namespaced=True)
CLUSTER_ROLE = ObjectKind(RBAC, "v1", "ClusterRole", "clusterroles")
CLUSTER_ROLE_BINDING = ObjectKind(RBAC, "v1", "ClusterRoleBinding", "clusterrolebindings")
ROLE_BINDING = ObjectKind(RBAC, "v1", "RoleBinding", "rolebindings", namespaced=True)


class Rule(NamedTuple):
    """What the platform does with a resource, and why."""

    scope: Scope
    group: str
    resource: str
    verbs: tuple[str, ...]
    reason: str
    needed: Needed = "always"


class Right(NamedTuple):
    """One verb of a rule; `name` is the only object that it holds for."""

    scope: Scope
    group: str
    resource: str
    verb: str
    name: str | None = None

    @property
    def full_resource(self) -> str:
        return ".".join(filter(None, (self.resource, self.group)))


OBJECT = ("create", "get", "list", "delete")
KEPT = ("get", "list", "create", "patch", "delete")

RULES = (
    Rule("cluster", "", "nodes", ("list", "watch"), "the inventory: capacity, labels, taints"),
    Rule("cluster", "", "nodes", ("get", "patch"), "to cordon, drain and cut the GPUs of nodes"),
    Rule("cluster", "resource.k8s.io", "resourceslices", ("list", "watch"), "GPUs that DRA offers"),
    Rule(
        "cluster",
        "",
        "pods",
        ("list", "watch"),
        "how the pods of jobs fare, and what pods of others hold of the nodes",
    ),
    Rule("cluster", "", "namespaces", ("get", "list"), "whose a namespace is, and which there are"),
    Rule("cluster", "", "namespaces", ("create", "patch"), "a namespace for each workspace", "create"),
    Rule("cluster", RBAC, "rolebindings", ("create", "patch"), "its rights in a new namespace", "create"),
    Rule(
        "cluster", RBAC, "clusterroles", ("bind",), "to bind its role for workspaces, and no other", "create"
    ),
    Rule("workspace", "", "secrets", (*OBJECT, "patch"), "what a pod presents to the platform"),
    Rule("workspace", "batch", "jobs", OBJECT, "attempts as Jobs"),
    Rule("workspace", "", "services", OBJECT, "names by which the pods of a Job find each other"),
    Rule("workspace", "jobset.x-k8s.io", "jobsets", OBJECT, "attempts as JobSets"),
    Rule("workspace", "trainer.kubeflow.org", "trainjobs", OBJECT, "attempts as TrainJobs"),
    Rule("workspace", "trainer.kubeflow.org", "trainingruntimes", OBJECT, "the runtime of each TrainJob"),
    Rule("workspace", "", "events", ("list",), "why the cluster makes no pod"),
    Rule(
        *("workspace", "networking.k8s.io", "networkpolicies"),
        *(("create", "get"), "the network between the pods of one job"),
    ),
    Rule(
        "workspace", "networking.k8s.io", "networkpolicies", ("patch",), "the network of all jobs", "create"
    ),
    Rule(
        *("workspace", "", "resourcequotas", ("get", "create", "patch", "delete")),
        *("the limits of the workspace's queues", "create"),
    ),
    Rule(
        *("workspace", "", "limitranges", ("get", "create", "patch", "delete")),
        *("what counts for a pod that names no memory", "create"),
    ),
    Rule(
        "workspace", "", "persistentvolumeclaims", ("get",), "whether the volume of a job is there", "volumes"
    ),
    Rule("cluster", KUEUE, "resourceflavors", KEPT, "the queues in Kueue", "kueue"),
    Rule("cluster", KUEUE, "cohorts", KEPT, "the queues in Kueue", "kueue"),
    Rule("cluster", KUEUE, "clusterqueues", KEPT, "the queues in Kueue", "kueue"),
    Rule("cluster", KUEUE, "workloadpriorityclasses", KEPT, "priorities in Kueue", "kueue"),
    Rule("cluster", KUEUE, "topologies", KEPT, "topology in Kueue", "kueue"),
    Rule("cluster", KUEUE, "workloads", ("list", "watch"), "what Kueue says of a job", "kueue"),
    Rule("cluster", KUEUE, "localqueues", ("list",), "which of the platform's queues there are", "kueue"),
    Rule(
        *("workspace", KUEUE, "localqueues", ("get", "create", "patch", "delete")),
        *("the queues that a workspace may use", "kueue"),
    ),
)
"""All that the platform asks of the API server. A test on a cluster takes each verb away and sees what fails."""


def rules_for(config: KubernetesConfig) -> list[Rule]:
    """Return the rules that this configuration needs."""
    needed = {"always", config.scheduler}
    needed |= {"create"} if config.namespaces == "create" else set()
    needed |= {"volumes"} if config.volumes else set()
    return [rule for rule in RULES if rule.needed in needed]


def rights_for(config: KubernetesConfig) -> list[Right]:
    """Return the rights that this configuration needs, one for each verb."""
    return [
        Right(
            rule.scope,
            rule.group,
            rule.resource,
            verb,
            workspace_role(config) if verb == "bind" else None,
        )
        for rule in rules_for(config)
        for verb in rule.verbs
    ]


def platform_role(config: KubernetesConfig) -> str:
    """Return the name of the ClusterRole that holds everywhere."""
    return f"{config.prefix}-platform"


def workspace_role(config: KubernetesConfig) -> str:
    """Return the name of the ClusterRole that is bound in the namespaces of workspaces."""
    return f"{config.prefix}-workspace"


def account_manifests(config: KubernetesConfig) -> list[dict[str, Any]]:
    """Return the platform's account and its roles, for an administrator to apply."""
    own = config.prefix
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": owned(config, own)}
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": owned(config, own, namespace=own)}
    binding = {
        "apiVersion": CLUSTER_ROLE_BINDING.api_version,
        "kind": CLUSTER_ROLE_BINDING.kind,
        "metadata": owned(config, platform_role(config)),
        "roleRef": role_reference(platform_role(config)),
        "subjects": [account_subject(config)],
    }
    roles = [
        {
            "apiVersion": CLUSTER_ROLE.api_version,
            "kind": CLUSTER_ROLE.kind,
            "metadata": owned(config, name),
            "rules": list(role_rules(config, scope)),
        }
        for name, scope in _roles(config)
    ]
    return [namespace, account, *roles, binding]


def _roles(config: KubernetesConfig) -> list[tuple[str, Scope]]:
    return [(platform_role(config), "cluster"), (workspace_role(config), "workspace")]


def role_rules(config: KubernetesConfig, scope: Scope) -> Iterator[dict[str, Any]]:
    """Yield the rules of a ClusterRole, one for each resource."""
    verbs: dict[tuple[str, str], list[str]] = {}
    for rule in rules_for(config):
        if rule.scope == scope:
            verbs.setdefault((rule.group, rule.resource), []).extend(rule.verbs)
    for (group, resource), allowed in verbs.items():
        named = {"resourceNames": [workspace_role(config)]} if "bind" in allowed else {}
        yield {"apiGroups": [group], "resources": [resource], "verbs": allowed, **named}


def role_binding(
    config: KubernetesConfig, namespace: str, subject: dict[str, str] | None = None
) -> dict[str, Any]:
    """Return the binding of the role for workspaces in one namespace, to the platform's account."""
    return {
        "apiVersion": ROLE_BINDING.api_version,
        "kind": ROLE_BINDING.kind,
        "metadata": owned(config, workspace_role(config), namespace=namespace),
        "roleRef": role_reference(workspace_role(config)),
        "subjects": [subject or account_subject(config)],
    }


def account_subject(config: KubernetesConfig) -> dict[str, str]:
    return {"kind": "ServiceAccount", "name": config.prefix, "namespace": config.prefix}


def role_reference(name: str) -> dict[str, str]:
    return {"apiGroup": RBAC, "kind": "ClusterRole", "name": name}


def owned(config: KubernetesConfig, name: str, *, namespace: str | None = None) -> dict[str, Any]:
    """Return the metadata of an object of this platform."""
    within = {} if namespace is None else {"namespace": namespace}
    return {"name": name, **within, "labels": {OWNER_LABEL: OWNER, PLATFORM_LABEL: config.prefix}}
