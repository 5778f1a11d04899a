"""The volumes of jobs: folders of this machine or claims of the cluster, as falaj.toml lists them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from falaj.control.jobs.staging import make_readable
from falaj.errors import InvalidInput
from falaj.ports.launcher import VolumeMount
from falaj.records.config import ClusterVolume, MachineVolume

FOLDER = "volumes"


def machine_volumes(
    volumes: Mapping[str, MachineVolume], names: Sequence[str], workspace: str
) -> tuple[VolumeMount, ...]:
    """Return folders of this machine; InvalidInput for one that the workspace may not read, or that is not there."""
    found = [(name, volumes[name]) for name in _permitted(volumes, names, workspace, "jobs.volumes")]
    for name, volume in found:
        if not volume.folder.is_dir():
            where, given = f"jobs.volumes.{name}", str(volume.folder)
            raise InvalidInput.at(where, given=given, allowed="a folder that exists on this machine")
    return tuple(VolumeMount(name, zone=each.zone, folder=each.folder) for name, each in found)


def cluster_volumes(
    volumes: Mapping[str, ClusterVolume], names: Sequence[str], workspace: str
) -> tuple[VolumeMount, ...]:
    """Return claims of the cluster; InvalidInput for one that the workspace may not mount."""
    found = [(name, volumes[name]) for name in _permitted(volumes, names, workspace, "kubernetes.volumes")]
    return tuple(
        VolumeMount(name, read_only=each.read_only, zone=each.zone, claim=each.claim, path=each.path)
        for name, each in found
    )


def link_volumes(volumes: Sequence[VolumeMount], beside: Path) -> dict[str, str]:
    """Return the variable by which a job on this machine finds its volumes: links in a folder `beside` its own."""
    folder = beside / FOLDER
    for each in volumes:
        make_readable(folder)
        with suppress(FileExistsError):
            (folder / each.name).symlink_to(str(each.folder))
    return {"FALAJ_VOLUMES": str(folder)} if volumes else {}


def _permitted(
    volumes: Mapping[str, MachineVolume | ClusterVolume], names: Sequence[str], workspace: str, table: str
) -> Sequence[str]:
    """Return `names`; InvalidInput if one is no volume of the workspace. Those of others are not told."""
    own = {name for name, each in volumes.items() if workspace in each.workspaces}
    for name in names:
        if name not in own:
            known = ", ".join(sorted(own)) or f"none: workspace {workspace} has no volumes here"
            fix = (
                f'an administrator lists {name} in [{table}] of falaj.toml, with workspaces = ["{workspace}"]'
            )
            raise InvalidInput.at("spec.volumes", given=name, allowed=known, fix=fix)
    return names
