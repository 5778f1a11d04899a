"""What separates the workspaces of a cluster: namespaces, network policies, quotas and admission policies. Pure."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Callable
from typing import Any

from falaj.drivers.kubernetes.isolation.rights import account_subject, owned, workspace_role
from falaj.drivers.kubernetes.pods import DOMAIN, JOB_LABEL, NETWORK_LABEL, Manifest, label_value
from falaj.errors import Unavailable
from falaj.ports.cluster.manifests import ObjectKind
from falaj.ports.cluster.namespaces import Tenant
from falaj.records.config import KubernetesConfig
from falaj.records.governance.egress import read_egress_host
from falaj.records.scheduling.cluster_names import namespace_of
from falaj.records.training.images import read_image_rule

NAMESPACE = ObjectKind("", "v1", "Namespace", "namespaces")
NETWORK_POLICY = ObjectKind("networking.k8s.io", "v1", "NetworkPolicy", "networkpolicies", namespaced=True)
RESOURCE_QUOTA = ObjectKind("", "v1", "ResourceQuota", "resourcequotas", namespaced=True)
LIMIT_RANGE = ObjectKind("", "v1", "LimitRange", "limitranges", namespaced=True)
ADMISSION = "admissionregistration.k8s.io/v1"

WORKSPACE_ANNOTATION = f"{DOMAIN}/workspace"
POD_SECURITY = "pod-security.kubernetes.io"
STANDARD = {f"{POD_SECURITY}/{mode}": "restricted" for mode in ("enforce", "audit", "warn")}
DNS_NAMESPACES = ["kube-system", "openshift-dns"]
NODE_LOCAL_DNS = "169.254.20.10/32"
LINK_LOCAL = (ipaddress.ip_network("169.254.0.0/16"), ipaddress.ip_network("fe80::/10"))
"""Where clouds hand out the credentials of nodes: never open to jobs."""
SMALLEST_MEMORY = "1Gi"
"""What a pod counts for in the quota that names no memory."""

Resolve = Callable[[str], list[str]]


def resolve_host(host: str) -> list[str]:
    """Return the addresses of a host; Unavailable if it has none."""
    try:
        return sorted({str(found[4][0]) for found in socket.getaddrinfo(host, None)})
    except OSError as error:
        raise Unavailable(
            f"kubernetes.agent_url names {host}, which has no address here ({error}); a NetworkPolicy needs one: "
            "name the address itself"
        ) from error


def namespace_manifest(tenant: Tenant, config: KubernetesConfig) -> Manifest:
    """Return the namespace; its annotation says whose it is."""
    metadata = owned(config, namespace_of(tenant.workspace, prefix=config.prefix))
    metadata["labels"] |= STANDARD | {WORKSPACE_ANNOTATION: label_value(tenant.workspace)}
    metadata["annotations"] = {WORKSPACE_ANNOTATION: tenant.workspace}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}


# ------------------------------------------------------------------------------------------------- network


def network_policies(
    tenant: Tenant, config: KubernetesConfig, *, resolve: Resolve = resolve_host
) -> list[Manifest]:
    """Return what the pods of a workspace may reach: names, the platform's agent, and no more.

    Pods of jobs that asked for the network may also reach what the configuration allows.
    """
    everyone: dict[str, Any] = {}
    with_network = {"matchLabels": {NETWORK_LABEL: "allowed"}}
    return [
        _policy(
            tenant,
            config,
            "isolation",
            everyone,
            [_dns(), *_agent(config, resolve), *(_block(given) for given in config.store)],
        ),
        _policy(tenant, config, "network", with_network, [_block(given) for given in config.egress]),
    ]


def _policy(
    tenant: Tenant, config: KubernetesConfig, name: str, pods: dict[str, Any], egress: list[Manifest]
) -> Manifest:
    namespace = namespace_of(tenant.workspace, prefix=config.prefix)
    return {
        "apiVersion": NETWORK_POLICY.api_version,
        "kind": NETWORK_POLICY.kind,
        "metadata": owned(config, f"{config.prefix}-{name}", namespace=namespace),
        "spec": {"podSelector": pods, "policyTypes": ["Ingress", "Egress"], "ingress": [], "egress": egress},
    }


def _dns() -> Manifest:
    """Return the rule for the cluster's own resolvers: pods find each other and the platform by names."""
    names = {"key": "kubernetes.io/metadata.name", "operator": "In", "values": DNS_NAMESPACES}
    return {
        "to": [
            {"namespaceSelector": {"matchExpressions": [names]}},
            {"ipBlock": {"cidr": NODE_LOCAL_DNS}},
        ],
        "ports": [{"protocol": protocol, "port": port} for port in (53, 5353) for protocol in ("UDP", "TCP")],
    }


