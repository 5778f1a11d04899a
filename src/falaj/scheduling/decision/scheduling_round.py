"""One scheduling round: queues by fair share, jobs in the order of their queue.

Free resources only shrink during a round, so a shape that was refused in a queue stays refused there. The cost of a
round depends on the jobs that start and the shapes in the queues, not on the number of waiting jobs.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from heapq import heapify, heappop, heappush, heapreplace
from typing import NamedTuple

from falaj.records.scheduling.snapshot import Affinity, Decision, Reason, Request, Snapshot, Start, Wait
from falaj.scheduling.capacity.budget_ledger import BudgetLedger
from falaj.scheduling.capacity.cluster import Cluster
from falaj.scheduling.capacity.free_capacity import FreeCapacity, GroupAffinity
from falaj.scheduling.capacity.quota_tree import (
    QuotaNode,
    QuotaTree,
    exceeds_quota,
    fits_empty_quota,
    is_within_limits,
    reserve_quota,
    reserve_quota_at,
)
from falaj.scheduling.capacity.reservation import Reservation, reserve
from falaj.scheduling.capacity.resources import (
    END_OF_TIME,
    Allocation,
    Rank,
    ResourceAmount,
    rank,
    requested_amount,
)
from falaj.scheduling.decision.backlog import Backlog, RequestShape, WaitingJobs, shape_of
from falaj.scheduling.decision.preemption_claims import PreemptionClaims
from falaj.scheduling.placement.gang_placement import NodeAssignment, place_gang, placements
from falaj.scheduling.placement.node_search import NodeSearch

Entry = tuple[float, str, int]
MOMENT = timedelta(microseconds=1)
WAITS_FOR_NODES = (Reason.CAPACITY, Reason.RESERVED)
MAX_RESERVATION_ATTEMPTS = 32
"""Jobs tried as the head of the queue in a round; each attempt visits all running jobs."""


class JobGroup:
    """The jobs of one queue and shape: `done` of them are decided, `refused` says why the others wait."""

    def __init__(self, leaf: QuotaNode, shape: RequestShape, group: WaitingJobs) -> None:
        self.leaf, self.shape, self.group = leaf, shape, group
        self.asked = requested_amount(group[0][1])
        self.done = 0
        self.refused: Reason | None = None


class JobDecision(NamedTuple):
    """The decisions about one job; rank None: the queue has no more jobs."""

    queue: str
    rank: Rank | None
    decisions: tuple[Decision, ...]


class SchedulingRound:
    """The state of one round. `decide_all` runs it; `taken` are the decisions so far, in order."""

    def __init__(
        self, snapshot: Snapshot, backlog: Backlog | None = None, cluster: Cluster | None = None
    ) -> None:
        self.snapshot, self.now = snapshot, snapshot.now
        self.backlog = Backlog(snapshot.pending) if backlog is None else backlog
        self.cluster = cluster or Cluster(snapshot.nodes, snapshot.running)
        self.held = [self.cluster.held_by(running) for running in snapshot.running]
        self.quota_tree = QuotaTree(snapshot.queues, self.cluster.whole)
        for held in self.held:
            self.quota_tree.hold(held)
        self.capacity_now = FreeCapacity(self.cluster, self.held)
        self.group_affinity = GroupAffinity(self.held)
        self.budget_ledger = BudgetLedger(
            snapshot.budgets, snapshot.price, self.cluster, snapshot.running, self.now
        )
        self.feasibility = Feasibility(self.cluster)
        self.search = NodeSearch(self.capacity_now, self._count_requests)
        self.preemption_claims = PreemptionClaims(self)
        self.quota_heads: dict[str, Request] = {}
        self.job_groups: dict[str, list[JobGroup]] = {}
        self.taken: list[JobDecision] = []
        self._heaps: dict[str, list[tuple[Rank, JobGroup]]] = {}
        self._within, self._beyond = FairOrder(), FairOrder()
        self._refused_shapes: dict[RequestShape, Reason] = {}
        self._started = self._sought = 0

    @property
    def head(self) -> Reservation | None:
        return self.capacity_now.head

    # ------------------------------------------------------------------------------------------ order

    def decide_all(self) -> SchedulingRound:
        for _ in self.each_candidate():
            pass
        return self

    def advance_to(self, job: Request) -> bool:
        """Run the round up to the job; return False if a job of the same shape ahead of it was refused."""
        shape = shape_of(job)
        for request in self.each_candidate():
            if request.job == job.job:
                return True
            job_groups = self.job_groups.get(job.queue, ()) if not job.claim else ()
            if any(job_group.refused and job_group.shape == shape for job_group in job_groups):
                return False
        return False

    def would_start(self, job: Request) -> bool:
        """Return whether the job, which is decided next, starts."""
        leaf = self.quota_tree.leaves.get(job.queue)
        return isinstance(self.judge(job, leaf, requested_amount(job), shape_of(job)), list)

    def each_candidate(self) -> Iterator[Request]:
        """Yield each job before it is decided."""
        yield from self.preemption_claims.each_candidate()
        for queue, groups in self.backlog.queues.items():
            leaf = self.quota_tree.leaves.get(queue)
            if leaf is not None:
                self._add_queue(queue, leaf, groups)
        while True:
            order, leaf = self._within, self._within.first()
            if leaf is None:
                order, leaf = self._beyond, self._beyond.first()
            if leaf is None:
                return
            yield from self._decide_next(leaf, order)

    def _add_queue(self, queue: str, leaf: QuotaNode, groups: dict[RequestShape, WaitingJobs]) -> None:
        job_groups = [JobGroup(leaf, shape, group) for shape, group in groups.items()]
        self.job_groups[queue] = job_groups
        self._heaps[leaf.name] = heap = [(job_group.group[0][0], job_group) for job_group in job_groups]
        heapify(heap)
        self._within.join(leaf)

    def _decide_next(self, leaf: QuotaNode, order: FairOrder) -> Iterator[Request]:
        heap = self._heaps[leaf.name]
        job_group = heap[0][1]
        beyond = exceeds_quota(leaf, job_group.asked)
        if beyond and order is self._within:
            self._move(leaf, self._within, self._beyond)
            return
        request = job_group.group[job_group.done][1]
        yield request
        decisions = self._decide(request, job_group)
        self.note(leaf.queue.name, heap[0][0], decisions)
        job_group.done += 1
        if job_group.refused or job_group.done == len(job_group.group):
            heappop(heap)
        else:
            heapreplace(heap, (job_group.group[job_group.done][0], job_group))
        if not heap:
            order.leave(leaf)
            self.note(leaf.queue.name, None, ())
        elif order is self._beyond and not exceeds_quota(leaf, heap[0][1].asked):
            self._move(leaf, self._beyond, self._within)

    def _move(self, leaf: QuotaNode, source: FairOrder, target: FairOrder) -> None:
        source.leave(leaf)
        target.join(leaf)

    # --------------------------------------------------------------------------------------- one decision

    def _decide(self, request: Request, job_group: JobGroup) -> tuple[Decision, ...]:
        found = self.judge(request, job_group.leaf, job_group.asked, job_group.shape)
        if isinstance(found, list):
            return (self.start(request, job_group.leaf, job_group.asked, found),)
        leaving = self.preemption_claims.evict_for(request, job_group.leaf, job_group.asked, found)
        if leaving:
            return (*leaving, Wait(job=request.job, reason=Reason.PREEMPTING))
        job_group.refused = found
        self.reserve_for(request, job_group.leaf, job_group.asked, found)
        return (Wait(job=request.job, reason=found),)

    def judge(
        self, request: Request, leaf: QuotaNode | None, asked: ResourceAmount, shape: RequestShape
    ) -> list[NodeAssignment] | Reason:
        """Return where the job can start now, or why it cannot. Only caches change."""
        if leaf is None:
            return Reason.NO_QUEUE
        allowed = is_within_limits(leaf, asked) and (request.preemptible or not exceeds_quota(leaf, asked))
        can_afford = self.budget_ledger.can_afford(request)
        if allowed and can_afford and shape not in self._refused_shapes:
            spots = self._find_nodes(request)
            if spots is not None:
                return spots
            self._refused_shapes[shape] = self._refusal(request)
        never = self.feasibility.never(request, leaf, asked, shape)
        if never:
            return never
        if not can_afford:
            return Reason.BUDGET
        return self._refused_shapes[shape] if allowed else Reason.QUOTA

    def passes(self, request: Request) -> bool:
        """Return whether the job ends before the head's reservation begins (backfill on reserved nodes)."""
        return self.head is not None and self.head.lets_pass(request, self.now)

    def _find_nodes(self, request: Request) -> list[NodeAssignment] | None:
        permitted = self.cluster.permitted(request)
        if self.cluster.has_burst and not self.budget_ledger.can_afford(request, burst=True):
            permitted = self.cluster.without_burst(permitted)
        capacity_now, suits = self.capacity_now, permitted
        if self.group_affinity.matters(request):
            suits = self.group_affinity.suits(request, permitted)
        passes = self.passes(request)
        if request.replicas > 1 or request.affinity.island is not None or suits is not permitted:
            return place_gang(
                request, capacity_now.free if passes else capacity_now.open, suits, self.cluster
            )
        spot = self.search.one(request, permitted)
        if spot is not None:
            return [spot]
        if passes and self.head is not None:
            nodes = sorted(self.head.then.keys() & set(permitted))
            return place_gang(request, capacity_now.free, nodes, self.cluster)
        return None

    def _refusal(self, request: Request) -> Reason:
        permitted, capacity_now = self.cluster.permitted(request), self.capacity_now
        view = capacity_now.free if self.passes(request) else capacity_now.open
        if self.group_affinity.matters(request) and place_gang(request, view, permitted, self.cluster):
            return Reason.AFFINITY
        kept = self.head is not None or bool(self.preemption_claims.nominations.open)
        return (
            Reason.RESERVED
            if kept and place_gang(request, capacity_now.unallocated, permitted, self.cluster)
            else Reason.CAPACITY
        )

    def start(
        self, request: Request, leaf: QuotaNode, asked: ResourceAmount, spots: list[NodeAssignment]
    ) -> Start:
        view = self.capacity_now.free if self.passes(request) else self.capacity_now.open
        where = placements(request, spots, view, self.cluster)
        start = Start(job=request.job, placements=where, borrows=exceeds_quota(leaf, asked))
        self.hold(request, leaf, asked, start)
        return start

    def note(self, queue: str, rank: Rank | None, decisions: tuple[Decision, ...]) -> None:
        self.taken.append(JobDecision(queue, rank, decisions))

    def hold(
        self, request: Request, leaf: QuotaNode, asked: ResourceAmount, start: Start, *, paid: bool = False
    ) -> None:
        ends_by = END_OF_TIME if request.time_limit is None else self.now + request.time_limit
        on = self.cluster.slots_of(request, start.placements)
        self._started += 1  # a later start is younger, also within a round
        started_at = self.now + self._started * MOMENT
        held = Allocation(ends_by, started_at, rank(request), request, asked, on, start.borrows)
        self.held.append(held)
        self.preemption_claims.stays(request)
        self.quota_tree.hold(held)
        self.capacity_now.hold(held)
        self.group_affinity.hold(held)
        if not paid:
            self.budget_ledger.spend(request)
        self._within.changed(leaf)
        self._beyond.changed(leaf)

    def reserve_for(self, request: Request, leaf: QuotaNode, asked: ResourceAmount, reason: Reason) -> None:
        """Reserve nodes for the first job that waits for them, and quota for the first that waits for it in a queue."""
        if reason in WAITS_FOR_NODES and self.head is None and self._sought < MAX_RESERVATION_ATTEMPTS:
            self._sought += 1
            head = self.reservation_for(request, leaf, asked)
            if head is not None:
                self.capacity_now.keep(head)
                reserve_quota(leaf, asked, borrows=exceeds_quota(leaf, asked))
        elif reason is Reason.QUOTA:
            self._reserve_quota(request, leaf, asked)

    def reservation_for(self, request: Request, leaf: QuotaNode, asked: ResourceAmount) -> Reservation | None:
        """Return what the job would get if it were the head; none if no end of jobs lets it start."""
        return reserve(request, self.capacity_now, self._expected_to_end(leaf, asked), self.now)

    def _expected_to_end(self, leaf: QuotaNode, asked: ResourceAmount) -> list[Allocation]:
        """Return the allocations whose end frees nodes for the job.

        A borrowing job does not count allocations within the quota of another queue that has waiting jobs to take them
        again: nodes reserved for it would stay idle, and all jobs behind it would starve.
        """
        settled = self.preemption_claims.settled()
        if not exceeds_quota(leaf, asked):
            return settled
        return [held for held in settled if held.borrows or not self._is_retaken(held, leaf)]

    def _is_retaken(self, held: Allocation, asking: QuotaNode) -> bool:
        """Return whether a waiting job of the same queue is within quota once this one has ended."""
        leaf = self.quota_tree.leaves.get(held.request.queue)
        if leaf is None or leaf is asking:
            return False
        return any(
            all(each.quota.holds(each.own.used.less(held.amount), job_group.asked) for each in leaf.path)
            for job_group in self.job_groups.get(held.request.queue, ())
            if self._waits_for_quota(job_group)
        )

    def _waits_for_quota(self, job_group: JobGroup) -> bool:
        """Return whether jobs of the group wait only for their queue or for quota."""
        if job_group.refused is None and job_group.done == len(job_group.group):
            return False
        request = job_group.group[-1][1]
        return (
            job_group.refused in (None, Reason.QUOTA)
            and self.budget_ledger.can_afford(request)
            and self.feasibility.never(request, job_group.leaf, job_group.asked, job_group.shape) is None
        )

    def _reserve_quota(self, request: Request, leaf: QuotaNode, asked: ResourceAmount) -> None:
        short = [branch.lacks(asked, borrowing=request.preemptible) for branch in leaf.path]
        highest = max(level for level, lack in enumerate(short) if lack)
        beyond = request.preemptible and exceeds_quota(leaf, asked)
        for level, branch in enumerate(leaf.path[: highest + 1]):
            if branch.name not in self.quota_heads:
                reserve_quota_at(branch, asked, borrows=beyond)
                if short[level]:
                    self.quota_heads[branch.name] = request

    def _count_requests(self) -> Iterator[tuple[Request, int]]:
        """Yield waiting and running requests with the number of jobs of each shape."""
        for groups in self.backlog.queues.values():
            for group in groups.values():
                yield group[0][1], len(group)
        for _, request in self.backlog.claims:
            yield request, 1
        for running in self.snapshot.running:
            yield running.request, 1


