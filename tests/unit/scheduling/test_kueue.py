"""The queues as objects of Kueue: what each setting becomes, on recorded nodes; and drift against a fake cluster."""

from __future__ import annotations

import copy
import re
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from falaj.drivers.kubernetes.inventory.node_facts import facts_of
from falaj.errors import Conflict
from falaj.ports.cluster.manifests import Manifest, ManifestStore, ObjectKind, is_owned
from falaj.ports.machine.hardware import NodeFacts
from falaj.records.config import KubernetesConfig
from falaj.records.scheduling.cluster_names import namespace_of
from falaj.records.scheduling.kueue import QueueSync
from falaj.records.scheduling.snapshot import Queue, Quota
from falaj.scheduling.kueue.flavors import apportion, decimal_quantity, flavors_of, quantity
from falaj.scheduling.kueue.reconcile import COMPARE_S, LOOK_S, QueueReconciler
from falaj.scheduling.kueue.render import SharedQueue, render
from falaj.scheduling.kueue.sync import KueueCluster
from recorded_nodes import CONTROL_PLANE, CPU_ONLY, DGX_H100, MIG_MIXED, TIME_SLICED, node

CONFIG = KubernetesConfig()
GPU = "nvidia.com/gpu"
BANK = (
    Queue(name="bank", quota=Quota(gpus=8), limit=Quota(gpus=12)),
    Queue(name="cards", quota=Quota(gpus=3, cpus=32), parent="bank", weight=2),
    Queue(name="default", quota=Quota(gpus=0), limit=Quota()),
    Queue(name="risk", quota=Quota(gpus=4, memory_bytes=64 << 30), limit=Quota(gpus=8), parent="bank"),
)


def facts(*recorded: dict[str, Any], config: KubernetesConfig = CONFIG) -> list[NodeFacts]:
    return [facts_of(each, config) for each in recorded]


def twins(recorded: dict[str, Any], count: int) -> list[dict[str, Any]]:
    made = [copy.deepcopy(recorded) for _ in range(count)]
    for number, each in enumerate(made):
        each["metadata"]["name"] += f"-{number}"
    return made


