"""The nodes of the cluster, kept current by watches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from lightkube.operators import not_equal

from falaj.drivers.kubernetes.client import connect
from falaj.drivers.kubernetes.cluster import POD
from falaj.drivers.kubernetes.inventory.gpu_devices import dra_devices
from falaj.drivers.kubernetes.inventory.node_facts import facts_of
from falaj.drivers.kubernetes.inventory.other_pods import PodRequests, held_on, requests_of, with_others
from falaj.drivers.kubernetes.pods import HOME_LABEL, label_value
from falaj.drivers.kubernetes.watches import ObjectCache
from falaj.errors import FalajError, Unavailable
from falaj.ports.cluster.manifests import ObjectKind
from falaj.ports.machine.hardware import NodeFacts
from falaj.records.config import KubernetesConfig

log = logging.getLogger("falaj.drivers.kubernetes")

LONGEST_NAME = 128

NODE = ObjectKind("", "v1", "Node", "nodes")
RESOURCE_SLICE = ObjectKind("resource.k8s.io", "v1", "ResourceSlice", "resourceslices")


class KubernetesNodes:
    """The inventory of a cluster: one watch of nodes, one of DRA's ResourceSlices where they are served, and one of the
    pods that are not this platform's."""

    def __init__(
        self,
        config: KubernetesConfig,
        *,
        home: str | None = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_change` is called by a thread of the inventory whenever a node has changed.

        `home` tells the pods of this platform, which its scheduler counts; without it nothing counts as held.
        """
        self._client = client = connect(config)
        self._notify = on_change
        self._version = object()
        self._has_begun = False
        self._known: tuple[object, list[NodeFacts]] | None = None
        self._nodes = ObjectCache(client, NODE, partial(read_node, config=config), on_change=self._changed)
        self._slices: ObjectCache[Mapping[str, Any]] = ObjectCache(
            client,
            RESOURCE_SLICE,
            lambda each: {"spec": each.get("spec") or {}},
            on_change=self._changed,
        )
        self._pods: ObjectCache[PodRequests | None] | None = None
        if home is not None:
            not_ours = {HOME_LABEL: not_equal(label_value(home))}
            self._pods = ObjectCache(client, POD, requests_of, labels=not_ours, on_change=self._changed)
        self._with_others: dict[str, tuple[NodeFacts, PodRequests | None, NodeFacts]] = {}

    @property
    def fault(self) -> FalajError | None:
        """Return why the nodes are those last known, and not current; none if they are current."""
        return self._nodes.fault or (None if self._pods is None else self._pods.fault)

    def begin(self) -> None:
        """Begin to watch, without waiting for the first list."""
        if not self._has_begun:
            self._has_begun = True
            for each in (self._nodes, self._slices, self._pods):
                if each is not None:
                    each.known()

    def nodes(self) -> list[NodeFacts]:
        version, known = self._version, self._known
        if known is None or known[0] is not version:
            self._known = known = version, self._read()
        return list(known[1])

    def close(self) -> None:
        self._nodes.close()
        self._slices.close()
        if self._pods is not None:
            self._pods.close()
        self._client.close()

    def _changed(self) -> None:
        self._version = object()
        self._notify()

    def _read(self) -> list[NodeFacts]:
        found = self._nodes.objects()
        devices = dra_devices(self._resource_slices())
        usable = [_with_devices(each, devices) for each in found.values() if each is not None]
        held = {} if self._pods is None else held_on(self._pods.objects().values())
        made = {each.name: self._counted(each, held.get(each.name)) for each in usable}
        self._with_others = made
        return [made[name][2] for name in sorted(made)]

    def _counted(
        self, facts: NodeFacts, held: PodRequests | None
    ) -> tuple[NodeFacts, PodRequests | None, NodeFacts]:
        """Return a node with what others hold of it; the same object as before if nothing has changed."""
        known = self._with_others.get(facts.name)
        if known is not None and known[0] is facts and known[1] == held:
            return known
        return facts, held, with_others(facts, held)

    def _resource_slices(self) -> list[Mapping[str, Any]]:
        """Return the ResourceSlices; none where the cluster serves none or the platform may not read them."""
        try:
            return list(self._slices.objects().values())
        except Unavailable:
            return []


def read_node(node: Mapping[str, Any], config: KubernetesConfig) -> NodeFacts | None:
    """Return the facts of a node; none for one that cannot be used, so that the others can."""
    name = node["metadata"]["name"]
    try:
        if len(name) <= LONGEST_NAME:
            return facts_of(node, config)
        reason = f"its name is longer than {LONGEST_NAME} characters"
    except ValueError as error:
        reason = str(error)
    log.warning("node is left out", extra={"node": name, "reason": reason})
    return None


def _with_devices(facts: NodeFacts, devices: Mapping[str, Any]) -> NodeFacts:
    """Return the facts with the devices that DRA offers there, unless a device plugin offers GPUs already."""
    offered = devices.get(facts.name)
    return facts if not offered or facts.gpus else replace(facts, gpus=offered)
