"""Falaj's scheduler as a policy of the simulator, with a backlog that is kept across rounds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from falaj.records.names import ObjectId
from falaj.records.scheduling.snapshot import Decision, Node, Reason, Request, RunningJob, Snapshot, Wait
from falaj.scheduling.capacity.cluster import Cluster
from falaj.scheduling.capacity.resources import Allocation
from falaj.scheduling.decision.backlog import Backlog, shape_of
from falaj.scheduling.decision.decide import decide_from
from falaj.scheduling.simulator.policies import PERMANENT_REASONS


class CachedCluster(Cluster):
    """Caches the allocations of running jobs across rounds."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        super().__init__(nodes)
        self._known: dict[str, tuple[RunningJob, Allocation]] = {}

    def held_by(self, running: RunningJob) -> Allocation:
        known = self._known.get(running.request.job)
        if known is None or known[0] is not running:
            known = self._known[running.request.job] = running, super().held_by(running)
        return known[1]

    def forget_others(self, running: Sequence[RunningJob]) -> None:
        """Drop the allocations of ended jobs when the cache has grown large."""
        if len(self._known) > 2 * len(running) + 1000:
            jobs = {each.request.job for each in running}
            self._known = {job: known for job, known in self._known.items() if job in jobs}


class BacklogPolicy:
    """Decides as `decide` does, at a cost that depends on the jobs that start and not on those that wait.

    It gives the reason of a wait only for the first job of a shape in its queue, and for jobs that can never start.
    """

    def __init__(self) -> None:
        self._backlog = Backlog()
        self._waiting: dict[str, Request] = {}
        self._nodes: tuple[Node, ...] = ()
        self._cluster = CachedCluster(())

    def job_added(self, request: Request) -> None:
        self._waiting[request.job] = request
        self._backlog.add(request)

    def job_removed(self, request: Request) -> None:
        self._backlog.remove(self._waiting.pop(request.job))

    def decide(self, snapshot: Snapshot) -> Sequence[Decision]:
        if snapshot.nodes is not self._nodes:
            self._nodes, self._cluster = snapshot.nodes, CachedCluster(snapshot.nodes)
        self._cluster.forget_others(snapshot.running)
        found = list(decide_from(self._backlog, snapshot, cluster=self._cluster))
        for decision in [
            each for each in found if isinstance(each, Wait) and each.reason in PERMANENT_REASONS
        ]:
            found += [Wait(job=job, reason=decision.reason) for job in self._alike(decision.job)]
        unknown = self._backlog.queues.keys() - {queue.name for queue in snapshot.queues}
        for queue in sorted(unknown):
            found += [Wait(job=each.job, reason=Reason.NO_QUEUE) for _, each in self._backlog.in_order(queue)]
        return found

    def _alike(self, job: str) -> list[ObjectId]:
        request = self._waiting[job]
        group = self._backlog.queues.get(request.queue, {}).get(shape_of(request), [])
        return [each.job for _, each in group if each.job != job]
