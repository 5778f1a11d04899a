"""One round of decisions: every queue in its turn, every job in its queue's order.

What is free only shrinks in a round, so a shape that was refused in a queue stays refused there: a round costs about as
much as it starts jobs and as queues have shapes, however many wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from heapq import heapify, heappop, heapreplace
from typing import NamedTuple

from falaj.records.scheduling.snapshot import Decision, Reason, Request, Snapshot, Start, Wait
from falaj.scheduling.deciding.backlog import Backlog, Group, Shape, shape_of
from falaj.scheduling.deciding.branches import Branch, Branches, allows, borrows, keep_quota, keep_quota_at
from falaj.scheduling.deciding.claims import Claimants
from falaj.scheduling.deciding.cluster import Cluster
from falaj.scheduling.deciding.fairness import Line
from falaj.scheduling.deciding.ground import Company, Ground
from falaj.scheduling.deciding.ledger import END_OF_TIME, Amount, Held, Rank, rank, total
from falaj.scheduling.deciding.possible import Possible
from falaj.scheduling.deciding.purse import Purse
from falaj.scheduling.deciding.reservation import Reservation, reserve
from falaj.scheduling.placing.placement import Spot, place, placements
from falaj.scheduling.placing.search import Search

MOMENT = timedelta(microseconds=1)
WAITS_FOR_NODES = (Reason.CAPACITY, Reason.RESERVED)
MOST_SOUGHT = 32
"""So many jobs at most are looked at for the head: each time all that run are counted."""


class Strand:
    """The jobs of one queue and shape, and how many of them have had their turn; `refused`: why the others wait."""

    def __init__(self, leaf: Branch, shape: Shape, group: Group) -> None:
        self.leaf, self.shape, self.group = leaf, shape, group
        self.asked = total(group[0][1])
        self.done = 0
        self.refused: Reason | None = None


class Turn(NamedTuple):
    """What was decided about one job; none: the queue has no more to ask."""

    queue: str
    rank: Rank | None
    decisions: tuple[Decision, ...]


class Turns:
    """The state of one round. `take_all` runs it; `taken` are the turns so far, in order."""

    def __init__(
        self, snapshot: Snapshot, backlog: Backlog | None = None, cluster: Cluster | None = None
    ) -> None:
        self.snapshot, self.now = snapshot, snapshot.now
        self.backlog = Backlog(snapshot.pending) if backlog is None else backlog
        self.cluster = cluster or Cluster(snapshot.nodes, snapshot.running)
        self.held = [self.cluster.held_by(running) for running in snapshot.running]
        self.branches = Branches(snapshot.queues, self.cluster.whole)
        for held in self.held:
            self.branches.hold(held)
        self.ground = Ground(self.cluster, self.held)
        self.company = Company(self.held)
        self.purse = Purse(snapshot.budgets, snapshot.price, self.cluster, snapshot.running, self.now)
        self.possible = Possible(self.cluster)
        self.search = Search(self.ground, self._tally)
        self.claimants = Claimants(self)
        self.quota_heads: dict[str, Request] = {}
        self.strands: dict[str, list[Strand]] = {}
        self.taken: list[Turn] = []
        self._heaps: dict[str, list[tuple[Rank, Strand]]] = {}
        self._within, self._beyond = Line(), Line()
        self._no_room: dict[Shape, Reason] = {}
        self._started = self._sought = 0

    @property
    def head(self) -> Reservation | None:
        return self.ground.head

    # ------------------------------------------------------------------------------------------ the order

    def take_all(self) -> Turns:
        for _ in self.each_turn():
            pass
        return self

    def take_until(self, job: Request) -> bool:
        """Whether the job's turn is next now; not if a job like it, ahead of it in its queue, was refused."""
        shape = shape_of(job)
        for request in self.each_turn():
            if request.job == job.job:
                return True
            strands = self.strands.get(job.queue, ()) if not job.claim else ()
            if any(strand.refused and strand.shape == shape for strand in strands):
                return False
        return False

    def would_start(self, job: Request) -> bool:
        """Whether the job, whose turn is next, starts."""
        leaf = self.branches.leaves.get(job.queue)
        return isinstance(self.judge(job, leaf, total(job), shape_of(job)), list)

    def each_turn(self) -> Iterator[Request]:
        """The job whose turn is next, before it is taken."""
        yield from self.claimants.each_turn()
        for queue, groups in self.backlog.queues.items():
            leaf = self.branches.leaves.get(queue)
            if leaf is not None:
                self._line_up(queue, leaf, groups)
        while True:
            line, leaf = self._within, self._within.first()
            if leaf is None:
                line, leaf = self._beyond, self._beyond.first()
            if leaf is None:
                return
            yield from self._turn_of(leaf, line)

    def _line_up(self, queue: str, leaf: Branch, groups: dict[Shape, Group]) -> None:
        strands = [Strand(leaf, shape, group) for shape, group in groups.items()]
        self.strands[queue] = strands
        self._heaps[leaf.name] = heap = [(strand.group[0][0], strand) for strand in strands]
        heapify(heap)
        self._within.join(leaf)

    def _turn_of(self, leaf: Branch, line: Line) -> Iterator[Request]:
        heap = self._heaps[leaf.name]
        strand = heap[0][1]
        beyond = borrows(leaf, strand.asked)
        if beyond and line is self._within:
            self._move(leaf, self._within, self._beyond)
            return
        request = strand.group[strand.done][1]
        yield request
        decisions = self._take(request, strand)
        self.note(leaf.queue.name, heap[0][0], decisions)
        strand.done += 1
        if strand.refused or strand.done == len(strand.group):
            heappop(heap)
        else:
            heapreplace(heap, (strand.group[strand.done][0], strand))
        if not heap:
            line.leave(leaf)
            self.note(leaf.queue.name, None, ())
        elif line is self._beyond and not borrows(leaf, heap[0][1].asked):
            self._move(leaf, self._beyond, self._within)

    def _move(self, leaf: Branch, there: Line, here: Line) -> None:
        there.leave(leaf)
        here.join(leaf)

    # --------------------------------------------------------------------------------------- one decision

    def _take(self, request: Request, strand: Strand) -> tuple[Decision, ...]:
        found = self.judge(request, strand.leaf, strand.asked, strand.shape)
        if isinstance(found, list):
            return (self.start(request, strand.leaf, strand.asked, found),)
        leaving = self.claimants.evict_for(request, strand.leaf, strand.asked, found)
        if leaving:
            return (*leaving, Wait(job=request.job, reason=Reason.PREEMPTING))
        strand.refused = found
        self.keep_for(request, strand.leaf, strand.asked, found)
        return (Wait(job=request.job, reason=found),)

    def judge(
        self, request: Request, leaf: Branch | None, asked: Amount, shape: Shape
    ) -> list[Spot] | Reason:
        """Where the job can start now, or why it cannot; changes nothing but what is remembered."""
        if leaf is None:
            return Reason.NO_QUEUE
        allowed = allows(leaf, asked) and (request.preemptible or not borrows(leaf, asked))
        affords = self.purse.affords(request)
        if allowed and affords and shape not in self._no_room:
            spots = self._room(request)
            if spots is not None:
                return spots
            self._no_room[shape] = self._why_no_room(request)
        never = self.possible.never(request, leaf, asked, shape)
        if never:
            return never
        if not affords:
            return Reason.BUDGET
        return self._no_room[shape] if allowed else Reason.QUOTA

    def passes(self, request: Request) -> bool:
        """Whether it may take what is kept for the head, since it is over in time."""
        return self.head is not None and self.head.lets_pass(request, self.now)

    def _room(self, request: Request) -> list[Spot] | None:
        permitted = self.cluster.permitted(request)
        ground, suits = self.ground, permitted
        if self.company.matters(request):
            suits = self.company.suits(request, permitted)
        passes = self.passes(request)
        if request.replicas > 1 or request.affinity.island is not None or suits is not permitted:
            return place(request, ground.free if passes else ground.open, suits, self.cluster)
        spot = self.search.one(request, permitted)
        if spot is not None:
            return [spot]
        if passes and self.head is not None:
            nodes = sorted(self.head.then.keys() & set(permitted))
            return place(request, ground.free, nodes, self.cluster)
        return None

    def _why_no_room(self, request: Request) -> Reason:
        permitted, ground = self.cluster.permitted(request), self.ground
        view = ground.free if self.passes(request) else ground.open
        if self.company.matters(request) and place(request, view, permitted, self.cluster):
            return Reason.AFFINITY
        kept = self.head is not None or bool(self.claimants.promises.open)
        return (
            Reason.RESERVED
            if kept and place(request, ground.raw, permitted, self.cluster)
            else Reason.CAPACITY
        )

    def start(self, request: Request, leaf: Branch, asked: Amount, spots: list[Spot]) -> Start:
        view = self.ground.free if self.passes(request) else self.ground.open
        where = placements(request, spots, view, self.cluster)
        start = Start(job=request.job, placements=where, borrows=borrows(leaf, asked))
        self.hold(request, leaf, asked, start)
        return start

    def note(self, queue: str, rank: Rank | None, decisions: tuple[Decision, ...]) -> None:
        self.taken.append(Turn(queue, rank, decisions))

    def hold(
        self, request: Request, leaf: Branch, asked: Amount, start: Start, *, paid: bool = False
    ) -> None:
        ends_by = END_OF_TIME if request.time_limit is None else self.now + request.time_limit
        on = self.cluster.slots_of(request, start.placements)
        self._started += 1  # who starts later is younger, also within a round
        started_at = self.now + self._started * MOMENT
        held = Held(ends_by, started_at, rank(request), request, asked, on, start.borrows)
        self.held.append(held)
        self.claimants.stays(request)
        self.branches.hold(held)
        self.ground.hold(held)
        self.company.hold(held)
        if not paid:
            self.purse.spend(request)
        self._within.changed(leaf)
        self._beyond.changed(leaf)

    def keep_for(self, request: Request, leaf: Branch, asked: Amount, reason: Reason) -> None:
        """Keep a place for the first that waits for nodes, and quota for the first that waits for it in a branch."""
        if reason in WAITS_FOR_NODES and self.head is None and self._sought < MOST_SOUGHT:
            self._sought += 1
            head = reserve(request, self.ground, self._in_the_way_of(leaf, asked), self.now)
            if head is not None:
                self.ground.keep(head)
                keep_quota(leaf, asked, borrows=borrows(leaf, asked))
        elif reason is Reason.QUOTA:
            self._keep_quota(request, leaf, asked)

    def _in_the_way_of(self, leaf: Branch, asked: Amount) -> list[Held]:
        """Those that run, of whom a job can expect that they leave their places to it.

        One that borrows cannot expect that of what others hold within their quotas and take again at once: nodes kept
        for it would stand idle as long as their jobs come, and everybody behind it would wait for ever.
        """
        settled = self.claimants.settled()
        if not borrows(leaf, asked):
            return settled
        return [held for held in settled if held.borrows or not self._is_taken_again(held, leaf)]

    def _is_taken_again(self, held: Held, asking: Branch) -> bool:
        """Whether a job of the same queue waits that is within its quota once this one is over."""
        leaf = self.branches.leaves.get(held.request.queue)
        if leaf is None or leaf is asking:
            return False
        return any(
            all(each.quota.holds(each.own.used.less(held.amount), strand.asked) for each in leaf.path)
            for strand in self.strands.get(held.request.queue, ())
            if self._comes_later(strand)
        )

    def _comes_later(self, strand: Strand) -> bool:
        """Whether jobs of the strand wait for nothing but their turn and quota."""
        if strand.refused is None and strand.done == len(strand.group):
            return False
        request = strand.group[-1][1]
        return (
            strand.refused in (None, Reason.QUOTA)
            and self.purse.affords(request)
            and self.possible.never(request, strand.leaf, strand.asked, strand.shape) is None
        )

    def _keep_quota(self, request: Request, leaf: Branch, asked: Amount) -> None:
        short = [branch.lacks(asked, borrowing=request.preemptible) for branch in leaf.path]
        highest = max(level for level, lack in enumerate(short) if lack)
        beyond = request.preemptible and borrows(leaf, asked)
        for level, branch in enumerate(leaf.path[: highest + 1]):
            if branch.name not in self.quota_heads:
                keep_quota_at(branch, asked, borrows=beyond)
                if short[level]:
                    self.quota_heads[branch.name] = request

    def _tally(self) -> Iterator[tuple[Request, int]]:
        """The jobs that wait and run, alike ones together."""
        for groups in self.backlog.queues.values():
            for group in groups.values():
                yield group[0][1], len(group)
        for _, request in self.backlog.claims:
            yield request, 1
        for running in self.snapshot.running:
            yield running.request, 1
