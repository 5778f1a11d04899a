"""The nodes of one or several clusters as the scheduler sees them, each in its zone and its pool."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from typing import NamedTuple, Protocol

from falaj.errors import FalajError
from falaj.ports.machine.hardware import ClusterNode, NodeFacts
from falaj.records.config import ClusterConfig, Config, Prices
from falaj.records.governance.residency import UNKNOWN, Zone
from falaj.records.scheduling.snapshot import Gpu, Node, Price
from falaj.scheduling import node_from

log = logging.getLogger("falaj.assembly")

LONGEST_NAME, LONGEST_IN_GPU = 128, 96
BURST = "burst"
"""The label of nodes that are used if no others can take a job."""


class WatchedNodes(Protocol):
    """The inventory of a cluster, kept current by a watch."""

    @property
    def fault(self) -> FalajError | None:
        """Return why the nodes are those last known; none if they are current."""
        ...

    def begin(self) -> None:
        """Begin to watch, without waiting."""
        ...

    def nodes(self) -> list[NodeFacts]: ...


class PoolNodes(NamedTuple):
    """The nodes of a cluster as they were `found`, why they are not current, and what was `made` of them."""

    found: list[NodeFacts]
    fault: str | None
    made: tuple[tuple[NodeFacts, Node], ...]


class ClusterPools:
    """The nodes of all clusters by name; the only one of a platform has none.

    Of several clusters, one that does not answer keeps its nodes as last known, and they take no further jobs. One that
    has not answered yet is `unseen`: nothing is concluded from the absence of its nodes.
    """

    def __init__(self, inventories: Mapping[str | None, Callable[[], WatchedNodes]], config: Config) -> None:
        """`inventories` return those of the clusters, opened at the first use."""
        self._inventories, self._config = inventories, config
        self._lock = threading.Lock()
        self._known: dict[str | None, PoolNodes] = {}
        self._unseen: dict[str | None, FalajError] = {}

    def machines(self) -> tuple[tuple[NodeFacts, Node], ...]:
        """Return the nodes of all clusters with their facts, also those that are lost.

        Raise Unavailable if no cluster has answered yet.
        """
        with self._lock:
            for each in self._inventories.values():
                with suppress(FalajError):
                    each().begin()  # all at once, so that they are waited for together
            found = [self._read(cluster) for cluster in self._inventories]
            if len(self._unseen) == len(self._inventories):
                raise next(iter(self._unseen.values()))
        return found[0] if len(found) == 1 else tuple(chain.from_iterable(found))

    def is_unseen(self, node: str) -> bool:
        """Return whether a node is of a cluster that has not answered yet."""
        return cluster_of(node, self._inventories) in self._unseen

    def _read(self, cluster: str | None) -> tuple[tuple[NodeFacts, Node], ...]:
        """Return the nodes of a cluster; the same objects for nodes that have not changed."""
        known = self._known.get(cluster, PoolNodes([], None, ()))
        found, fault = self._nodes_of(cluster)
        words = None if fault is None else fault.message
        if found != known.found or words != known.fault:
            before = {} if words != known.fault else dict(zip(map(id, known.found), known.made, strict=True))
            made = tuple(before.get(id(each)) or self._machine(cluster, each, fault=words) for each in found)
            self._known[cluster] = known = PoolNodes(found, words, made)
        return known.made

    def _nodes_of(self, cluster: str | None) -> tuple[list[NodeFacts], FalajError | None]:
        """Return the nodes of a cluster as last known; of one of several, also why they are not current."""
        try:
            inventory = self._inventories[cluster]()
            found = inventory.nodes()
        except FalajError as error:  # it does not answer, or its kubeconfig is gone
            if cluster is None:
                raise
            if cluster not in self._unseen:
                log.warning("cluster has not answered", extra={"cluster": cluster, "reason": error.message})
            self._unseen[cluster] = error
            return [], None
        self._unseen.pop(cluster, None)
        if cluster is None:
            return found, None
        usable = [each for each in found if len(qualified(cluster, each.name)) <= LONGEST_NAME]
        return usable, inventory.fault

    def _machine(self, cluster: str | None, facts: NodeFacts, *, fault: str | None) -> tuple[NodeFacts, Node]:
        config = self._config
        if cluster is None or config.kubernetes is None:
            return facts, _node(facts, zone_of(facts, config))
        settings = config.kubernetes.clusters[cluster]
        named = in_pool(facts, cluster, settings)
        if fault is not None and named.cluster is not None and named.cluster.state == "ready":
            words = f"cluster {cluster} does not answer: {fault}"
            named = replace(named, cluster=replace(named.cluster, state="cordoned", reason=words))
        pool = {"cluster": cluster, "burst": settings.burst, "price": price_in(settings, config.prices)}
        return named, _node(named, zone_of(named, config)).model_copy(update=pool)


def is_lost(facts: NodeFacts) -> bool:
    """Return whether a node does not answer: what runs there is given up after a while."""
    return facts.cluster is not None and facts.cluster.state == "lost"


def qualified(cluster: str | None, node: str) -> str:
    """Return the name of a node in the platform: several clusters may have nodes of the same name."""
    return node if cluster is None else f"{cluster}.{node}"


def cluster_of(node: str, clusters: Iterable[str | None]) -> str | None:
    """Return the cluster of a node by its name; none if it is in the only one, or in none of them."""
    name = node.partition(".")[0]
    return name if name in clusters else None


def in_pool(facts: NodeFacts, cluster: str, settings: ClusterConfig) -> NodeFacts:
    """Return a node of one of several clusters: with its name and those of its GPUs, its pool and its zone."""
    name, there = qualified(cluster, facts.name), facts.cluster or ClusterNode()
    labels = there.labels | {BURST} if settings.burst else there.labels
    return replace(
        facts,
        name=name,
        gpus=tuple(_renamed(gpu, facts.name, name) for gpu in facts.gpus),
        cluster=replace(there, pool=cluster, zone=there.zone or settings.zone, labels=labels),
    )


def price_in(settings: ClusterConfig, prices: Prices | None) -> Price | None:
    """Return the prices of a cluster, which are those of the platform where it names none; none without any."""
    own = settings.prices
    if prices is None:
        return None
    return Price(
        cpu=prices.cpu_hour if own is None or own.cpu_hour is None else own.cpu_hour,
        gpu=prices.gpu_hour if own is None or own.gpu_hour is None else own.gpu_hour,
        gpus=prices.gpu_models | ({} if own is None else own.gpu_models),
    )


def _renamed(gpu: Gpu, node: str, name: str) -> Gpu:
    """Return a GPU that is named by its node with the new name of that; one with a UUID as it is."""
    begin, slash, number = gpu.id.partition("/")
    is_numbered = slash and begin == node[:LONGEST_IN_GPU]
    return gpu.model_copy(update={"id": f"{name[:LONGEST_IN_GPU]}/{number}"}) if is_numbered else gpu


def _node(facts: NodeFacts, zone: Zone) -> Node:
    takes_jobs = (facts.cluster or ClusterNode()).state == "ready"
    return node_from(facts, zone=zone).model_copy(update={"cordoned": not takes_jobs})


def zone_of(facts: NodeFacts, config: Config) -> Zone:
    """Return the zone of a node: the one that its labels map to, or else the one of its cluster.

    Without any mapping, the only zone of the platform, as for a single machine; else the unknown zone, in which nothing
    runs that a label restricts.
    """
    there = facts.cluster or ClusterNode()
    is_mapped = config.kubernetes is not None and bool(config.kubernetes.zones)
    only = next(iter(config.zones)) if len(config.zones) == 1 and not is_mapped else None
    name = there.zone or only
    if name is None or name not in config.zones:
        return UNKNOWN
    return Zone(name=name, jurisdiction=config.zones[name].jurisdiction)
