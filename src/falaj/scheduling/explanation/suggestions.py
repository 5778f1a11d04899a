"""Single changes that would start a waiting job now, each verified by a trial round."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta

from falaj.records.scheduling.snapshot import (
    HIGHEST_PRIORITY,
    WHOLE_GPU,
    Affinity,
    Node,
    Queue,
    Quota,
    Reason,
    Request,
    Snapshot,
)
from falaj.scheduling.capacity.budget_ledger import HOUR
from falaj.scheduling.capacity.cluster import Cluster
from falaj.scheduling.capacity.quota_tree import QuotaUsage
from falaj.scheduling.capacity.resources import UNLIMITED, ResourceAmount, requested_amount
from falaj.scheduling.decision.backlog import Backlog
from falaj.scheduling.decision.scheduling_round import SchedulingRound
from falaj.scheduling.explanation.constraints import short_of_quota, used_and_reserved
from falaj.scheduling.explanation.formatting import count_of, format_duration, format_resources

MOST_CORDONED = 5

Starts = bool
Change = tuple[str, Starts]


class ChangeTrials:
    """Scheduling rounds with one thing changed. They share one sorted backlog."""

    def __init__(self, snapshot: Snapshot, request: Request, backlog: Backlog, cluster: Cluster) -> None:
        self.snapshot, self.request = snapshot, request
        self._backlog, self._cluster = backlog, cluster

    def with_request(self, **other: object) -> Starts:
        """Return whether the job would start now with another request."""
        changed = self.request.model_copy(update=other)
        self._backlog.remove(self.request)
        self._backlog.add(changed)
        try:
            return self._starts(self.snapshot, changed, self._cluster)
        finally:
            self._backlog.remove(changed)
            self._backlog.add(self.request)

    def with_snapshot(self, **other: object) -> Starts:
        """Return whether the job would start now in another snapshot."""
        cluster = None if "nodes" in other else self._cluster
        return self._starts(self.snapshot.model_copy(update=other), self.request, cluster)

    def _starts(self, snapshot: Snapshot, request: Request, cluster: Cluster | None) -> Starts:
        scheduling_round = SchedulingRound(snapshot, self._backlog, cluster)
        return scheduling_round.advance_to(request) and scheduling_round.would_start(request)


def starting_changes(
    trials: ChangeTrials, reason: Reason, scheduling_round: SchedulingRound
) -> tuple[str, ...]:
    """Return changes that the submitter can make, then those that an operator can. Never a looser residency label.

    `scheduling_round` is advanced to the job's decision. A job for which others are preempted needs no change.
    """
    if reason is Reason.PREEMPTING or trials.request.claim:
        return ()
    return tuple(words for words, starts in candidates(trials, reason, scheduling_round) if starts)


def candidates(trials: ChangeTrials, reason: Reason, scheduling_round: SchedulingRound) -> Iterator[Change]:
    if reason is Reason.NO_QUEUE:
        for name in scheduling_round.quota_tree.all:
            yield f"queue {name}", trials.with_request(queue=name)
        return
    if reason is Reason.BUDGET:
        yield from within_budget(trials, scheduling_round)
    yield from smaller_request(trials)
    yield from shorter_or_higher_priority(trials, scheduling_round)
    yield from looser_placement(trials)
    if reason is not Reason.RESIDENCY:
        yield from more_quota(trials, scheduling_round)
    yield from uncordoned_node(trials)
    yield from more_nodes(trials)


# ------------------------------------------------------------------------------------------- of the job


def smaller_request(trials: ChangeTrials) -> Iterator[Change]:
    """Yield the largest request that starts, with fewer replicas, or fewer GPUs or CPUs per replica."""
    request, each = trials.request, trials.request.each

    def replicas(count: int) -> Starts:
        return trials.with_request(replicas=count)

    def gpus(count: int) -> Starts:
        return trials.with_request(each=each.model_copy(update={"gpus": count}))

    def cpus(count: int) -> Starts:
        return trials.with_request(each=each.model_copy(update={"cpus": count}))

    sizes: list[tuple[Callable[[int], Starts], int, str, str]] = [
        (replicas, request.replicas, "replica", ""),
        (gpus, each.gpus, "GPU", " per replica"),
        (cpus, each.cpus, "CPU", " per replica"),
    ]
    for starts_with, asked, unit, per in sizes:
        most = largest(starts_with, below=asked)
        if most:
            yield f"at most {count_of(most, unit)}{per}", starts_with(most)


def largest(starts_with: Callable[[int], Starts], *, below: int) -> int:
    """Return the largest count under `below` with which the job starts; 0 if there is none."""
    low, high = 0, below - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if starts_with(middle) else (low, middle - 1)
    return low


def shorter_or_higher_priority(trials: ChangeTrials, scheduling_round: SchedulingRound) -> Iterator[Change]:
    """Yield a time limit that ends before the head's reservation, and the highest priority of the queue."""
    request = trials.request
    until = (
        scheduling_round.head.at - scheduling_round.now
        if scheduling_round.head and scheduling_round.head.at
        else timedelta(0)
    )
    gap = timedelta(seconds=until // timedelta(seconds=1))
    if gap and (request.time_limit is None or request.time_limit > gap):
        yield f"a time limit of at most {format_duration(gap)}", trials.with_request(time_limit=gap)
    queue = scheduling_round.backlog.queues[request.queue]
    first = min(group[0] for group in queue.values())
    highest = max(group[0][1].priority for group in queue.values())
    if highest < HIGHEST_PRIORITY and first[1].job != request.job:
        yield f"a priority above {highest}", trials.with_request(priority=highest + 1)


def looser_placement(trials: ChangeTrials) -> Iterator[Change]:
    """Yield a request without island or affinity, and one that may borrow."""
    affinity = trials.request.affinity
    if affinity.island:
        without = affinity.model_copy(update={"island": None})
        yield "no requirement for one island", trials.with_request(affinity=without)
    elif affinity != Affinity():
        yield "no node affinity", trials.with_request(affinity=Affinity())
    if not trials.request.preemptible:
        yield "making it preemptible, so that it may borrow", trials.with_request(preemptible=True)


def within_budget(trials: ChangeTrials, scheduling_round: SchedulingRound) -> Iterator[Change]:
    """Yield a time limit that the rest of the budget covers."""
    request = trials.request
    left, costs = scheduling_round.budget_ledger.left(request), scheduling_round.budget_ledger.cost(request)
    if request.time_limit is not None:
        hours = request.time_limit / HOUR
        most = min(
            [has * hours / cost for has, cost in zip(left, costs, strict=True) if has is not None and cost]
        )
        span = timedelta(seconds=int(max(most, 0) * 3600))
        if timedelta(0) < span < request.time_limit:
            yield f"a time limit of at most {format_duration(span)}", trials.with_request(time_limit=span)


# -------------------------------------------------------------------------------------- of the platform


def more_quota(trials: ChangeTrials, scheduling_round: SchedulingRound) -> Iterator[Change]:
    """Yield a quota or limit that is large enough, for its queue or the lowest one above that has too little left."""
    request = trials.request
    branch, account, bound = short_of_quota(request, scheduling_round)
    queue = branch.queue
    quota = enough_for(request, account, bound)
    named = "quota" if queue.limit is None or account is branch.own else "limit"
    if quota != (queue.quota if named == "quota" else queue.limit):
        changed: tuple[Queue, ...] = tuple(
            each.model_copy(update={named: quota}) if each.name == queue.name else each
            for each in trials.snapshot.queues
        )
        yield (
            f"a {named} of {format_resources(quota)} for queue {queue.name}",
            trials.with_snapshot(queues=changed),
        )


def enough_for(request: Request, account: QuotaUsage, bound: ResourceAmount) -> Quota:
    rows = zip(bound, used_and_reserved(account), requested_amount(request), strict=True)
    most = [max(bound, used + wish) if wish else bound for bound, used, wish in rows]
    cpus, gpus, memory = (None if figure >= UNLIMITED else figure for figure in most)
    return Quota(cpus=cpus, gpus=None if gpus is None else -(-gpus // WHOLE_GPU), memory_bytes=memory)


def uncordoned_node(trials: ChangeTrials) -> Iterator[Change]:
    """Yield the cordoned nodes that the job would start on, a few of them."""
    nodes = trials.snapshot.nodes
    for node in sorted((node for node in nodes if node.cordoned), key=lambda node: node.name)[:MOST_CORDONED]:
        opened = node.model_copy(update={"cordoned": False})
        others = tuple(opened if each is node else each for each in nodes)
        yield f"node {node.name} uncordoned", trials.with_snapshot(nodes=others)


def more_nodes(trials: ChangeTrials) -> Iterator[Change]:
    """Yield one more node of each kind, in a jurisdiction that the label permits."""
    for node in kinds(trials.snapshot.nodes):
        for place in sorted(trials.request.label.only or {node.jurisdiction}):
            other = {
                "name": f"{node.name}-again"[-128:],
                "jurisdiction": place,
                "cordoned": False,
                "others": None,
            }
            extra = node.model_copy(update=other)
            where = "" if place == node.jurisdiction else f" in {place}"
            yield (
                f"one more node like {node.name}{where}",
                trials.with_snapshot(nodes=(*trials.snapshot.nodes, extra)),
            )


def kinds(nodes: tuple[Node, ...]) -> list[Node]:
    """Return one node of each size and pool, the smallest first."""
    found: dict[tuple[object, ...], Node] = {}
    for node in sorted(nodes, key=lambda node: (len(node.gpus), node.cpus, node.memory_bytes, node.name)):
        models = tuple(sorted({gpu.model for gpu in node.gpus}))
        found.setdefault((len(node.gpus), node.cpus, node.memory_bytes, models, node.pool), node)
    return list(found.values())
