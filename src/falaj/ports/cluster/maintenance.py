"""The port for the maintenance of a cluster's nodes: who has cordoned one, and what runs on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple, Protocol

from falaj.records.scheduling.hardware import NodePod

MIG_CONFIG, MIG_STATE = "nvidia.com/mig.config", "nvidia.com/mig.config.state"
"""Labels of a node: the layout that NVIDIA's MIG manager should cut, and how it fares."""
PLUGIN_CONFIG = "nvidia.com/device-plugin.config"
"""The label of a node that names the configuration of NVIDIA's device plugin."""


@dataclass(frozen=True)
class CordonNote:
    """What a platform writes on a node that it cordons.

    `was_cordoned` says that the node took no pods before: whoever wanted that decides when it takes some again.
    """

    by: str
    since: datetime
    reason: str = ""
    was_cordoned: bool = False


class Uncordoned(NamedTuple):
    """Whether this platform had cordoned a node, and who keeps it cordoned now; empty: nobody."""

    was_noted: bool
    kept_by: str


class NodeMaintenance(Protocol):
    """Changes nodes of a cluster, visibly to its administrators. What others have set stays.

    NotFound if there is no such node, Unavailable if the cluster does not answer or denies a right.
    """

    def cordon(self, node: str, note: CordonNote) -> None:
        """Let the node take no new pods, and write the note of this platform on it."""
        ...

    def uncordon(self, node: str) -> Uncordoned:
        """Remove the note of this platform, and let the node take pods again unless others keep it cordoned.

        Nothing is changed if there is no note of this platform.
        """
        ...

    def pods(self, node: str) -> list[NodePod]:
        """Return the pods on the node that have not ended."""
        ...

    def label(self, node: str, labels: Mapping[str, str | None]) -> None:
        """Set labels of the node; a value of none removes one."""
        ...
