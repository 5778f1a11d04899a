"""Whether a Node object takes pods, since when and why not, and what autoscalers say of it. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, Literal, NamedTuple

from falaj.ports.cluster.maintenance import CordonNote
from falaj.ports.machine.hardware import NodeTaint
from falaj.records.config import KubernetesConfig

CORDON = "cordon.falaj.dev/"
"""Annotations of platforms that have cordoned a node; the rest of the key is the platform's prefix."""
OF_THE_STATE = (
    "node.kubernetes.io/unschedulable",
    "node.kubernetes.io/not-ready",
    "node.kubernetes.io/unreachable",
)
"""Taints that the control plane derives from the state of a node."""
KEEPS_OFF = ("NoSchedule", "NoExecute")
AUTOSCALER_TAINTS = {
    "ToBeDeletedByClusterAutoscaler": "the cluster autoscaler removes it",
    "DeletionCandidateOfClusterAutoscaler": "the cluster autoscaler will remove it if it stays idle",
    "karpenter.sh/disrupted": "Karpenter removes it",
    "karpenter.sh/disruption": "Karpenter removes it",
}
AUTOSCALER_NOTES = {
    (
        "cluster-autoscaler.kubernetes.io/scale-down-disabled",
        "true",
    ): "the cluster autoscaler may not remove it",
    ("karpenter.sh/do-not-disrupt", "true"): "Karpenter may not remove it",
}
NODE_GROUPS = {
    "karpenter.sh/nodepool": "NodePool",
    "cloud.google.com/gke-nodepool": "node pool",
    "eks.amazonaws.com/nodegroup": "node group",
    "kubernetes.azure.com/agentpool": "agent pool",
}
"""Labels of those who add and remove nodes, and what they call a group of them."""

State = Literal["ready", "cordoned", "lost"]


class NodeState(NamedTuple):
    """Whether a node takes jobs, why not, and since when as far as that is known."""

    state: State
    reason: str = ""
    since: datetime | None = None


def state_of(node: Mapping[str, Any], config: KubernetesConfig) -> NodeState:
    """Return whether the node takes jobs."""
    conditions = {each["type"]: each for each in (node.get("status") or {}).get("conditions") or ()}
    ready, metadata = conditions.get("Ready", {}), node.get("metadata") or {}
    if ready.get("status") != "True":
        said = ready.get("message") or ready.get("reason") or "its kubelet has not reported"
        return NodeState("lost", f"not ready: {said}", moment(ready.get("lastTransitionTime")))
    if (node.get("spec") or {}).get("unschedulable"):
        notes = cordon_notes(node)
        own, manager = notes.get(config.prefix), unschedulable_by(node)
        others = [keeper for name, keeper in keepers(node) if name != config.prefix]
        since = own.since if own is not None else manager[1]
        return NodeState("cordoned", "; ".join(others) or "cordoned by this platform", since)
    if deleted := metadata.get("deletionTimestamp"):
        return NodeState("cordoned", "being deleted", moment(deleted))
    if found := keeps_off(node, config):
        return NodeState("cordoned", f"taint {found[0]}")
    return NodeState("ready")


def keepers(node: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the platforms that keep a node unschedulable, each with a sentence; without a name, whoever else does."""
    notes = cordon_notes(node)
    for platform, note in notes.items():
        yield platform, f"cordoned by {note.by} of platform {platform}" + _because(note.reason)
    if not notes or any(note.was_cordoned for note in notes.values()):
        manager, _ = unschedulable_by(node)
        yield "", f"cordoned by {manager or 'kubectl or another program'}"


def cordon_notes(node: Mapping[str, Any]) -> dict[str, CordonNote]:
    """Return the notes of the platforms that have cordoned a node, by their prefixes."""
    found = {}
    for key, text in sorted(((node.get("metadata") or {}).get("annotations") or {}).items()):
        if key.startswith(CORDON) and (note := read_note(text)) is not None:
            found[key.removeprefix(CORDON)] = note
    return found


def read_note(text: str) -> CordonNote | None:
    """Return the note that an annotation holds; none for what is not one."""
    try:
        found = json.loads(text)
        return CordonNote(
            by=str(found["by"])[:200],
            since=datetime.fromisoformat(found["since"]),
            reason=" ".join(str(found.get("reason", ""))[:500].split()),
            was_cordoned=found.get("was_cordoned") is True,
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def write_note(note: CordonNote) -> str:
    """Return the annotation of a note."""
    facts = {
        "by": note.by,
        "since": note.since.isoformat(timespec="seconds"),
        "reason": note.reason,
        "was_cordoned": note.was_cordoned,
    }
    return json.dumps(facts, ensure_ascii=False)


def unschedulable_by(node: Mapping[str, Any]) -> tuple[str, datetime | None]:
    """Return which program has marked the node unschedulable, and when, as the API server has recorded it."""
    for each in (node.get("metadata") or {}).get("managedFields") or ():
        if "f:unschedulable" in ((each.get("fieldsV1") or {}).get("f:spec") or {}):
            return str(each.get("manager") or "")[:200], moment(each.get("time"))
    return "", None


def taints_of(node: Mapping[str, Any]) -> tuple[NodeTaint, ...]:
    """Return the taints, without those that only repeat the state of the node."""
    given = (node.get("spec") or {}).get("taints") or ()
    found = (NodeTaint(each["key"], each.get("value") or "", each["effect"]) for each in given)
    return tuple(sorted(taint for taint in found if taint.key not in OF_THE_STATE))


def keeps_off(node: Mapping[str, Any], config: KubernetesConfig) -> tuple[str, ...]:
    """Return the taints that keep jobs off, as kubectl writes them."""
    return tuple(
        f"{taint.key}{'=' * bool(taint.value)}{taint.value}:{taint.effect}"
        for taint in taints_of(node)
        if taint.effect in KEEPS_OFF and taint.key not in config.tolerate
    )


def autoscaling_of(node: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what autoscalers say of a node, in words."""
    metadata = node.get("metadata") or {}
    labels, notes = metadata.get("labels") or {}, metadata.get("annotations") or {}
    groups = [f"{kind} {labels[key]}" for key, kind in NODE_GROUPS.items() if labels.get(key)]
    taints = [AUTOSCALER_TAINTS[each.key] for each in taints_of(node) if each.key in AUTOSCALER_TAINTS]
    kept = [words for (key, value), words in AUTOSCALER_NOTES.items() if notes.get(key) == value]
    return (*groups, *taints, *kept)


def moment(text: object) -> datetime | None:
    """Return a time of the API server; none for what is not one."""
    try:
        found = datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return found if found.tzinfo is not None else None


def _because(reason: str) -> str:
    return f" ({reason})" if reason else ""
