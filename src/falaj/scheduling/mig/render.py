"""MIG layouts and shared GPUs as configuration of NVIDIA's GPU operator. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from falaj.records.scheduling.mig import MigDevices

MIG_MAP, PLUGIN_MAP = "falaj-mig-parted", "falaj-device-plugin"
SHARES = (2, 4, 8)
"""The numbers of pods that the rendered configurations let share a GPU."""

Manifest = dict[str, Any]


def mig_parted(configurations: Mapping[str, Iterable[MigDevices]]) -> Manifest:
    """Return the configuration of mig-parted: the layouts by name, and the one that cuts nothing."""
    made: Manifest = {"all-disabled": [{"devices": "all", "mig-enabled": False}]}
    for name, devices in sorted(configurations.items()):
        made[name] = [_devices(each) for each in devices]
    return {"version": "v1", "mig-configs": made}


def _devices(each: MigDevices) -> Manifest:
    chosen: Manifest = {"devices": list(each.devices), "mig-enabled": bool(each.slices)}
    return chosen | ({"mig-devices": dict(each.slices)} if each.slices else {})


def sharing_configurations() -> dict[str, Manifest]:
    """Return configurations of the device plugin by name: none is shared, or each GPU by time-slicing or MPS.

    A pod gets one part at most: two parts of one GPU are no more than one. Shared GPUs keep their name, nvidia.com/gpu;
    the labels of GPU feature discovery say that they are shared.
    """
    made: dict[str, Manifest] = {"whole": _plugin({})}
    for pods in SHARES:
        resources = [{"name": "nvidia.com/gpu", "replicas": pods}]
        slicing = {"renameByDefault": False, "failRequestsGreaterThanOne": True, "resources": resources}
        made[f"time-slicing-{pods}"] = _plugin({"sharing": {"timeSlicing": slicing}})
        made[f"mps-{pods}"] = _plugin(
            {"sharing": {"mps": {"renameByDefault": False, "resources": resources}}}
        )
    return made


def _plugin(sharing: Manifest) -> Manifest:
    return {"version": "v1", "flags": {"migStrategy": "mixed"}, **sharing}


def config_map(name: str, namespace: str, data: Mapping[str, str]) -> Manifest:
    """Return a ConfigMap, to be applied in the namespace of the GPU operator."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "labels": {"app.kubernetes.io/managed-by": "falaj"},
        },
        "data": dict(data),
    }
