"""What keeps the workspaces of a cluster apart, as manifests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from falaj.drivers.kubernetes.isolation.namespaces import KEEP_S, KubernetesNamespaces
from falaj.drivers.kubernetes.isolation.policies import (
    admission_manifests,
    namespace_manifest,
    network_policies,
    quota_manifests,
)
from falaj.drivers.kubernetes.isolation.rights import RULES, account_manifests, rights_for
from falaj.errors import InvalidInput, Unavailable
from falaj.ports.cluster.namespaces import Tenant
from falaj.records.config import KubernetesConfig
from falaj.records.scheduling.snapshot import Quota
from falaj.records.training.images import require_image

CONFIG = KubernetesConfig(agent_url="tls://10.0.0.5:7482", image="worker:1")
DIGEST = "sha256:" + "a" * 64


def test_a_namespace_says_whose_it_is_and_enforces_the_standard() -> None:
    made = namespace_manifest(Tenant("risk.team"), CONFIG)["metadata"]

    assert made["name"].startswith("falaj-risk-team-")
    assert made["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    assert made["labels"]["app.kubernetes.io/managed-by"] == "falaj"
    assert made["annotations"] == {"falaj.dev/workspace": "risk.team"}


# -------------------------------------------------------------------------------------------------- network


def test_without_the_network_only_names_and_the_agent_are_open() -> None:
    policy, network = network_policies(Tenant("risk"), CONFIG)

    assert network["spec"]["egress"] == []
    spec = policy["spec"]
    assert (spec["podSelector"], spec["policyTypes"], spec["ingress"]) == ({}, ["Ingress", "Egress"], [])
    dns, agent = spec["egress"]
    assert {each["port"] for each in dns["ports"]} == {53, 5353}
    assert all(
        "namespaceSelector" in each or each["ipBlock"]["cidr"] == "169.254.20.10/32" for each in dns["to"]
    )
    assert agent == {
        "to": [{"ipBlock": {"cidr": "10.0.0.5/32"}}],
        "ports": [{"protocol": "TCP", "port": 7482}],
    }


def test_pods_reach_the_object_store_where_an_administrator_opened_it() -> None:
    config = CONFIG.model_copy(update={"store": ("10.1.2.3:9000",)})

    everyone, with_network = network_policies(Tenant("risk"), config)

    opened = {
        "to": [{"ipBlock": {"cidr": "10.1.2.3/32"}}],
        "ports": [{"protocol": "TCP", "port": 9000}],
    }
    assert everyone["spec"]["egress"][-1] == opened
    assert opened not in network_policies(Tenant("risk"), CONFIG)[0]["spec"]["egress"]
    assert with_network["spec"]["egress"] == []


def test_with_the_network_pods_reach_what_is_allowed_but_no_credentials_of_nodes() -> None:
    config = CONFIG.model_copy(update={"egress": ("0.0.0.0/0", "10.1.2.3:443")})

    _, policy = network_policies(Tenant("risk"), config)

    assert policy["spec"]["podSelector"] == {"matchLabels": {"falaj.dev/network": "allowed"}}
    assert policy["spec"]["egress"] == [
        {"to": [{"ipBlock": {"cidr": "0.0.0.0/0", "except": ["169.254.0.0/16"]}}]},
        {"to": [{"ipBlock": {"cidr": "10.1.2.3/32"}}], "ports": [{"protocol": "TCP", "port": 443}]},
    ]


@pytest.mark.parametrize(
    ("url", "to"),
    [
        ("tls://[fd00::5]:7482", [{"ipBlock": {"cidr": "fd00::5/128"}}]),
        (
            "tls://falaj.example.com:7482",
            [{"ipBlock": {"cidr": "192.0.2.1/32"}}, {"ipBlock": {"cidr": "192.0.2.2/32"}}],
        ),
        (
            "tls://agent.falaj.svc.cluster.local:7482",
            [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "falaj"}}}],
        ),
    ],
)
def test_the_agent_is_open_by_address_by_name_and_as_a_service(url: str, to: list[Any]) -> None:
    config = CONFIG.model_copy(update={"agent_url": url})

    policy, _ = network_policies(Tenant("risk"), config, resolve=lambda host: ["192.0.2.1", "192.0.2.2"])

    assert policy["spec"]["egress"][1]["to"] == to


def test_an_agent_without_an_address_is_not_opened_to_everyone() -> None:
    config = CONFIG.model_copy(update={"agent_url": "tls://none.invalid:7482"})

    with pytest.raises(Unavailable, match=r"none\.invalid, which has no address here"):
        network_policies(Tenant("risk"), config)


# --------------------------------------------------------------------------------------- quotas and images


def test_a_quota_is_made_where_the_workspace_has_limits() -> None:
    assert quota_manifests(Tenant("risk"), CONFIG) == []

    quota, limits = quota_manifests(Tenant("risk", Quota(gpus=4, memory_bytes=1 << 30)), CONFIG)

    assert quota["spec"]["hard"] == {"requests.memory": str(1 << 30), "requests.nvidia.com/gpu": "4"}
    assert limits["spec"]["limits"][0]["defaultRequest"] == {"memory": "1Gi"}


@pytest.mark.parametrize(
    ("image", "rules"),
    [
        ("registry.example.com/team/worker@" + DIGEST, ["registry.example.com/team/worker"]),
        ("registry.example.com:5000/worker:1.2@" + DIGEST, [f"registry.example.com:5000/worker@{DIGEST}"]),
        ("worker:1", []),
    ],
)
def test_allowed_images_pass(image: str, rules: list[str]) -> None:
    require_image(image, rules=rules, own="worker:1")


@pytest.mark.parametrize(
    ("image", "rules"),
    [
        ("registry.example.com/team/worker:1", ["registry.example.com/team/worker"]),  # a tag can be moved
        ("registry.example.com/team/worker-evil@" + DIGEST, ["registry.example.com/team/worker"]),
        ("evil.example.com/registry.example.com/team/worker@" + DIGEST, ["registry.example.com/team/worker"]),
        ("worker@sha256:" + "b" * 64, [f"worker@{DIGEST}"]),
        ("worker@" + DIGEST + "\nworker", ["worker"]),
        ("WORKER@" + DIGEST, ["worker"]),
        ("worker:2", []),
    ],
)
def test_other_images_are_refused_with_what_is_allowed(image: str, rules: list[str]) -> None:
    with pytest.raises(InvalidInput) as refused:
        require_image(image, rules=rules, own="worker:1")

    (fault,) = refused.value.faults
    assert fault.where == "image"
    assert str(fault.allowed).startswith(rules[0] if rules else "worker:1")
    assert "digest" in str(fault.fix)


# -------------------------------------------------------------------------------------------------- rights


def test_nothing_sensitive_is_granted_everywhere() -> None:
    everywhere = [
        right for right in rights_for(KubernetesConfig(scheduler="kueue")) if right.scope == "cluster"
    ]

    assert not {"secrets", "services", "jobs", "configmaps", "events"} & {
        each.resource for each in everywhere
    }
    assert not [
        each for each in everywhere if each.verb in ("*", "escalate", "impersonate", "deletecollection")
    ]
    assert {each.name for each in everywhere if each.verb == "bind"} == {"falaj-workspace"}
    assert all(rule.reason for rule in RULES)


def test_who_is_given_namespaces_may_not_make_them() -> None:
    given = KubernetesConfig(namespaces="given", image="worker:1", agent_url="tls://10.0.0.5:7482")
    namespaces = KubernetesNamespaces(given, lambda: pytest.fail("the cluster is asked"))

    made = namespaces.render([Tenant("risk"), Tenant("fraud", Quota(gpus=1))])

    kinds = [each["kind"] for each in made]
    assert (kinds.count("Namespace"), kinds.count("RoleBinding"), kinds.count("ResourceQuota")) == (3, 2, 1)
    writes = {(right.resource, right.verb) for right in rights_for(given) if right.scope == "cluster"}
    assert not writes & {("namespaces", "create"), ("rolebindings", "create"), ("clusterroles", "bind")}


def test_the_account_is_held_to_its_own_namespaces_by_the_api_server() -> None:
    names = {each["metadata"]["name"] for each in admission_manifests(CONFIG)}

    assert names == {"falaj-images", "falaj-namespaces", "falaj-bindings"}
    assert {each["metadata"]["name"] for each in account_manifests(CONFIG)} == {
        *("falaj", "falaj-platform", "falaj-workspace"),
    }


# ------------------------------------------------------------------------------------------------- keeping


class Recorded:
    """A ManifestStore and a client in memory."""

    def __init__(self) -> None:
        self.found: dict[str, Any] | None = None
        self.applied: list[str] = []
        self.rights = True

    def find(self, kind: Any, manifest: Any) -> Any:
        return self.found if kind.kind == "Namespace" else None

    def apply(self, kind: Any, manifest: Any, *, dry_run: bool = False) -> Any:
        self.applied.append(kind.kind)
        self.rights = self.rights or kind.kind == "RoleBinding"
        return manifest

    def delete(self, kind: Any, manifest: Any) -> None:
        pass

    def may(self, verb: str, resource: str, **options: Any) -> bool:
        return self.rights

    def user_name(self) -> str:
        return "system:serviceaccount:falaj:falaj"


def keeper(recorded: Recorded, **options: Any) -> KubernetesNamespaces:
    made = KubernetesNamespaces(CONFIG, lambda: pytest.fail("it is opened already"), **options)
    made._opened = recorded, recorded  # type: ignore[assignment]
    return made


def owned_by(workspace: str, prefix: str = "falaj", **metadata: Any) -> dict[str, Any]:
    labels = {"app.kubernetes.io/managed-by": "falaj", "falaj.dev/platform": prefix}
    notes = {"falaj.dev/workspace": workspace}
    return {"metadata": {"name": "falaj-risk", "labels": labels, "annotations": notes, **metadata}}


def test_a_namespace_is_made_once_and_looked_at_again_later() -> None:
    recorded, now = Recorded(), [0.0]
    recorded.rights = False
    namespaces = keeper(recorded, clock=lambda: now[0])

    assert namespaces.ensure_for("risk") == "falaj-risk"
    assert recorded.applied == ["Namespace", "RoleBinding", "NetworkPolicy", "NetworkPolicy"]
    namespaces.ensure_for("risk")
    assert len(recorded.applied) == 4

    now[0] += KEEP_S
    namespaces.ensure_for("risk")
    assert recorded.applied[4:] == ["Namespace", "NetworkPolicy", "NetworkPolicy"]
    namespaces.forget("falaj-risk")
    namespaces.ensure_for("risk")
    assert len(recorded.applied) == 10


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"metadata": {"name": "falaj-risk"}}, "does not carry the labels of this platform"),
        (owned_by("risk", prefix="other"), "does not carry the labels of this platform"),
        (owned_by("fraud"), "belongs to workspace fraud, and not to risk"),
        (owned_by("risk", deletionTimestamp="2026-01-01T00:00:00Z"), "is being deleted"),
    ],
)
def test_a_namespace_of_someone_else_is_not_touched(found: dict[str, Any], words: str) -> None:
    recorded = Recorded()
    recorded.found = found

    with pytest.raises(Unavailable, match=words):
        keeper(recorded).ensure_for("risk")
    assert recorded.applied == []


WHERE = {"cluster": "everywhere", "workspace": "workspaces"}
NEEDED = {
    "always": "always",
    "create": '`namespaces = "create"`',
    "kueue": '`scheduler = "kueue"`',
    "volumes": "`volumes`",
}


def test_the_reference_lists_the_rights_as_they_are_declared() -> None:
    page = Path(__file__).parents[3] / "docs" / "reference" / "kubernetes.md"
    rows = [
        f"| `{'.'.join(filter(None, (rule.resource, rule.group)))}` | {', '.join(rule.verbs)} | {WHERE[rule.scope]} "
        f"| {NEEDED[rule.needed]} | {rule.reason} |"
        for rule in RULES
    ]

    assert "\n".join(rows) in page.read_text()