class FairOrder:
    """The queues with undecided jobs, by fair share: down the tree, at each level the queue with the lowest score.

    A changed score adds a new heap entry; older entries of the queue are skipped.
    """

    def __init__(self) -> None:
        self._tops: list[tuple[Entry, QuotaNode]] = []
        self._heaps: dict[str, list[tuple[Entry, QuotaNode]]] = {}
        self._open: dict[str, int] = {}
        self._stamps: dict[str, int] = {}

    def join(self, leaf: QuotaNode) -> None:
        for branch in leaf.path:
            waiting = self._open.get(branch.name, 0)
            self._open[branch.name] = waiting + 1
            if not waiting:
                self._enter(branch)

    def leave(self, leaf: QuotaNode) -> None:
        for branch in leaf.path:
            self._open[branch.name] -= 1

    def changed(self, leaf: QuotaNode) -> None:
        """Update the scores of a queue and those above it after a change of usage."""
        for branch in leaf.path:
            if self._open.get(branch.name):
                self._enter(branch)

    def first(self) -> QuotaNode | None:
        branch = self._lowest(self._tops)
        while branch is not None and branch.children:
            branch = self._lowest(self._heaps[branch.name])
        return branch

    def _enter(self, branch: QuotaNode) -> None:
        stamp = self._stamps[branch.name] = self._stamps.get(branch.name, 0) + 1
        heap = self._tops if branch.parent is None else self._heaps.setdefault(branch.parent.name, [])
        heappush(heap, ((branch.score, branch.name, stamp), branch))

    def _lowest(self, heap: list[tuple[Entry, QuotaNode]]) -> QuotaNode | None:
        while heap:
            (_, name, stamp), branch = heap[0]
            if stamp == self._stamps[name] and self._open[name]:
                return branch
            heappop(heap)
        return None


class Feasibility:
    """Whether a job could start on an idle cluster; cached by shape."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._on_nodes: dict[RequestShape, Reason | None] = {}

    def never(
        self, request: Request, leaf: QuotaNode, asked: ResourceAmount, shape: RequestShape
    ) -> Reason | None:
        """Return why the job could not start even if no other job ran; None if it could."""
        if self.cluster.nodes and not self.cluster.permitted(request, anywhere=True, even_cordoned=True):
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
        permitted = cluster.permitted(request, even_cordoned=True)
        if place_gang(request, cluster.idle, permitted, cluster):
            return Reason.CORDONED
        loose = request.model_copy(update={"affinity": affinity.model_copy(update={"island": None})})
        if place_gang(loose, cluster.idle, permitted, cluster):
            return Reason.TOPOLOGY
        anywhere = request.model_copy(update={"affinity": Affinity()})
        if place_gang(anywhere, cluster.idle, cluster.permitted(anywhere, even_cordoned=True), cluster):
            return Reason.AFFINITY
        return (
            Reason.RESIDENCY if place_gang(anywhere, cluster.idle, cluster.all, cluster) else Reason.TOO_LARGE
        )
