"""The tree of queues during a scheduling round: usage, reserved quota and fair-share score of each.

A job is within quota if the quota holds it beside the other jobs within quota. Borrowing jobs do not count, since they
are preempted first. The limit counts all jobs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from falaj.records.scheduling.snapshot import Queue
from falaj.scheduling.capacity.resources import (
    NOTHING,
    UNLIMITED,
    Allocation,
    ResourceAmount,
    dominant_share,
    quota_amount,
)
from falaj.scheduling.queue_tree import path_to_root

BOUNDLESS = ResourceAmount(UNLIMITED, UNLIMITED, UNLIMITED)


class QuotaUsage:
    """The usage of some jobs of a queue and all below it.

    `held` is what running jobs hold; `used` adds what is reserved for waiting jobs. `shift` is the change once the
    preemption victims have stopped and the nominated jobs have started.
    """

    def __init__(self) -> None:
        self.held = self.used = self.shift = NOTHING

    @property
    def then(self) -> ResourceAmount:
        """Return `used` once the victims have stopped."""
        return self.used if self.shift is NOTHING else self.used.plus(self.shift)

    def leaves(self, bound: ResourceAmount, asked: ResourceAmount) -> bool:
        """Return whether `asked` fits in `bound` in addition to this usage, now and once the victims have stopped."""
        if not bound.holds(self.used, asked):
            return False
        return self.shift is NOTHING or bound.holds(self.used.plus(self.shift), asked)

    def hold(self, amount: ResourceAmount, *, leaving: bool) -> None:
        self.held = self.held.plus(amount)
        self.used = self.used.plus(amount)
        if leaving:
            self.shift = self.shift.less(amount)


class QuotaNode:
    """A queue with all below it. `all` counts all its jobs, `own` those within quota."""

    def __init__(self, queue: Queue, whole: ResourceAmount) -> None:
        self.queue = queue
        self.name = queue.name
        self.quota = quota_amount(queue.quota)
        self.limit = self.quota if queue.limit is None else quota_amount(queue.limit)
        self.weight, self.history = queue.weight, queue.history
        self.whole = whole
        self.all, self.own = QuotaUsage(), QuotaUsage()
        self.parent: QuotaNode | None = None
        self.children: list[QuotaNode] = []
        self.jobs: list[Allocation] = []
        self.path: tuple[QuotaNode, ...] = ()

    @property
    def score(self) -> float:
        """Return the fair-share score: dominant share plus history, by weight. The lowest score goes first."""
        return (dominant_share(self.all.held, self.whole) + self.history) / self.weight

    def accounts(self, *, borrows: bool) -> tuple[QuotaUsage, ...]:
        """Return the usages in which a job counts."""
        return (self.all,) if borrows else (self.all, self.own)

    def lacks(self, asked: ResourceAmount, *, borrowing: bool) -> tuple[QuotaUsage, ResourceAmount] | None:
        """Return the usage and the bound that `asked` would exceed; None if it fits."""
        if not borrowing and not self.own.leaves(self.quota, asked):
            return self.own, self.quota
        return None if self.all.leaves(self.limit, asked) else (self.all, self.limit)

    def below(self) -> Iterator[QuotaNode]:
        """Yield the leaves of this subtree."""
        if not self.children:
            yield self
        for child in self.children:
            yield from child.below()


class QuotaTree:
    """All queues of a snapshot. A queue whose parent is unknown, or below itself, is a root."""

    def __init__(self, queues: Iterable[Queue], whole: ResourceAmount) -> None:
        self.all = {queue.name: QuotaNode(queue, whole) for queue in sorted(queues, key=lambda q: q.name)}
        for node in self.all.values():
            parent = self.all.get(node.queue.parent or "")
            if parent is not None and node not in path_to_root(parent, parent_of):
                node.parent = parent
                parent.children.append(node)
        self.leaves = {name: self._leaf(node, whole) for name, node in self.all.items()}
        for leaf in self.leaves.values():
            leaf.path = tuple(path_to_root(leaf, parent_of))
        self.tops = [node for node in self.all.values() if node.parent is None]

    def hold(self, held: Allocation) -> None:
        """Count a running job; one in an unknown queue counts nowhere."""
        leaf = self.leaves.get(held.request.queue)
        if leaf is None:
            return
        leaf.jobs.append(held)
        for node in leaf.path:
            for account in node.accounts(borrows=held.borrows):
                account.hold(held.amount, leaving=held.leaving)

    def _leaf(self, node: QuotaNode, whole: ResourceAmount) -> QuotaNode:
        """Return the queue itself, or for an inner queue an extra leaf that holds its own jobs.

        The quota of that leaf is what the children's quotas leave.
        """
        if not node.children:
            return node
        own = QuotaNode(Queue(name=node.name), whole)
        own.name = f"{node.name}/"
        own.quota = node.quota
        for child in node.children:
            given = [0 if figure >= UNLIMITED else figure for figure in child.quota]
            own.quota = own.quota.less(ResourceAmount(*given)).most(NOTHING)
        own.history = max(node.history - sum(child.history for child in node.children), 0.0)
        own.parent = node
        node.children.append(own)
        return own


def parent_of(node: QuotaNode) -> QuotaNode | None:
    return node.parent


# -------------------------------------------------------------------------------------------------- quotas


def is_within_limits(leaf: QuotaNode, asked: ResourceAmount) -> bool:
    """Return whether `asked` fits in the limits of the queue and all above it."""
    return all(node.all.leaves(node.limit, asked) for node in leaf.path)


def exceeds_quota(leaf: QuotaNode, asked: ResourceAmount) -> bool:
    """Return whether `asked` exceeds the quota of the queue or of one above it, so that the job would borrow."""
    return not all(node.own.leaves(node.quota, asked) for node in leaf.path)


def fits_empty_quota(leaf: QuotaNode, asked: ResourceAmount, *, borrowing: bool) -> bool:
    """Return whether `asked` would fit if no job ran."""
    return all((each.limit if borrowing else each.quota).holds(NOTHING, asked) for each in leaf.path)


def reserve_quota(leaf: QuotaNode, asked: ResourceAmount, *, borrows: bool) -> None:
    """Reserve `asked` in the queue and all above it for a job that waits for nodes."""
    for node in leaf.path:
        for account in node.accounts(borrows=borrows):
            account.used = account.used.plus(asked)


def reserve_quota_at(node: QuotaNode, asked: ResourceAmount, *, borrows: bool) -> None:
    """Reserve `asked` for a job that waits for quota of this queue; later jobs may only use the rest.

    The job is assumed to start when the oldest jobs of the subtree have ended, as many as it needs.
    """
    jobs = sorted((job for leaf in node.below() for job in leaf.jobs), key=lambda job: job.age)
    for account in node.accounts(borrows=borrows):
        bound, then = (node.limit if account is node.all else node.quota), account.used
        for job in jobs:
            if bound.holds(then, asked):
                break
            if account is node.all or not job.borrows:
                then = then.less(job.amount)
        account.used = account.used.most(then.plus(asked))