def _agent(config: KubernetesConfig, resolve: Resolve) -> list[Manifest]:
    """Return the rule for the controller's agent: its address, or the pods behind a Service of the cluster."""
    seen = config.agent_as_seen
    if seen is None:
        return []
    host, port = seen
    service = re.fullmatch(r"[a-z0-9-]+\.(?P<namespace>[a-z0-9-]+)\.svc(\..+)?", host)
    if service:
        labels = {"kubernetes.io/metadata.name": service["namespace"]}
        to: list[Manifest] = [{"namespaceSelector": {"matchLabels": labels}}]
    else:
        addresses = [host] if _is_address(host) else resolve(host)
        to = [{"ipBlock": {"cidr": str(ipaddress.ip_network(each))}} for each in addresses]
    return [{"to": to, "ports": [{"protocol": "TCP", "port": port}]}]


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _block(given: str) -> Manifest:
    found = read_egress_host(given)
    assert found.network is not None  # noqa: S101 - the configuration was checked
    closed = [
        str(each)
        for each in LINK_LOCAL
        if each.version == found.network.version and each.subnet_of(found.network)  # type: ignore[arg-type]
    ]
    block = {"cidr": str(found.network)} | ({"except": closed} if closed else {})
    rule: Manifest = {"to": [{"ipBlock": block}]}
    return rule if found.port is None else rule | {"ports": [{"protocol": "TCP", "port": found.port}]}


def job_policy(metadata: Manifest, job: str) -> Manifest:
    """Return what lets the pods of one job reach each other, and nobody else."""
    same = {"podSelector": {"matchLabels": {JOB_LABEL: label_value(job)}}}
    return {
        "apiVersion": NETWORK_POLICY.api_version,
        "kind": NETWORK_POLICY.kind,
        "metadata": metadata,
        "spec": {
            **same,
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [{"from": [same]}],
            "egress": [{"to": [same]}],
        },
    }


# -------------------------------------------------------------------------------------------------- quotas


def quota_manifests(tenant: Tenant, config: KubernetesConfig) -> list[Manifest]:
    """Return the ResourceQuota of a workspace with limits, and the LimitRange that it needs; else none."""
    limits = tenant.limits
    hard = {
        "requests.cpu": limits.cpus,
        "requests.memory": limits.memory_bytes,
        "requests.nvidia.com/gpu": limits.gpus,
    }
    bounded = {name: str(amount) for name, amount in hard.items() if amount is not None}
    if not bounded:
        return []
    quota = _object(RESOURCE_QUOTA, tenant, config) | {"spec": {"hard": bounded}}
    smallest = {"type": "Container", "defaultRequest": {"memory": SMALLEST_MEMORY}}
    return [quota, _object(LIMIT_RANGE, tenant, config) | {"spec": {"limits": [smallest]}}]


def _object(kind: ObjectKind, tenant: Tenant, config: KubernetesConfig) -> dict[str, Any]:
    namespace = namespace_of(tenant.workspace, prefix=config.prefix)
    return {
        "apiVersion": kind.api_version,
        "kind": kind.kind,
        "metadata": owned(config, config.prefix, namespace=namespace),
    }


# ----------------------------------------------------------------------------------------------- admission


def admission_manifests(config: KubernetesConfig) -> list[Manifest]:
    """Return the rules that the API server itself holds the platform to, and the images of its pods."""
    found = _admission(config, "images", _image_policy(config)) if config.image or config.images else []
    if config.namespaces == "create":
        found += _admission(config, "namespaces", _namespaces_policy(config))
        found += _admission(config, "bindings", _bindings_policy(config))
    return found


