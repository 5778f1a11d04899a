"""The storage of pods: their disk space, and the PersistentVolumeClaims that jobs ask for."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from falaj.errors import InvalidInput
from falaj.ports.launcher import VOLUMES, Launch
from falaj.records.sizes import spell_size

if TYPE_CHECKING:
    from falaj.drivers.kubernetes.cluster import PodCluster

Manifest = dict[str, Any]


def pod_volumes(
    launch: Launch, *, secret: str, scratch_bytes: int | None, scratch_class: str | None
) -> list[Manifest]:
    """Return the volumes of a pod: of a `scratch_class` one is made for it, else it has the disk of its node."""
    memory = {} if launch.memory_bytes is None else {"sizeLimit": str(launch.memory_bytes)}
    disk = {"emptyDir": {} if scratch_bytes is None else {"sizeLimit": str(scratch_bytes)}}
    return [
        {"name": "work", **(disk if scratch_class is None else own_claim(scratch_bytes, scratch_class))},
        {"name": "tmp", **disk},
        {"name": "shm", "emptyDir": {"medium": "Memory"} | memory},
        {"name": "credentials", "secret": {"secretName": secret, "defaultMode": 0o440}},
        *claimed_volumes(launch),
    ]


def own_claim(size_bytes: int | None, storage_class: str) -> Manifest:
    """Return a volume that the cluster makes for the pod and deletes with it."""
    spec = {
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": storage_class,
        "resources": {"requests": {"storage": str(size_bytes)}},
    }
    return {"ephemeral": {"volumeClaimTemplate": {"spec": spec}}}


def claimed_volumes(launch: Launch) -> list[Manifest]:
    """Return the claims that the job asked for, each once, however many of its folders are mounted."""
    writable = {each.claim for each in launch.volumes if not each.read_only}
    return [
        {
            "name": volume_name(str(claim)),
            "persistentVolumeClaim": {"claimName": claim} | ({} if claim in writable else {"readOnly": True}),
        }
        for claim in dict.fromkeys(each.claim for each in launch.volumes)
    ]


def claim_mounts(launch: Launch) -> list[Manifest]:
    """Return where the container of a pod has the claims."""
    return [
        {
            "name": volume_name(str(each.claim)),
            "mountPath": f"{VOLUMES}/{each.name}",
            "readOnly": each.read_only,
        }
        | ({} if each.path is None else {"subPath": each.path})
        for each in launch.volumes
    ]


def volume_name(claim: str) -> str:
    """Return the name of a claim in its pod: other than claims, volumes are named by a DNS label."""
    return f"claim-{hashlib.sha256(claim.encode()).hexdigest()[:12]}"


def require_disk(asked_bytes: int | None, scratch_bytes: int | None) -> None:
    """Raise InvalidInput if a job asks for more disk space than its pods have."""
    if asked_bytes is not None and scratch_bytes is not None and asked_bytes > scratch_bytes:
        allowed = f"at most {spell_size(scratch_bytes)}, the size in [kubernetes.scratch]"
        raise InvalidInput.at("spec.disk_bytes", given=spell_size(asked_bytes), allowed=allowed)


def explain_claim(cluster: PodCluster, claim: str, *, namespace: str) -> str | None:
    """Return why pods cannot mount a PersistentVolumeClaim; none if nothing is known against it."""
    found = cluster.find("v1", "PersistentVolumeClaim", claim, namespace=namespace)
    where = f"PersistentVolumeClaim {claim} in namespace {namespace}"
    if found is None:
        return f"{where} does not exist; an administrator of the cluster creates it"
    if found["metadata"].get("deletionTimestamp"):
        return f"{where} is being deleted"
    if (found.get("status") or {}).get("phase") == "Lost":
        return f"{where} has lost its PersistentVolume {(found.get('spec') or {}).get('volumeName')}"
    return None
