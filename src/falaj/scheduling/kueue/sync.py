"""Compares the rendered objects with those of a cluster, and repairs what differs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from falaj.ports.cluster.manifests import Manifest, ManifestStore, is_owned
from falaj.ports.machine.hardware import NodeInventory
from falaj.records.config import KubernetesConfig
from falaj.records.scheduling.kueue import FieldDrift, ObjectDrift, QueueDrift, QueueSync, RenderedQueues
from falaj.scheduling.kueue.render import KINDS, SharedQueue, render

SYSTEM = {"apiVersion", "kind", "metadata", "status"}


class KueueCluster:
    """A cluster whose Kueue decides by the queues of the platform."""

    def __init__(self, config: KubernetesConfig, inventory: NodeInventory, store: ManifestStore) -> None:
        self._config, self._inventory, self._store = config, inventory, store

    def render(self, shared: Iterable[SharedQueue]) -> RenderedQueues:
        """Return the objects for the nodes that the cluster has now."""
        manifests = render(shared, self._inventory.nodes(), self._config)
        return RenderedQueues(to="kueue", manifests=tuple(manifests))

    def diff(self, shared: Iterable[SharedQueue]) -> QueueDrift:
        """Return how the cluster differs. Nothing is changed."""
        manifests = self.render(shared).manifests
        found = list(self._drifts(manifests))
        extra = sum(each.state == "extra" for each in found)
        return QueueDrift(to="kueue", same=len(manifests) - len(found) + extra, objects=tuple(found))

    def apply(self, shared: Iterable[SharedQueue]) -> QueueSync:
        """Make the cluster as rendered, and return what was changed. Objects of others are left alone."""
        manifests = self.render(shared).manifests
        by_name = {_identity(each): each for each in manifests}
        found = list(self._drifts(manifests))
        changed = [each for each in found if each.state in ("missing", "changed", "extra")]
        for each in changed:
            identity = each.kind, each.namespace, each.name
            if each.state == "extra":
                self._store.delete(KINDS[each.kind], _reference(each))
            else:
                self._store.apply(KINDS[each.kind], by_name[identity])
        same = len(manifests) - sum(each.state != "extra" for each in found)
        left = tuple(each for each in found if each.state in ("foreign", "waiting"))
        return QueueSync(to="kueue", same=same, changed=tuple(changed), left=left)

    def _drifts(self, manifests: Iterable[Manifest]) -> Iterator[ObjectDrift]:
        """Yield every object that differs: those to create or change in their order, then those to delete."""
        wanted = list(manifests)
        namespaces = self._store.namespaces()
        live = {_identity(each): each for kind in KINDS.values() for each in self._store.owned(kind)}
        for manifest in wanted:
            drift = self._drift(manifest, live.get(_identity(manifest)), namespaces)
            if drift is not None:
                yield drift
        names = {_identity(each) for each in wanted}
        order = list(KINDS)
        for identity in sorted(live.keys() - names, key=lambda each: (-order.index(each[0]), str(each))):
            if "deletionTimestamp" not in live[identity]["metadata"]:
                yield _described(live[identity], "extra")

    def _drift(
        self, manifest: Manifest, live: Manifest | None, namespaces: frozenset[str]
    ) -> ObjectDrift | None:
        kind = KINDS[manifest["kind"]]
        if kind.namespaced and manifest["metadata"]["namespace"] not in namespaces:
            return _described(manifest, "waiting")
        live = live or self._store.find(kind, manifest)
        if live is None:
            return _described(manifest, "missing")
        if not is_owned(live, self._config.prefix):
            return _described(manifest, "foreign")
        fields = tuple(differences(live, self._store.apply(kind, manifest, dry_run=True)))
        return _described(manifest, "changed", fields) if fields else None


def differences(live: Manifest, applied: Manifest) -> Iterator[FieldDrift]:
    """Yield the fields that differ between an object and the same after applying, by their paths."""
    before, after = dict(_leaves(_own_parts(live))), dict(_leaves(_own_parts(applied)))
    for path in sorted(before.keys() | after.keys()):
        if before.get(path) != after.get(path):
            yield FieldDrift(field=path, cluster=before.get(path), rendered=after.get(path))


def _own_parts(manifest: Manifest) -> dict[str, Any]:
    """Return what people write of an object: without status, versions and managers."""
    metadata = manifest.get("metadata") or {}
    named = {f"metadata.{part}": metadata.get(part) or {} for part in ("labels", "annotations")}
    return named | {key: value for key, value in manifest.items() if key not in SYSTEM}


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield each scalar with its path; items of a list are called by their names where they have some."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and value:
        for number, inner in enumerate(value):
            name = inner.get("name", number) if isinstance(inner, Mapping) else number
            yield from _leaves(inner, f"{path}[{name}]")
    else:
        yield path, json.dumps(value)


def _identity(manifest: Manifest) -> tuple[str, str | None, str]:
    metadata = manifest["metadata"]
    return manifest["kind"], metadata.get("namespace"), metadata["name"]


def _described(manifest: Manifest, state: Any, fields: tuple[FieldDrift, ...] = ()) -> ObjectDrift:
    kind, namespace, name = _identity(manifest)
    return ObjectDrift(kind=kind, name=name, namespace=namespace, state=state, fields=fields)


def _reference(drift: ObjectDrift) -> Manifest:
    return {"metadata": {"name": drift.name, "namespace": drift.namespace}}