def _admission(config: KubernetesConfig, name: str, spec: Manifest) -> list[Manifest]:
    metadata = owned(config, f"{config.prefix}-{name}")
    policy = {"kind": "ValidatingAdmissionPolicy", "spec": {"failurePolicy": "Fail", **spec}}
    binding = {
        "kind": "ValidatingAdmissionPolicyBinding",
        "spec": {"policyName": metadata["name"], "validationActions": ["Deny"]},
    }
    return [{"apiVersion": ADMISSION, "metadata": metadata, **each} for each in (policy, binding)]


def _namespaces_policy(config: KubernetesConfig) -> Manifest:
    """Return that the platform makes and changes its own namespaces only, and that those enforce the standard."""
    enforce = f"{POD_SECURITY}/enforce"
    return _held_to(
        config,
        _matched("", "namespaces"),
        {
            f"object.metadata.name.startsWith('{config.prefix}-')": _elsewhere(config),
            f"object.metadata.?labels['{enforce}'].orValue('') == 'restricted'": "the namespaces of workspaces enforce "
            "the Pod Security Standard restricted",
        },
    )


def _bindings_policy(config: KubernetesConfig) -> Manifest:
    """Return that the platform binds its role for workspaces only, in its own namespaces, and to itself."""
    account = account_subject(config)
    is_user = f"s.kind == 'User' && s.name == '{_user(config)}'"
    is_account = " && ".join(f"s.?{part}.orValue('') == '{value}'" for part, value in account.items())
    own_role = f"object.roleRef.name == '{workspace_role(config)}'"
    return _held_to(
        config,
        _matched("rbac.authorization.k8s.io", "rolebindings"),
        {
            f"object.metadata.namespace.startsWith('{config.prefix}-')": _elsewhere(config),
            f"{own_role} && object.subjects.all(s, ({is_user}) || ({is_account}))": "the platform binds its role for "
            "workspaces to itself only",
        },
    )


def _held_to(config: KubernetesConfig, matched: Manifest, rules: dict[str, str]) -> Manifest:
    """Return the policy by which the platform's account, and nobody else, is held to `rules`."""
    return {
        "matchConstraints": {"resourceRules": [matched]},
        "matchConditions": [
            {"name": "platform", "expression": f"request.userInfo.username == '{_user(config)}'"}
        ],
        "validations": [
            {"expression": expression, "reason": "Forbidden", "message": message}
            for expression, message in rules.items()
        ],
    }


def _user(config: KubernetesConfig) -> str:
    account = account_subject(config)
    return f"system:serviceaccount:{account['namespace']}:{account['name']}"


def _elsewhere(config: KubernetesConfig) -> str:
    return f"the platform works in namespaces that begin with {config.prefix}- only"


def _image_policy(config: KubernetesConfig) -> Manifest:
    """Return that the pods in the platform's namespaces run allowed images only."""
    if config.images:
        patterns = "|".join(_image_pattern(rule) for rule in config.images)
        allowed = f"i.matches(r'^({patterns})$')"
    else:
        named = ", ".join(f"'{each}'" for each in (config.image, *config.environments.values()) if each)
        allowed = f"i in [{named}]"
    kinds = ("containers", "initContainers", "ephemeralContainers")
    every = [f"object.spec.?{kind}.orValue([]).map(c, c.image).all(i, {allowed})" for kind in kinds]
    return {
        "matchConstraints": {
            "namespaceSelector": {
                "matchLabels": owned(config, "")["labels"],
                "matchExpressions": [{"key": WORKSPACE_ANNOTATION, "operator": "Exists"}],
            },
            "resourceRules": [_matched("", "pods"), _matched("", "pods/ephemeralcontainers")],
        },
        "validations": [
            {
                "expression": " && ".join(every),
                "reason": "Forbidden",
                "message": "the image is not in kubernetes.images",
            },
        ],
    }


def _image_pattern(rule: str) -> str:
    found = read_image_rule(rule)
    digest = found.digest or "sha256:[0-9a-f]{64}"
    return f"{re.escape(found.repository)}(:[A-Za-z0-9._-]+)?@{digest}"


def _matched(group: str, resource: str) -> Manifest:
    return {
        "apiGroups": [group],
        "apiVersions": ["v1"],
        "operations": ["CREATE", "UPDATE"],
        "resources": [resource],
    }