def rendered(
    *queues: Queue,
    nodes: list[NodeFacts] | None = None,
    config: KubernetesConfig = CONFIG,
    workspaces: tuple[str, ...] = ("default",),
) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the objects by kind and name."""
    shared = [SharedQueue(each, workspaces) for each in queues]
    made = render(shared, facts(*twins(DGX_H100, 2)) if nodes is None else nodes, config)
    return {(each["kind"], each["metadata"]["name"]): each for each in made}


def quotas(manifest: dict[str, Any], flavor: str | None = None) -> dict[str, dict[str, str]]:
    """Return the quota fields by resource, of one flavor."""
    flavors = manifest["spec"]["resourceGroups"][0]["flavors"]
    chosen = next(each for each in flavors if flavor in (None, each["name"]))
    return {each["name"]: {k: v for k, v in each.items() if k != "name"} for each in chosen["resources"]}


# ----------------------------------------------------------------------------------------------- the tree


def test_a_leaf_is_a_cluster_queue_with_its_quota_and_what_it_may_borrow() -> None:
    made = rendered(*BANK)

    risk, cards = made["ClusterQueue", "falaj-risk"], made["ClusterQueue", "falaj-cards"]
    assert quotas(risk)[GPU] == {"nominalQuota": "4", "borrowingLimit": "4"}
    assert quotas(risk)["memory"] == {"nominalQuota": "64Gi"}  # its limit names no bound for memory
    assert quotas(risk)["cpu"] == {"nominalQuota": "0"}  # without a quota it borrows all that is idle
    assert quotas(cards)[GPU] == {"nominalQuota": "3", "borrowingLimit": "0"}
    assert quotas(cards)["cpu"] == {"nominalQuota": "32", "borrowingLimit": "0"}
    assert cards["spec"]["fairSharing"] == {"weight": "2"}
    assert cards["spec"]["cohortName"] == "falaj-bank"
    assert cards["spec"]["preemption"] == {
        "withinClusterQueue": "LowerPriority",
        "reclaimWithinCohort": "Any",
    }


def test_a_parent_is_a_cohort_with_its_limit_and_a_cluster_queue_with_the_rest_of_its_quota() -> None:
    made = rendered(*BANK)

    cohort, own = made["Cohort", "falaj-bank"], made["ClusterQueue", "falaj-bank"]
    assert cohort["spec"]["parentName"] == "falaj"
    assert quotas(cohort)[GPU] == {"nominalQuota": "0", "borrowingLimit": "4"}
    assert own["spec"]["cohortName"] == "falaj-bank"
    assert quotas(own)[GPU] == {"nominalQuota": "1"}


def test_the_root_has_what_no_quota_guarantees() -> None:
    made = rendered(*BANK)

    root = made["Cohort", "falaj"]
    assert "parentName" not in root["spec"]
    assert quotas(root)[GPU] == {"nominalQuota": str(16 - 8)}
    assert quotas(root)["cpu"] == {"nominalQuota": str(2 * 223 - 32)}
    assert made["ClusterQueue", "falaj-default"]["spec"]["cohortName"] == "falaj"
    assert quotas(made["ClusterQueue", "falaj-default"])[GPU] == {"nominalQuota": "0"}


def test_quotas_beyond_the_nodes_leave_nothing_to_borrow() -> None:
    made = rendered(Queue(name="greedy", quota=Quota(gpus=100)))

    assert quotas(made["Cohort", "falaj"])[GPU] == {"nominalQuota": "0"}
    assert quotas(made["ClusterQueue", "falaj-greedy"])[GPU] == {"nominalQuota": "100", "borrowingLimit": "0"}


def test_every_workspace_has_a_local_queue_for_each_queue_that_is_open_to_it() -> None:
    shared = [SharedQueue(BANK[2], ("default", "risk.team")), SharedQueue(Queue(name="risk"), ("risk.team",))]

    made = render(shared, facts(DGX_H100), CONFIG)

    queues = [each for each in made if each["kind"] == "LocalQueue"]
    team = namespace_of("risk.team", prefix="falaj")
    assert [(q["metadata"]["namespace"], q["metadata"]["name"]) for q in queues] == [
        ("falaj-default", "default"),
        (team, "default"),
        (team, "risk"),
    ]
    assert queues[2]["spec"] == {"clusterQueue": "falaj-risk"}
    (risk,) = [each for each in made if each["metadata"]["name"] == "falaj-risk"]
    (rule,) = risk["spec"]["namespaceSelector"]["matchExpressions"]
    assert rule["values"] == [team]


def test_priority_classes_have_the_values_of_the_platform() -> None:
    made = rendered(BANK[2])

    values = {name: each["value"] for (kind, name), each in made.items() if kind == "WorkloadPriorityClass"}
    assert values == {"falaj-low": -1000, "falaj-normal": 0, "falaj-high": 1000, "falaj-urgent": 100_000}


def test_everything_carries_the_labels_of_the_platform() -> None:
    made = rendered(*BANK, config=KubernetesConfig(prefix="staging", topology=("example.com/rack",)))

    assert all(is_owned(each, "staging") for each in made.values())
    assert {name.partition("-")[0] for (kind, name) in made if kind != "LocalQueue"} == {"staging"}


# ----------------------------------------------------------------------------------------------- flavors


def test_flavors_are_made_by_product_and_select_their_nodes() -> None:
    made = rendered(BANK[2], nodes=facts(DGX_H100, MIG_MIXED, CPU_ONLY, CONTROL_PLANE))

    flavors = {name: each["spec"] for (kind, name), each in made.items() if kind == "ResourceFlavor"}
    assert flavors == {
        "falaj-cpu": {},
        "falaj-nvidia-h100-80gb-hbm3": {
            "nodeLabels": {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"},
            "tolerations": [
                {
                    "key": "nvidia.com/gpu",
                    "operator": "Equal",
                    "value": "present",
                    "effect": "NoSchedule",
                }
            ],
        },
        "falaj-nvidia-a100-sxm4-80gb": {"nodeLabels": {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB"}},
    }


def test_pools_are_flavors_of_their_own() -> None:
    config = KubernetesConfig(pool_label="example.com/pool")
    other = copy.deepcopy(DGX_H100)
    other["metadata"]["labels"]["example.com/pool"] = "Research"

    found = flavors_of(facts(DGX_H100, other, config=config), config)

    assert [(each.name, each.selector["example.com/pool"]) for each in found] == [
        ("falaj-research-nvidia-h100-80gb-hbm3", "Research"),
        ("falaj-training-nvidia-h100-80gb-hbm3", "training"),
    ]


def test_a_flavor_stays_while_its_nodes_are_cordoned_and_offers_nothing() -> None:
    cordoned = copy.deepcopy(DGX_H100)
    cordoned["spec"]["unschedulable"] = True

    (flavor,) = flavors_of(facts(cordoned), CONFIG)

    assert flavor.capacity[GPU] == 0


def test_a_topology_ends_with_the_host_and_every_flavor_is_in_it() -> None:
    config = KubernetesConfig(topology=("example.com/block", "example.com/rack"))

    made = rendered(BANK[2], nodes=facts(DGX_H100, CPU_ONLY), config=config)

    levels = [each["nodeLabel"] for each in made["Topology", "falaj"]["spec"]["levels"]]
    assert levels == ["example.com/block", "example.com/rack", "kubernetes.io/hostname"]
    assert made["ResourceFlavor", "falaj-cpu"]["spec"] == {
        "nodeLabels": {"kubernetes.io/os": "linux"},
        "topologyName": "falaj",
    }


def test_a_quota_is_divided_among_flavors_by_what_they_offer() -> None:
    nodes = facts(*twins(DGX_H100, 3), MIG_MIXED)

    made = rendered(Queue(name="risk", quota=Quota(gpus=10), limit=Quota(gpus=20)), nodes=nodes)

    risk = made["ClusterQueue", "falaj-risk"]
    h100, a100 = quotas(risk, "falaj-nvidia-h100-80gb-hbm3"), quotas(risk, "falaj-nvidia-a100-sxm4-80gb")
    # 24 H100; 6 A100, 7 slices of a seventh and 2 of three sevenths, which are 7.86 GPUs
    assert (h100[GPU]["nominalQuota"], a100[GPU]["nominalQuota"]) == ("7", "2")
    assert a100["nvidia.com/mig-1g.10gb"]["nominalQuota"] == "3"
    assert a100["nvidia.com/mig-3g.40gb"]["nominalQuota"] == "1"
    assert h100["nvidia.com/mig-1g.10gb"] == {"nominalQuota": "0", "borrowingLimit": "0"}


def test_parts_of_shared_gpus_count_as_parts() -> None:
    made = rendered(Queue(name="risk", quota=Quota(gpus=1)), nodes=facts(TIME_SLICED))

    assert quotas(made["ClusterQueue", "falaj-risk"])[GPU]["nominalQuota"] == "4"


def test_a_cluster_without_nodes_still_has_valid_queues() -> None:
    made = rendered(*BANK, nodes=[])

    assert quotas(made["ClusterQueue", "falaj-risk"])[GPU] == {"nominalQuota": "4", "borrowingLimit": "4"}
    assert quotas(made["Cohort", "falaj"])[GPU] == {"nominalQuota": "0"}


SHARES = st.dictionaries(
    st.integers(0, 9), st.tuples(st.integers(0, 500), st.sampled_from([1000, 142, 428, 250])), min_size=1
)


@given(st.integers(0, 10**6), SHARES)
def test_parts_never_exceed_what_is_divided(amount: int, shares: dict[int, tuple[int, int]]) -> None:
    parts = apportion(amount, shares)

    given_out = sum((parts[key] or 0) * shares[key][1] for key in shares)
    assert 0 <= given_out <= amount
    if any(capacity for capacity, _ in shares.values()):
        assert all(parts[key] == 0 for key, (capacity, _) in shares.items() if not capacity)


@given(st.integers(0, 10**4), st.lists(st.integers(1, 64), min_size=1))
def test_whole_units_are_divided_without_a_rest(amount: int, capacities: list[int]) -> None:
    parts = apportion(amount, {number: (each, 1) for number, each in enumerate(capacities)})

    assert sum(part or 0 for part in parts.values()) == amount


# -------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("resource", "amount", "text"),
    [
        ("cpu", 0, "0"),
        ("cpu", 3, "3"),
        ("cpu", 3000, "3k"),
        ("memory", 64 << 30, "64Gi"),
        ("memory", 24632900 << 10, "24632900Ki"),
        ("memory", 1001, "1001"),
        (GPU, 1000, "1k"),
    ],
)
def test_amounts_are_spelled_as_kueue_spells_them(resource: str, amount: int, text: str) -> None:
    assert quantity(resource, amount) == text


@pytest.mark.parametrize(
    ("weight", "text"),
    [(1.0, "1"), (0.5, "500m"), (1.5, "1500m"), (1e-12, "1n"), (1e6, "1M"), (0.0025, "2500u")],
)
def test_weights_are_spelled_as_kueue_spells_them(weight: float, text: str) -> None:
    assert decimal_quantity(Fraction(str(weight))) == text


NAMES = st.from_regex(r"[a-z0-9]([a-z0-9_.-]{0,126}[a-z0-9])?", fullmatch=True)


@given(st.sets(NAMES, max_size=20))
def test_names_of_objects_are_valid_and_differ(names: set[str]) -> None:
    made = {namespace_of(name, prefix="falaj") for name in names}

    assert len(made) == len(names)
    assert all(re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", each) for each in made)


def test_a_name_cannot_be_chosen_to_be_that_of_another() -> None:
    """A label that ends like the hash of another name gets one too."""
    for victim in ("risk.team", "a" * 128, "0123456789abcdef"):
        taken = namespace_of(victim, prefix="falaj")

        assert namespace_of(taken.removeprefix("falaj-"), prefix="falaj") != taken
        assert len(taken.rpartition("-")[2]) == 16
    assert namespace_of("risk", prefix="falaj") == "falaj-risk"


# -------------------------------------------------------------------------------------------------- drift


class FakeCluster:
    """A ManifestStore in memory; like an API server it merges what is applied into what is there."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str], dict[str, Any]] = {}
        self.spaces = {"falaj-default"}

    def find(self, kind: ObjectKind, manifest: Manifest) -> Manifest | None:
        return self.objects.get(self._key(kind, manifest))

    def owned(self, kind: ObjectKind) -> list[Manifest]:
        return [each for key, each in self.objects.items() if key[0] == kind.kind and is_owned(each, "falaj")]

    def apply(self, kind: ObjectKind, manifest: Manifest, *, dry_run: bool = False) -> Manifest:
        made = merged(self.objects.get(self._key(kind, manifest), {}), copy.deepcopy(dict(manifest)))
        if not dry_run:
            self.objects[self._key(kind, manifest)] = made
        return made

    def delete(self, kind: ObjectKind, manifest: Manifest) -> None:
        if not is_owned(self.objects[self._key(kind, manifest)], "falaj"):
            raise Conflict("not ours")
        del self.objects[self._key(kind, manifest)]

    def namespaces(self) -> frozenset[str]:
        return frozenset(self.spaces)

    def nodes(self) -> list[NodeFacts]:
        return facts(node("n", labels={}, allocatable={"cpu": "8", "memory": "8Gi", GPU: "8"}))

    def _key(self, kind: ObjectKind, manifest: Manifest) -> tuple[str, str, str]:
        metadata = manifest["metadata"]
        return kind.kind, metadata.get("namespace") or "", metadata["name"]


