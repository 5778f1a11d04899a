"""The port for pods that only ask a cluster's autoscaler for nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True)
class PlaceholderPods:
    """Pods of the shape of a waiting job's replicas, in the namespace of its `workspace`.

    `gpus` are devices of the kind that one replica needs. `selector` has the labels of the nodes that are wanted; with
    `spread` each pod asks for a node of its own.
    """

    job: str
    workspace: str
    pods: int
    cpus: int
    memory_bytes: int = 0
    gpus: tuple[str, ...] = ()
    selector: Mapping[str, str] = field(default_factory=dict)
    spread: bool = False


class Placeholders(Protocol):
    """Keeps placeholder pods in a cluster. They do nothing, and give way to whatever is really to run."""

    def keep(self, wanted: Sequence[PlaceholderPods]) -> None:
        """Make these, and remove all others of this platform. Raise FalajError if the cluster refuses some of it; what
        it did not refuse is done nevertheless."""
        ...
