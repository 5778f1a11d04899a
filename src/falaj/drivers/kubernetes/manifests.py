"""Objects that the platform keeps in the cluster, by server-side apply."""

from __future__ import annotations

from typing import Any

from lightkube import ALL_NS
from lightkube.core.exceptions import ApiError
from lightkube.types import PatchType

from falaj.drivers.kubernetes.client import FIELD_MANAGER, ClusterClient, connect, resource_of, translated
from falaj.drivers.kubernetes.isolation.policies import NAMESPACE
from falaj.errors import Conflict
from falaj.ports.cluster.manifests import OWNER, OWNER_LABEL, PLATFORM_LABEL, Manifest, ObjectKind, is_owned
from falaj.records.config import KubernetesConfig


class KubernetesManifests:
    """A ManifestStore over the cluster's API; the fields that it sets belong to the manager `falaj`."""

    def __init__(self, config: KubernetesConfig, *, client: ClusterClient | None = None) -> None:
        """Use `client` if there is one, which is closed with the store."""
        self._client = client or connect(config)
        self._platform = config.prefix

    def find(self, kind: ObjectKind, manifest: Manifest) -> Manifest | None:
        with translated(f"read {_described(kind, manifest)}"):
            try:
                return dict(
                    self._client.get(
                        resource_of(kind), manifest["metadata"]["name"], **_within(kind, manifest)
                    )
                )
            except ApiError as error:
                if error.status.code == 404:
                    return None
                raise

    def owned(self, kind: ObjectKind) -> list[Manifest]:
        labels: dict[str, Any] = {OWNER_LABEL: OWNER, PLATFORM_LABEL: self._platform}
        everywhere: dict[str, Any] = {"namespace": ALL_NS} if kind.namespaced else {}
        with translated(f"list {kind.plural} of {kind.api_version}"):
            found = self._client.list(resource_of(kind), labels=labels, chunk_size=500, **everywhere)
            return [dict(each) for each in found]

    def apply(self, kind: ObjectKind, manifest: Manifest, *, dry_run: bool = False) -> Manifest:
        with translated(f"apply {_described(kind, manifest)}"):
            made = self._client.patch(
                resource_of(kind),
                manifest["metadata"]["name"],
                dict(manifest),
                patch_type=PatchType.APPLY,
                field_manager=FIELD_MANAGER,
                force=True,
                dry_run=dry_run,
                **_within(kind, manifest),
            )
            return dict(made)

    def delete(self, kind: ObjectKind, manifest: Manifest) -> None:
        found = self.find(kind, manifest)
        if found is None:
            return
        if not is_owned(found, self._platform):
            raise Conflict(
                f"{_described(kind, manifest)} does not carry the platform's labels; it is not deleted"
            )
        with translated(f"delete {_described(kind, manifest)}"):
            try:
                self._client.delete(
                    resource_of(kind), manifest["metadata"]["name"], **_within(kind, manifest)
                )
            except ApiError as error:
                if error.status.code != 404:  # someone else was faster
                    raise

    def namespaces(self) -> frozenset[str]:
        with translated("list namespaces"):
            found = list(self._client.list(resource_of(NAMESPACE), chunk_size=500))
        return frozenset(
            each["metadata"]["name"] for each in found if "deletionTimestamp" not in each["metadata"]
        )

    def close(self) -> None:
        self._client.close()


def _within(kind: ObjectKind, manifest: Manifest) -> dict[str, Any]:
    return {"namespace": manifest["metadata"]["namespace"]} if kind.namespaced else {}


def _described(kind: ObjectKind, manifest: Manifest) -> str:
    metadata = manifest["metadata"]
    return f"{kind.kind} {metadata['name']}" + (f" in {metadata['namespace']}" if kind.namespaced else "")