_: type[ManifestStore] = FakeCluster


def merged(old: Any, new: Any) -> Any:
    if isinstance(old, dict) and isinstance(new, dict):
        return old | {key: merged(old.get(key), value) for key, value in new.items()}
    return new


SHARED = [SharedQueue(each, ("default", "other")) for each in BANK]


@pytest.fixture
def there() -> FakeCluster:
    return FakeCluster()


def test_applied_twice_is_no_change(there: FakeCluster) -> None:
    kueue = KueueCluster(CONFIG, there, there)

    first, second = kueue.apply(SHARED), kueue.apply(SHARED)

    assert {each.state for each in first.changed} == {"missing"}
    assert second.changed == ()
    assert second.same == len(first.changed)
    assert {(each.state, each.namespace) for each in second.left} == {("waiting", "falaj-other")}


def test_an_edited_quota_is_shown_by_its_path_and_put_back(there: FakeCluster) -> None:
    kueue = KueueCluster(CONFIG, there, there)
    kueue.apply(SHARED)
    risk = there.objects["ClusterQueue", "", "falaj-risk"]
    resources = risk["spec"]["resourceGroups"][0]["flavors"][0]["resources"]
    next(each for each in resources if each["name"] == GPU)["nominalQuota"] = "7"
    risk["spec"]["stopPolicy"] = "Hold"  # not ours: it stays

    (drift,) = [each for each in kueue.diff(SHARED).objects if each.state == "changed"]
    kueue.apply(SHARED)

    (field,) = drift.fields
    path = f"spec.resourceGroups[0].flavors[falaj-gpu].resources[{GPU}].nominalQuota"
    assert (drift.name, field.field, field.cluster, field.rendered) == ("falaj-risk", path, '"7"', '"4"')
    assert [each.state for each in kueue.diff(SHARED).objects if each.state != "waiting"] == []
    assert there.objects["ClusterQueue", "", "falaj-risk"]["spec"]["stopPolicy"] == "Hold"


