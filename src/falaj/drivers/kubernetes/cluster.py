"""What the launcher needs of a cluster: its objects, and the pods of all attempts, kept current by one watch."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from falaj.drivers.kubernetes.client import ClusterClient, resource_of, translated
from falaj.drivers.kubernetes.pod_status import PodFacts, pod_facts
from falaj.drivers.kubernetes.pods import HOME_LABEL, MANAGED_BY, Manifest, label_value, owner_reference
from falaj.drivers.kubernetes.watches import ObjectCache
from falaj.errors import AlreadyExists, NotFound, Unavailable
from falaj.ports.cluster.manifests import ObjectKind

GROUPS_S = 60.0
"""Kinds that were installed meanwhile are used after so long."""
POD = ObjectKind("", "v1", "Pod", "pods", namespaced=True)
PLURALS = {
    "Job": "jobs",
    "JobSet": "jobsets",
    "NetworkPolicy": "networkpolicies",
    "PersistentVolumeClaim": "persistentvolumeclaims",
    "Secret": "secrets",
    "Service": "services",
    "TrainJob": "trainjobs",
    "TrainingRuntime": "trainingruntimes",
}


class FoundObject(NamedTuple):
    """An object of this platform."""

    name: str
    annotations: Mapping[str, str]


class PodCluster(Protocol):
    """The requests that the launcher makes. All raise Unavailable if the cluster does not answer."""

    def create(self, manifest: Manifest) -> Manifest:
        """Create an object and return it, or the one of that name if it exists.

        InvalidInput if the cluster does not accept it, Conflict if it does not admit it, Unavailable if it would with a
        higher quota, NotFound if there is no such namespace.
        """
        ...

    def adopt(self, manifest: Manifest, owner: Manifest) -> None:
        """Let an object go away with its `owner`."""
        ...

    def find(self, api_version: str, kind: str, name: str, *, namespace: str) -> Manifest | None:
        """Return an object; none if there is none."""
        ...

    def delete(self, api_version: str, kind: str, name: str, *, namespace: str) -> None:
        """Delete an object and what it owns; without effect if there is none."""
        ...

    def list_objects(self, api_version: str, kind: str, *, namespace: str) -> list[FoundObject]:
        """Return the objects of this platform in a namespace."""
        ...

    def explain(self, name: str, *, namespace: str) -> str | None:
        """Return what the cluster's events say about the objects of this name; none without a warning."""
        ...

    def served_groups(self) -> frozenset[str]:
        """Return the API groups that the cluster serves."""
        ...

    def pods(self, attempt: str) -> list[PodFacts] | None:
        """Return the pods of an attempt as last known; none before pods were listed for the first time."""
        ...

    def lacks_room(self) -> bool:
        """Return whether the cluster finds no node for a pod of an attempt, as last known."""
        ...

    def is_current(self) -> bool:
        """Return whether the pods are those of now: the watch has not ended."""
        ...


