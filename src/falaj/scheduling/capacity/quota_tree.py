"""The tree of queues while decisions are made: what each holds and keeps, and how much of a share that is.

A job is within its quota if that holds it beside the other jobs that are: those that borrow do not count, for they are
the ones that make room. The limit counts everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from falaj.records.scheduling.snapshot import Queue
from falaj.scheduling.capacity.resources import NOTHING, UNLIMITED, Allocation, ResourceAmount, quota_amount

BOUNDLESS = ResourceAmount(UNLIMITED, UNLIMITED, UNLIMITED)


class QuotaUsage:
    """What some jobs of a branch hold and keep.

    `held` is what running jobs hold; `used` is that and what is kept for jobs that wait. `shift` is what will be added
    to it once those that leave are gone and those that they leave for have started.
    """

    def __init__(self) -> None:
        self.held = self.used = self.shift = NOTHING

    @property
    def then(self) -> ResourceAmount:
        """What is used once those that leave are gone."""
        return self.used if self.shift is NOTHING else self.used.plus(self.shift)

    def leaves(self, bound: ResourceAmount, asked: ResourceAmount) -> bool:
        """Whether `asked` fits in `bound` beside it, now and once those that leave are gone."""
        if not bound.holds(self.used, asked):
            return False
        return self.shift is NOTHING or bound.holds(self.used.plus(self.shift), asked)

    def hold(self, amount: ResourceAmount, *, leaving: bool) -> None:
        self.held = self.held.plus(amount)
        self.used = self.used.plus(amount)
        if leaving:
            self.shift = self.shift.less(amount)


class QuotaNode:
    """A queue, with all below it. `all` counts all its jobs, `own` those that are within their quota."""

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
        """The lower, the earlier its turn: its share of the whole in the resource of which it holds most."""
        shares = [held / there for held, there in zip(self.all.held, self.whole, strict=True) if there]
        return (max(shares, default=0.0) + self.history) / self.weight

    def accounts(self, *, borrows: bool) -> tuple[QuotaUsage, ...]:
        """Those in which a job counts."""
        return (self.all,) if borrows else (self.all, self.own)

    def lacks(self, asked: ResourceAmount, *, borrowing: bool) -> tuple[QuotaUsage, ResourceAmount] | None:
        """The account and the bound that leave no room for so much; none: there is room."""
        if not borrowing and not self.own.leaves(self.quota, asked):
            return self.own, self.quota
        return None if self.all.leaves(self.limit, asked) else (self.all, self.limit)

    def below(self) -> Iterator[QuotaNode]:
        """The leaves."""
        if not self.children:
            yield self
        for child in self.children:
            yield from child.below()


class QuotaTree:
    """All queues of a snapshot. A queue whose parent is not there, or stands below it, stands at the top."""

    def __init__(self, queues: Iterable[Queue], whole: ResourceAmount) -> None:
        self.all = {queue.name: QuotaNode(queue, whole) for queue in sorted(queues, key=lambda q: q.name)}
        for node in self.all.values():
            parent = self.all.get(node.queue.parent or "")
            if parent is not None and node not in upward(parent):
                node.parent = parent
                parent.children.append(node)
        self.leaves = {name: self._leaf(node, whole) for name, node in self.all.items()}
        for leaf in self.leaves.values():
            leaf.path = tuple(upward(leaf))
        self.tops = [node for node in self.all.values() if node.parent is None]

    def hold(self, held: Allocation) -> None:
        """Count a running job; one in a queue that is not there counts for none."""
        leaf = self.leaves.get(held.request.queue)
        if leaf is None:
            return
        leaf.jobs.append(held)
        for node in leaf.path:
            for account in node.accounts(borrows=held.borrows):
                account.hold(held.amount, leaving=held.leaving)

    def _leaf(self, node: QuotaNode, whole: ResourceAmount) -> QuotaNode:
        """The queue itself, or for an inner one a leaf beside its children that stands for its own jobs.

        The quota of that leaf is what the children's quotas leave: more is borrowed from them.
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


def upward(leaf: QuotaNode) -> Iterator[QuotaNode]:
    """The leaf and all above it."""
    node: QuotaNode | None = leaf
    while node is not None:
        yield node
        node = node.parent


# -------------------------------------------------------------------------------------------------- quotas


def is_within_limits(leaf: QuotaNode, asked: ResourceAmount) -> bool:
    """Whether the limits along the path let so much more be held."""
    return all(node.all.leaves(node.limit, asked) for node in leaf.path)


def exceeds_quota(leaf: QuotaNode, asked: ResourceAmount) -> bool:
    """Whether so much goes beyond the quota of the queue, or of one above it, beside what does not borrow there."""
    return not all(node.own.leaves(node.quota, asked) for node in leaf.path)


def fits_empty_quota(leaf: QuotaNode, asked: ResourceAmount, *, borrowing: bool) -> bool:
    """Whether so much could be held if nothing ran."""
    return all((each.limit if borrowing else each.quota).holds(NOTHING, asked) for each in leaf.path)


def reserve_quota(leaf: QuotaNode, asked: ResourceAmount, *, borrows: bool) -> None:
    """Keep `asked` along the path for a job that waits for something else."""
    for node in leaf.path:
        for account in node.accounts(borrows=borrows):
            account.used = account.used.plus(asked)


def reserve_quota_at(node: QuotaNode, asked: ResourceAmount, *, borrows: bool) -> None:
    """Keep `asked` for a job that waits for quota here: others take what it can spare, now and then.

    "Then" is when the oldest jobs of the branch are over, as many as it takes.
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