def test_only_objects_with_the_platforms_labels_are_deleted(there: FakeCluster) -> None:
    kueue = KueueCluster(CONFIG, there, there)
    kueue.apply(SHARED)
    foreign = {"kind": "ClusterQueue", "metadata": {"name": "someone-elses"}, "spec": {}}
    there.objects["ClusterQueue", "", "someone-elses"] = foreign

    done = kueue.apply(SHARED[:1] + SHARED[2:])  # without cards

    assert [(each.kind, each.name, each.state) for each in done.changed if each.state == "extra"] == [
        ("LocalQueue", "cards", "extra"),
        ("ClusterQueue", "falaj-cards", "extra"),
    ]
    assert ("ClusterQueue", "", "falaj-cards") not in there.objects
    assert there.objects["ClusterQueue", "", "someone-elses"] == foreign


def test_an_object_of_others_with_the_same_name_is_never_taken_over(there: FakeCluster) -> None:
    kueue = KueueCluster(CONFIG, there, there)
    theirs = {"kind": "ClusterQueue", "metadata": {"name": "falaj-risk"}, "spec": {"cohortName": "x"}}
    there.objects["ClusterQueue", "", "falaj-risk"] = copy.deepcopy(theirs)

    done = kueue.apply(SHARED)

    assert [each.name for each in done.left if each.state == "foreign"] == ["falaj-risk"]
    assert there.objects["ClusterQueue", "", "falaj-risk"] == theirs


def test_the_cluster_is_kept_after_changes_of_queues_and_compared_now_and_then(there: FakeCluster) -> None:
    kueue, shared, now = KueueCluster(CONFIG, there, there), list(SHARED), [0.0]
    there.spaces |= {"falaj-other"}
    kept = QueueReconciler(kueue, lambda: shared, lambda: kueue.apply(shared), clock=lambda: now[0])

    def step(after_s: float) -> QueueSync | None:
        now[0] += after_s
        assert kept.is_due
        return kept.step()

    first = kept.step()
    assert first is not None
    assert {each.state for each in first.changed} == {"missing"}
    assert not kept.is_due
    assert step(LOOK_S) is None

    shared.append(SharedQueue(Queue(name="new"), ("default",)))
    added = step(LOOK_S)
    assert added is not None
    assert {(each.kind, each.name) for each in added.changed} == {
        ("ClusterQueue", "falaj-new"),
        ("LocalQueue", "new"),
    }

    del there.objects["ClusterQueue", "", "falaj-risk"]
    assert step(LOOK_S) is None  # nothing is asked of the cluster
    repaired = step(COMPARE_S)
    assert repaired is not None
    assert [(each.name, each.state) for each in repaired.changed] == [("falaj-risk", "missing")]
