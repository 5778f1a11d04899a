"""Asks the autoscalers of clusters for nodes that waiting jobs need."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from falaj.errors import FalajError
from falaj.governance import objects
from falaj.governance.operations.gate import Gate
from falaj.ports.cluster.placeholders import PlaceholderPods, Placeholders
from falaj.ports.machine.hardware import ClusterNode, NodeFacts
from falaj.records.scheduling.scale_up import ScaleUpHint
from falaj.records.scheduling.snapshot import Node
from falaj.scheduling.decision.scale_up import nodes_wanted
from falaj.training.queue import QueueReader

EVERY_S = 5.0
OF_ONE_NODE = ("kubernetes.io/hostname", "nvidia.com/gpu.clique")
"""Labels that a new node does not have."""

Machines = Callable[[], tuple[tuple[NodeFacts, Node], ...]]


class ScaleUp:
    """What the queue asks autoscalers for: at most `limit` pods. `placeholders` are those of each cluster."""

    def __init__(
        self,
        gate: Gate,
        queue: QueueReader,
        machines: Machines,
        placeholders: Mapping[str | None, Placeholders],
        *,
        limit: int,
    ) -> None:
        self._gate, self._queue, self._machines = gate, queue, machines
        self._placeholders, self._limit = placeholders, limit
        self._next_at = float("-inf")
        self._is_over = False
        """It is off, and what was asked for while it was on is taken back."""

    @property
    def is_on(self) -> bool:
        return self._limit > 0 and bool(self._placeholders)

    @property
    def is_due(self) -> bool:
        return bool(self._placeholders) and not self._is_over and time.monotonic() >= self._next_at

    def hints(self) -> tuple[ScaleUpHint, ...]:
        """Return for which jobs nodes are wanted now."""
        if not self.is_on:
            return ()
        nodes = [node for facts, node in self._machines() if (facts.cluster or ClusterNode()).state != "lost"]
        with self._gate.database.read() as tx:
            seen = self._queue.snapshot(tx, nodes, now=self._gate.clock())
        return nodes_wanted(seen.snapshot, limit=self._limit)

    def step(self) -> None:
        """Make the placeholders of all clusters as the queue wants them."""
        self._next_at = time.monotonic() + EVERY_S
        wanted: dict[str | None, list[PlaceholderPods]] = {name: [] for name in self._placeholders}
        known = {node.name: facts for facts, node in self._machines()} if self.is_on else {}
        for hint in self.hints():
            pods = self._pods(hint, known.get(hint.like))
            if pods is not None and hint.cluster in wanted:
                wanted[hint.cluster].append(pods)
        refused: list[FalajError] = []
        for cluster, placeholders in self._placeholders.items():
            try:
                placeholders.keep(wanted[cluster])
            except FalajError as error:  # of one cluster: the others are asked nevertheless
                refused.append(error)
        if refused:
            raise refused[0]
        self._is_over = not self.is_on

    def _pods(self, hint: ScaleUpHint, like: NodeFacts | None) -> PlaceholderPods | None:
        with self._gate.database.read() as tx:
            workspace = None if hint.workspace is None else objects.by_id(tx, hint.workspace)
        if workspace is None or like is None or like.cluster is None:
            return None
        each, labels = hint.each, like.cluster.selector
        alike = [gpu.id for gpu in like.gpus if gpu.profile == each.gpu_profile]
        return PlaceholderPods(
            job=hint.job,
            workspace=workspace.name,
            pods=hint.pods,
            cpus=each.cpus,
            memory_bytes=each.memory_bytes,
            gpus=tuple(alike[: each.gpus]),
            selector={key: value for key, value in labels.items() if key not in OF_ONE_NODE},
            spread=hint.spread,
        )
