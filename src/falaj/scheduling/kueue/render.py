"""The tree of queues as objects of Kueue: a pure function of queues, workspaces and nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from falaj.ports.cluster.manifests import OWNER, OWNER_LABEL, PLATFORM_LABEL, ObjectKind
from falaj.ports.machine.hardware import NodeFacts
from falaj.records.config import KubernetesConfig
from falaj.records.scheduling.cluster_names import dns_label, namespace_of
from falaj.records.scheduling.snapshot import PRIORITIES, Queue, Quota
from falaj.scheduling.kueue.flavors import (
    Bucket,
    Flavor,
    as_flavor_list,
    buckets_of,
    decimal_quantity,
    divided,
    flavors_of,
    resources_of,
)
from falaj.scheduling.queue_tree import RESOURCES, ancestry, children_of

GROUP, VERSION = "kueue.x-k8s.io", "v1beta2"
TOPOLOGY = ObjectKind(GROUP, VERSION, "Topology", "topologies")
FLAVOR = ObjectKind(GROUP, VERSION, "ResourceFlavor", "resourceflavors")
COHORT = ObjectKind(GROUP, VERSION, "Cohort", "cohorts")
CLUSTER_QUEUE = ObjectKind(GROUP, VERSION, "ClusterQueue", "clusterqueues")
LOCAL_QUEUE = ObjectKind(GROUP, VERSION, "LocalQueue", "localqueues", namespaced=True)
PRIORITY = ObjectKind(GROUP, VERSION, "WorkloadPriorityClass", "workloadpriorityclasses")
KINDS = {each.kind: each for each in (TOPOLOGY, FLAVOR, COHORT, CLUSTER_QUEUE, LOCAL_QUEUE, PRIORITY)}
"""Every kind that is rendered, in the order of creation."""

QUEUE_ANNOTATION = "falaj.dev/queue"
HOSTNAME = "kubernetes.io/hostname"


class SharedQueue(NamedTuple):
    """A queue, and the names of the workspaces that may submit to it."""

    queue: Queue
    workspaces: tuple[str, ...]


def render(
    shared: Iterable[SharedQueue], nodes: Iterable[NodeFacts], config: KubernetesConfig
) -> list[dict[str, Any]]:
    """Return the objects, those that others refer to first."""
    found = sorted(shared, key=lambda each: each.queue.name)
    flavors = flavors_of(nodes, config)
    tree = QueueRendering({each.queue.name: each.queue for each in found}, flavors, config)
    return [
        *([_topology(config)] if config.topology else []),
        *(_resource_flavor(each, config) for each in flavors),
        *tree.cohorts(),
        *(tree.cluster_queue(each) for each in found),
        *(_local_queue(each.queue, workspace, config) for each in found for workspace in each.workspaces),
        *(_priority_class(name, value, config) for name, value in PRIORITIES.items()),
    ]


class QueueRendering:
    """The quotas of a tree of queues, divided among flavors.

    A queue becomes a ClusterQueue. One with queues below it also becomes a Cohort, which holds them and its own
    ClusterQueue, which has what the quotas below leave of its own. All top queues are in one Cohort, which has what no
    quota guarantees to anyone.
    """

    def __init__(
        self, queues: Mapping[str, Queue], flavors: Sequence[Flavor], config: KubernetesConfig
    ) -> None:
        self._queues, self._flavors, self._config = queues, flavors, config
        self._buckets = buckets_of(flavors)
        self._nominal = {name: self._own_quota(name) for name in queues}

    def cohorts(self) -> list[dict[str, Any]]:
        """Return the root, then every queue with queues below it, parents first."""
        inner = [name for name in self._queues if self._children(name)]
        inner.sort(key=lambda name: (len(list(ancestry(name, self._queues))), name))
        return [self._root(), *(self._cohort(self._queues[name]) for name in inner)]

    def cluster_queue(self, shared: SharedQueue) -> dict[str, Any]:
        queue, prefix = shared.queue, self._config.prefix
        is_inner = bool(self._children(queue.name))
        most = {} if is_inner else self._borrowing(queue)
        namespaces = sorted(namespace_of(each, prefix=prefix) for each in shared.workspaces)
        above = queue.name if is_inner else queue.parent
        names = {"key": "kubernetes.io/metadata.name", "operator": "In", "values": namespaces}
        spec = {
            "cohortName": prefix if above is None else object_name(above, prefix=prefix),
            "namespaceSelector": {"matchExpressions": [names]} if namespaces else None,
            "queueingStrategy": "BestEffortFIFO",
            "fairSharing": {"weight": "1" if is_inner else _weight(queue)},
            "flavorFungibility": {"whenCanBorrow": "TryNextFlavor", "whenCanPreempt": "TryNextFlavor"},
            "preemption": {"withinClusterQueue": "LowerPriority", "reclaimWithinCohort": "Any"},
            "resourceGroups": self._groups(self._nominal[queue.name], most),
        }
        return _object(CLUSTER_QUEUE, object_name(queue.name, prefix=prefix), self._config, spec, queue)

    def _root(self) -> dict[str, Any]:
        """Return the Cohort of all queues: what the nodes offer beyond all quotas can be borrowed by everyone."""
        offered = {key: capacity for of in self._buckets.values() for key, (capacity, _) in of.items()}
        given = {key: sum(each[key] for each in self._nominal.values()) for key in offered}
        rest = {key: max(0, amount - given[key]) for key, amount in offered.items()}
        return _object(COHORT, self._config.prefix, self._config, {"resourceGroups": self._groups(rest, {})})

    def _cohort(self, queue: Queue) -> dict[str, Any]:
        prefix = self._config.prefix
        nothing = dict.fromkeys(self._nominal[queue.name], 0)
        spec = {
            "parentName": prefix if queue.parent is None else object_name(queue.parent, prefix=prefix),
            "fairSharing": {"weight": _weight(queue)},
            "resourceGroups": self._groups(nothing, self._borrowing(queue)),
        }
        return _object(COHORT, object_name(queue.name, prefix=prefix), self._config, spec, queue)

    def _own_quota(self, name: str) -> dict[Bucket, int]:
        """Return what is guaranteed to the queue's own jobs: its quota, less those of the queues below it."""
        quota = self._queues[name].quota
        below = [self._queues[each].quota for each in self._children(name)]
        left = {
            field: None
            if (own := getattr(quota, field)) is None
            else max(0, own - sum(getattr(each, field) or 0 for each in below))
            for field in RESOURCES
        }
        return {key: part or 0 for key, part in divided(Quota(**left), self._buckets).items()}

    def _borrowing(self, queue: Queue) -> dict[Bucket, int]:
        """Return how much may be borrowed; all that others leave idle where nothing is said."""
        quota = divided(queue.quota, self._buckets)
        most = quota if queue.limit is None else divided(queue.limit, self._buckets)
        found: dict[Bucket, int] = {}
        for key, own in quota.items():
            limit = most[key]
            if own is not None and limit is not None:
                found[key] = max(0, limit - own)
        return found

    def _groups(self, nominal: Mapping[Bucket, int], borrowing: Mapping[Bucket, int]) -> list[dict[str, Any]]:
        fields = {
            key: {"nominalQuota": amount} | ({"borrowingLimit": borrowing[key]} if key in borrowing else {})
            for key, amount in nominal.items()
        }
        covered = resources_of(self._flavors)
        return [{"coveredResources": covered, "flavors": as_flavor_list(self._flavors, fields)}]

    def _children(self, name: str) -> list[str]:
        return children_of(name, self._queues.values())


