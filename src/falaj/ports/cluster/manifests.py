"""The port for objects that the platform keeps in a cluster, and shares with its administrators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

Manifest = Mapping[str, Any]
"""An object as its YAML says it: apiVersion, kind, metadata, spec."""

OWNER_LABEL = "app.kubernetes.io/managed-by"
OWNER = "falaj"
PLATFORM_LABEL = "falaj.dev/platform"
"""The prefix of the platform that an object belongs to; several may share a cluster."""


class ObjectKind(NamedTuple):
    """A kind of object, and how the API server spells it."""

    group: str
    version: str
    kind: str
    plural: str
    namespaced: bool = False

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version


class ManifestStore(Protocol):
    """Objects of a cluster. Fields that others set, and that no manifest of ours names, are left alone."""

    def find(self, kind: ObjectKind, manifest: Manifest) -> Manifest | None:
        """Return the object with the name of `manifest`; none if there is none."""
        ...

    def owned(self, kind: ObjectKind) -> list[Manifest]:
        """Return the objects of a kind with the labels of this platform, in all namespaces."""
        ...

    def apply(self, kind: ObjectKind, manifest: Manifest, *, dry_run: bool = False) -> Manifest:
        """Create the object, or set the fields that `manifest` names, and return it; `dry_run` changes nothing."""
        ...

    def delete(self, kind: ObjectKind, manifest: Manifest) -> None:
        """Delete an object of this platform, if it is there. Raise Conflict if it does not carry the labels."""
        ...

    def namespaces(self) -> frozenset[str]:
        """Return the names of the namespaces that are not being deleted."""
        ...


def is_owned(manifest: Manifest, platform: str) -> bool:
    """Return whether an object carries the labels of this platform."""
    labels = (manifest.get("metadata") or {}).get("labels") or {}
    return labels.get(OWNER_LABEL) == OWNER and labels.get(PLATFORM_LABEL) == platform
