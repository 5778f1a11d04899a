"""Cordons on Node objects: what a platform sets and undoes, and what it leaves to others."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from falaj.drivers.kubernetes.inventory.node_facts import facts_of
from falaj.drivers.kubernetes.maintenance import cordoned, uncordoned
from falaj.ports.cluster.maintenance import CordonNote, Uncordoned
from falaj.ports.machine.hardware import ClusterNode
from falaj.records.config import KubernetesConfig
from recorded_nodes import READY, UNREACHABLE, node, patched

NOON = datetime(2026, 11, 16, 12, tzinfo=UTC)
NOTE = CordonNote("alice", NOON, "a fan is replaced")
SIZES = {"cpu": "4", "memory": "8Gi"}
OPEN = node("gpu-7", labels={}, allocatable=SIZES)
BY_KUBECTL = node("gpu-7", labels={}, allocatable=SIZES, unschedulable=True)
BY_KUBECTL["metadata"]["managedFields"] = [
    {"manager": "kubelet", "fieldsV1": {"f:status": {}}},
    {
        "manager": "kubectl-cordon",
        "time": "2026-11-16T09:30:00Z",
        "fieldsV1": {"f:spec": {"f:unschedulable": {}}},
    },
]


def status(found: dict[str, Any]) -> ClusterNode:
    there = facts_of(found, KubernetesConfig()).cluster
    assert there is not None
    return there


def test_a_cordon_is_undone_without_a_trace() -> None:
    closed = patched(OPEN, cordoned(OPEN, "falaj", NOTE))
    done, change = uncordoned(closed, "falaj")

    assert closed["spec"]["unschedulable"] is True
    assert (status(closed).reason, status(closed).since) == ("cordoned by this platform", NOON)
    assert done == Uncordoned(was_noted=True, kept_by="")
    assert patched(closed, change) == OPEN


def test_what_kubectl_cordoned_stays_so() -> None:
    assert status(BY_KUBECTL).reason == "cordoned by kubectl-cordon"
    assert status(BY_KUBECTL).since == datetime(2026, 11, 16, 9, 30, tzinfo=UTC)
    assert uncordoned(BY_KUBECTL, "falaj") == (Uncordoned(False, "cordoned by kubectl-cordon"), None)

    ours_too = patched(BY_KUBECTL, cordoned(BY_KUBECTL, "falaj", NOTE))
    again = patched(ours_too, cordoned(ours_too, "falaj", NOTE))
    done, change = uncordoned(again, "falaj")

    assert done == Uncordoned(True, "cordoned by kubectl-cordon")
    assert patched(again, change) == BY_KUBECTL


def test_two_platforms_on_one_cluster_do_not_undo_each_other() -> None:
    one = patched(OPEN, cordoned(OPEN, "falaj", NOTE))
    both = patched(one, cordoned(one, "other", CordonNote("bob", NOON)))

    done, change = uncordoned(both, "falaj")
    theirs = patched(both, change)

    assert done == Uncordoned(True, "cordoned by bob of platform other")
    assert theirs["spec"]["unschedulable"] is True
    assert status(theirs).reason == "cordoned by bob of platform other"
    assert patched(theirs, uncordoned(theirs, "other")[1]) == OPEN


def test_a_node_that_kubectl_uncordoned_has_only_the_note_to_lose() -> None:
    closed = patched(OPEN, cordoned(OPEN, "falaj", NOTE))
    reopened = patched(closed, {"spec": {"unschedulable": None}})

    assert status(reopened).state == "ready"
    done, change = uncordoned(reopened, "falaj")
    assert done == Uncordoned(True, "")
    assert patched(reopened, change) == OPEN


def test_notes_that_are_none_are_ignored() -> None:
    for text in ("", "[]", "{}", '{"by": "x"}', '{"by": "x", "since": "noon"}', "[" * 100_000):
        odd = patched(BY_KUBECTL, {"metadata": {"annotations": {"cordon.falaj.dev/falaj": text}}})
        assert uncordoned(odd, "falaj")[0] == Uncordoned(False, "cordoned by kubectl-cordon")


def test_lost_nodes_say_since_when() -> None:
    lost = node(
        "a",
        labels={},
        allocatable=SIZES,
        conditions=[UNREACHABLE[0] | {"lastTransitionTime": "2026-11-16T12:00:00Z"}],
    )

    assert (status(lost).state, status(lost).since) == ("lost", NOON)


def test_taints_and_what_autoscalers_say_are_shown() -> None:
    leaving = node(
        "a",
        labels={"karpenter.sh/nodepool": "gpu-spot", "karpenter.sh/capacity-type": "spot"},
        allocatable=SIZES,
        taints=[
            {"key": "karpenter.sh/disrupted", "effect": "NoSchedule"},
            {"key": "DeletionCandidateOfClusterAutoscaler", "value": "1", "effect": "PreferNoSchedule"},
            {"key": "nvidia.com/gpu", "effect": "NoSchedule"},
        ],
        conditions=READY,
    )
    leaving["metadata"]["annotations"]["cluster-autoscaler.kubernetes.io/scale-down-disabled"] = "true"

    there = status(leaving)

    assert (there.state, there.reason) == ("cordoned", "taint karpenter.sh/disrupted:NoSchedule")
    assert there.keeps_off == ("karpenter.sh/disrupted:NoSchedule",)
    assert there.autoscaling == (
        "NodePool gpu-spot",
        "the cluster autoscaler will remove it if it stays idle",
        "Karpenter removes it",
        "the cluster autoscaler may not remove it",
    )
