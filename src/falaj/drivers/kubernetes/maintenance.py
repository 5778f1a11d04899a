"""The maintenance of a cluster's nodes: cordons and labels on Node objects, and the pods that remain there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lightkube import ALL_NS
from lightkube.core.exceptions import ApiError
from lightkube.types import PatchType

from falaj.drivers.kubernetes.client import connect, resource_of, translated
from falaj.drivers.kubernetes.cluster import POD
from falaj.drivers.kubernetes.inventory.node_state import CORDON, cordon_notes, keepers, write_note
from falaj.drivers.kubernetes.nodes import NODE
from falaj.drivers.kubernetes.pods import HOME_LABEL, JOB_LABEL, label_value
from falaj.errors import Unavailable
from falaj.ports.cluster.maintenance import CordonNote, Uncordoned
from falaj.records.config import KubernetesConfig
from falaj.records.scheduling.hardware import NodePod

MOST_TRIES = 10
STATIC_POD = "kubernetes.io/config.mirror"
CONFLICT = 409

Change = dict[str, Any]


class KubernetesMaintenance:
    """Changes Node objects, each from the version that was read. `home` tells the jobs of this platform."""

    def __init__(self, config: KubernetesConfig, *, home: str) -> None:
        self._client = connect(config)
        self._platform, self._home = config.prefix, home

    def cordon(self, node: str, note: CordonNote) -> None:
        self._update(node, lambda found: cordoned(found, self._platform, note), action=f"cordon node {node}")

    def uncordon(self, node: str) -> Uncordoned:
        done = Uncordoned(was_noted=False, kept_by="")

        def change(found: Mapping[str, Any]) -> Change | None:
            nonlocal done
            done, made = uncordoned(found, self._platform)
            return made

        self._update(node, change, action=f"uncordon node {node}")
        return done

    def pods(self, node: str) -> list[NodePod]:
        with translated(f"list the pods of node {node}"):
            found = list(
                self._client.list(
                    resource_of(POD), namespace=ALL_NS, fields={"spec.nodeName": node}, chunk_size=500
                )
            )
        here = (each for each in found if _phase(each) not in ("Succeeded", "Failed"))
        return sorted((self._pod(each) for each in here), key=lambda each: (each.namespace, each.name))

    def label(self, node: str, labels: Mapping[str, str | None]) -> None:
        self._update(node, lambda _: {"metadata": {"labels": dict(labels)}}, action=f"label node {node}")

    def close(self) -> None:
        self._client.close()

    def _pod(self, pod: Mapping[str, Any]) -> NodePod:
        metadata = pod["metadata"]
        labels, notes = metadata.get("labels") or {}, metadata.get("annotations") or {}
        owners = [each for each in metadata.get("ownerReferences") or () if each.get("controller")]
        owner = f"{owners[0]['kind']}/{owners[0]['name']}" if owners else ""
        is_ours = labels.get(HOME_LABEL) == label_value(self._home)
        return NodePod(
            namespace=metadata.get("namespace", ""),
            name=metadata["name"],
            owner="static pod" if STATIC_POD in notes else owner,
            job=labels.get(JOB_LABEL) if is_ours else None,
        )

    def _update(
        self, node: str, change: Callable[[Mapping[str, Any]], Change | None], *, action: str
    ) -> None:
        """Change a node unless someone else was faster; then look again."""
        resource = resource_of(NODE)
        for _ in range(MOST_TRIES):
            with translated(action):
                found = self._client.get(resource, node)
                made = change(found)
                if made is None:
                    return
                seen = {"resourceVersion": found["metadata"]["resourceVersion"]}
                made["metadata"] = seen | made.get("metadata", {})
                try:
                    self._client.patch(resource, node, made, patch_type=PatchType.MERGE)
                except ApiError as error:
                    if error.status.code != CONFLICT:
                        raise
                else:
                    return
        raise Unavailable(f"cannot {action}: others change it all the time; try again")


def cordoned(node: Mapping[str, Any], platform: str, note: CordonNote) -> Change:
    """Return the change that cordons a node. Who had cordoned it before decides when it is uncordoned."""
    notes = cordon_notes(node)
    before = notes.get(platform)
    by_others = bool((node.get("spec") or {}).get("unschedulable")) and not notes
    was_cordoned = by_others if before is None else before.was_cordoned
    kept = CordonNote(note.by, note.since, note.reason, was_cordoned)
    return {
        "metadata": {"annotations": {f"{CORDON}{platform}": write_note(kept)}},
        "spec": {"unschedulable": True},
    }


def uncordoned(node: Mapping[str, Any], platform: str) -> tuple[Uncordoned, Change | None]:
    """Return what uncordoning a node means, and the change that does it; none if there is nothing to undo."""
    is_closed = bool((node.get("spec") or {}).get("unschedulable"))
    own = cordon_notes(node).get(platform)
    others = [keeper for name, keeper in keepers(node) if name != platform] if is_closed else []
    done = Uncordoned(was_noted=own is not None, kept_by="; ".join(others))
    if own is None:
        return done, None
    change: Change = {"metadata": {"annotations": {f"{CORDON}{platform}": None}}}
    return done, change if others else change | {"spec": {"unschedulable": None}}


def _phase(pod: Mapping[str, Any]) -> str:
    return str((pod.get("status") or {}).get("phase") or "")