class ApiCluster:
    """A cluster reached by its API server, with one watch of pods for all attempts. `home` tells platforms apart."""

    def __init__(self, connect: Callable[[], ClusterClient], *, home: str) -> None:
        self._connect, self._home = connect, home
        self._groups: tuple[float, frozenset[str]] = (float("-inf"), frozenset())
        self._by_attempt: tuple[object, dict[str, list[PodFacts]]] = (None, {})
        self._version = object()
        self._lock = threading.Lock()
        self._opened: tuple[ClusterClient, ObjectCache[PodFacts]] | None = None

    # -------------------------------------------------------------------------------------------- objects

    def create(self, manifest: Manifest) -> Manifest:
        name, kind = manifest["metadata"]["name"], manifest["kind"]
        namespace = manifest["metadata"]["namespace"]
        resource = kind_of(manifest["apiVersion"], kind)
        try:
            with translated(f"create {kind} {name} in namespace {namespace}"):
                made = self._api.create(resource(manifest), namespace=namespace)
        except AlreadyExists:
            with translated(f"read {kind} {name} in namespace {namespace}"):
                made = self._api.get(resource, name, namespace=namespace)
        return {"apiVersion": manifest["apiVersion"], "kind": kind, **dict(made)}

    def adopt(self, manifest: Manifest, owner: Manifest) -> None:
        kind, name, namespace = (
            manifest["kind"],
            manifest["metadata"]["name"],
            manifest["metadata"]["namespace"],
        )
        change = {"metadata": {"ownerReferences": [owner_reference(owner)]}}
        try:
            with translated(f"set the owner of {kind} {name} in namespace {namespace}"):
                self._api.patch(kind_of(manifest["apiVersion"], kind), name, change, namespace=namespace)
        except NotFound as error:
            raise Unavailable(f"{error.message}; someone deleted it meanwhile") from error

    def find(self, api_version: str, kind: str, name: str, *, namespace: str) -> Manifest | None:
        with contextlib.suppress(NotFound), translated(f"read {kind} {name} in namespace {namespace}"):
            return dict(self._api.get(kind_of(api_version, kind), name, namespace=namespace))
        return None

    def delete(self, api_version: str, kind: str, name: str, *, namespace: str) -> None:
        resource = kind_of(api_version, kind)
        with contextlib.suppress(NotFound), translated(f"delete {kind} {name} in namespace {namespace}"):
            self._api.delete(resource, name, namespace=namespace, cascade=_background())

    def list_objects(self, api_version: str, kind: str, *, namespace: str) -> list[FoundObject]:
        with translated(f"list {kind}s in namespace {namespace}"):
            found = self._api.list(
                kind_of(api_version, kind), namespace=namespace, labels=self._labels, chunk_size=500
            )
            return [_found(each["metadata"]) for each in found]

    def explain(self, name: str, *, namespace: str) -> str | None:
        from lightkube.resources.core_v1 import Event

        with translated(f"list events in namespace {namespace}"):
            found = self._api.list(Event, namespace=namespace, fields={"type": "Warning"})
            said = [
                event.message
                for event in found
                if event.message and (event.involvedObject.name or "").startswith(name)
            ]
        return " ".join(said[-1].split()) if said else None

    def served_groups(self) -> frozenset[str]:
        read_at, found = self._groups
        if time.monotonic() - read_at > GROUPS_S:
            with translated("list the API groups"):
                found = self._api.served_groups()
            self._groups = time.monotonic(), found
        return found

    def close(self) -> None:
        """End the watch of pods, and close the connections."""
        if self._opened is not None:
            client, pods = self._opened
            pods.close()
            client.close()

    @property
    def _labels(self) -> dict[str, Any]:
        return {**MANAGED_BY, HOME_LABEL: label_value(self._home)}

    @property
    def _api(self) -> ClusterClient:
        return self._open()[0]

    @property
    def _cache(self) -> ObjectCache[PodFacts]:
        return self._open()[1]

    def _open(self) -> tuple[ClusterClient, ObjectCache[PodFacts]]:
        with self._lock:
            if self._opened is None:
                client = self._connect()
                pods = ObjectCache(client, POD, pod_facts, labels=self._labels, on_change=self._changed)
                self._opened = client, pods
            return self._opened

    # ----------------------------------------------------------------------------------------------- pods

    def pods(self, attempt: str) -> list[PodFacts] | None:
        version, (of, by_attempt) = self._version, self._by_attempt
        if of is not version:
            known = self._cache.known()
            if known is None:
                return None
            by_attempt = {}
            for pod in known.values():
                by_attempt.setdefault(pod.attempt, []).append(pod)
            self._by_attempt = version, by_attempt
        return by_attempt.get(attempt, [])

    def lacks_room(self) -> bool:
        known = self._cache.known() or {}
        return any(each.attempt and each.waits_for and each.node is None for each in known.values())

    def is_current(self) -> bool:
        return self._cache.fault is None and self._cache.lists > 0

    def _changed(self) -> None:
        self._version = object()


def kind_of(api_version: str, kind: str) -> Any:
    """Return the class of a kind, whose objects are plain dictionaries."""
    group, _, version = api_version.rpartition("/")
    return resource_of(ObjectKind(group, version, kind, PLURALS[kind], namespaced=True))


def _found(metadata: Mapping[str, Any]) -> FoundObject:
    return FoundObject(metadata["name"], metadata.get("annotations") or {})


def _background() -> Any:
    from lightkube.types import CascadeType

    return CascadeType.BACKGROUND