def object_name(queue: str, *, prefix: str) -> str:
    """Return the name of the ClusterQueue and of the Cohort of a queue."""
    return f"{prefix}-{dns_label(queue, limit=200)}"


def _topology(config: KubernetesConfig) -> dict[str, Any]:
    levels = [*(key for key in config.topology if key != HOSTNAME), HOSTNAME]
    return _object(TOPOLOGY, config.prefix, config, {"levels": [{"nodeLabel": key} for key in levels]})


def _resource_flavor(flavor: Flavor, config: KubernetesConfig) -> dict[str, Any]:
    spec = {
        "nodeLabels": dict(flavor.selector) or None,
        "tolerations": [dict(each) for each in flavor.tolerations] or None,
        "topologyName": config.prefix if config.topology else None,
    }
    return _object(FLAVOR, flavor.name, config, spec)


def _local_queue(queue: Queue, workspace: str, config: KubernetesConfig) -> dict[str, Any]:
    spec = {"clusterQueue": object_name(queue.name, prefix=config.prefix)}
    made = _object(LOCAL_QUEUE, dns_label(queue.name, limit=200), config, spec, queue)
    made["metadata"]["namespace"] = namespace_of(workspace, prefix=config.prefix)
    return made


def _priority_class(name: str, value: int, config: KubernetesConfig) -> dict[str, Any]:
    made = _object(PRIORITY, f"{config.prefix}-{name}", config, {})
    del made["spec"]
    return made | {"value": value, "description": f"Jobs of priority {name}."}


def _object(
    kind: ObjectKind,
    name: str,
    config: KubernetesConfig,
    spec: Mapping[str, Any],
    queue: Queue | None = None,
) -> dict[str, Any]:
    metadata: dict[str, Any] = {
        "name": name,
        "labels": {OWNER_LABEL: OWNER, PLATFORM_LABEL: config.prefix},
    }
    if queue is not None:
        metadata["annotations"] = {QUEUE_ANNOTATION: queue.name}
    return {
        "apiVersion": kind.api_version,
        "kind": kind.kind,
        "metadata": metadata,
        "spec": {key: value for key, value in spec.items() if value is not None},
    }


def _weight(queue: Queue) -> str:
    return decimal_quantity(Fraction(str(queue.weight)))
