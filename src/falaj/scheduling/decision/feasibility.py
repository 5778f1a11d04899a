"""Whether a job could start if nothing ran, and what forbids it if not."""

from __future__ import annotations

from falaj.records.scheduling.snapshot import Affinity, Reason, Request
from falaj.scheduling.capacity.cluster import Cluster
from falaj.scheduling.capacity.quota_tree import QuotaNode, fits_empty_quota
from falaj.scheduling.capacity.resources import ResourceAmount
from falaj.scheduling.decision.backlog import RequestShape
from falaj.scheduling.placement.gang_placement import place_gang


class Feasibility:
    """Remembers what it found, shape by shape."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._on_nodes: dict[RequestShape, Reason | None] = {}

    def never(
        self, request: Request, leaf: QuotaNode, asked: ResourceAmount, shape: RequestShape
    ) -> Reason | None:
        """Why the job could not start even if nothing ran; none: it could."""
        if self.cluster.nodes and not self.cluster.permitted(request, anywhere=True):
            return Reason.RESIDENCY
        if not fits_empty_quota(leaf, asked, borrowing=request.preemptible):
            return Reason.TOO_LARGE
        if shape not in self._on_nodes:
            self._on_nodes[shape] = self._forbidden(request)
        return self._on_nodes[shape]

    def _forbidden(self, request: Request) -> Reason | None:
        cluster, affinity = self.cluster, request.affinity
        if place_gang(request, cluster.idle, cluster.permitted(request), cluster):
            return None
        loose = request.model_copy(update={"affinity": affinity.model_copy(update={"island": None})})
        if place_gang(loose, cluster.idle, cluster.permitted(request), cluster):
            return Reason.TOPOLOGY
        anywhere = request.model_copy(update={"affinity": Affinity()})
        if place_gang(anywhere, cluster.idle, cluster.permitted(anywhere), cluster):
            return Reason.AFFINITY
        return (
            Reason.RESIDENCY if place_gang(anywhere, cluster.idle, cluster.all, cluster) else Reason.TOO_LARGE
        )
