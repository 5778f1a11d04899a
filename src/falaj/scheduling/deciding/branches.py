"""The tree of queues while decisions are made: what each holds and keeps, and how much of a share that is.

A job is within its quota if that holds it beside the other jobs that are: those that borrow do not count, for they are
the ones that make room. The limit counts everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from falaj.records.scheduling.snapshot import Queue
from falaj.scheduling.deciding.ledger import NOTHING, UNLIMITED, Amount, Held, bounds

BOUNDLESS = Amount(UNLIMITED, UNLIMITED, UNLIMITED)


class Account:
    """What some jobs of a branch hold and keep.

    `held` is what running jobs hold; `used` is that and what is kept for jobs that wait. `shift` is what will be added
    to it once those that leave are gone and those that they leave for have started.
    """

    def __init__(self) -> None:
        self.held = self.used = self.shift = NOTHING

    @property
    def then(self) -> Amount:
        """What is used once those that leave are gone."""
        return self.used if self.shift is NOTHING else self.used.plus(self.shift)

    def leaves(self, bound: Amount, asked: Amount) -> bool:
        """Whether `asked` fits in `bound` beside it, now and once those that leave are gone."""
        if not bound.holds(self.used, asked):
            return False
        return self.shift is NOTHING or bound.holds(self.used.plus(self.shift), asked)

    def hold(self, amount: Amount, *, leaving: bool) -> None:
        self.held = self.held.plus(amount)
        self.used = self.used.plus(amount)
        if leaving:
            self.shift = self.shift.less(amount)


class Branch:
    """A queue, with all below it. `all` counts all its jobs, `own` those that are within their quota."""

    def __init__(self, queue: Queue, whole: Amount) -> None:
        self.queue = queue
        self.name = queue.name
        self.quota = bounds(queue.quota)
        self.limit = self.quota if queue.limit is None else bounds(queue.limit)
        self.weight, self.history = queue.weight, queue.history
        self.whole = whole
        self.all, self.own = Account(), Account()
        self.parent: Branch | None = None
        self.children: list[Branch] = []
        self.jobs: list[Held] = []
        self.path: tuple[Branch, ...] = ()

    @property
    def score(self) -> float:
        """The lower, the earlier its turn: its share of the whole in the resource of which it holds most."""
        shares = [held / there for held, there in zip(self.all.held, self.whole, strict=True) if there]
        return (max(shares, default=0.0) + self.history) / self.weight

    def accounts(self, *, borrows: bool) -> tuple[Account, ...]:
        """Those in which a job counts."""
        return (self.all,) if borrows else (self.all, self.own)

    def lacks(self, asked: Amount, *, borrowing: bool) -> tuple[Account, Amount] | None:
        """The account and the bound that leave no room for so much; none: there is room."""
        if not borrowing and not self.own.leaves(self.quota, asked):
            return self.own, self.quota
        return None if self.all.leaves(self.limit, asked) else (self.all, self.limit)

    def below(self) -> Iterator[Branch]:
        """The leaves."""
        if not self.children:
            yield self
        for child in self.children:
            yield from child.below()


class Branches:
    """All queues of a snapshot. A queue whose parent is not there, or stands below it, stands at the top."""

    def __init__(self, queues: Iterable[Queue], whole: Amount) -> None:
        self.all = {queue.name: Branch(queue, whole) for queue in sorted(queues, key=lambda q: q.name)}
        for branch in self.all.values():
            parent = self.all.get(branch.queue.parent or "")
            if parent is not None and branch not in upward(parent):
                branch.parent = parent
                parent.children.append(branch)
        self.leaves = {name: self._leaf(branch, whole) for name, branch in self.all.items()}
        for leaf in self.leaves.values():
            leaf.path = tuple(upward(leaf))
        self.tops = [branch for branch in self.all.values() if branch.parent is None]

    def hold(self, held: Held) -> None:
        """Count a running job; one in a queue that is not there counts for none."""
        leaf = self.leaves.get(held.request.queue)
        if leaf is None:
            return
        leaf.jobs.append(held)
        for branch in leaf.path:
            for account in branch.accounts(borrows=held.borrows):
                account.hold(held.amount, leaving=held.leaving)

    def _leaf(self, branch: Branch, whole: Amount) -> Branch:
        """The queue itself, or for an inner one a leaf beside its children that stands for its own jobs.

        The quota of that leaf is what the children's quotas leave: more is borrowed from them.
        """
        if not branch.children:
            return branch
        own = Branch(Queue(name=branch.name), whole)
        own.name = f"{branch.name}/"
        own.quota = branch.quota
        for child in branch.children:
            given = [0 if figure >= UNLIMITED else figure for figure in child.quota]
            own.quota = own.quota.less(Amount(*given)).most(NOTHING)
        own.history = max(branch.history - sum(child.history for child in branch.children), 0.0)
        own.parent = branch
        branch.children.append(own)
        return own


def upward(leaf: Branch) -> Iterator[Branch]:
    """The leaf and all above it."""
    branch: Branch | None = leaf
    while branch is not None:
        yield branch
        branch = branch.parent


# -------------------------------------------------------------------------------------------------- quotas


def allows(leaf: Branch, asked: Amount) -> bool:
    """Whether the limits along the path let so much more be held."""
    return all(branch.all.leaves(branch.limit, asked) for branch in leaf.path)


def borrows(leaf: Branch, asked: Amount) -> bool:
    """Whether so much goes beyond the quota of the queue, or of one above it, beside what does not borrow there."""
    return not all(branch.own.leaves(branch.quota, asked) for branch in leaf.path)


def could_hold(leaf: Branch, asked: Amount, *, borrowing: bool) -> bool:
    """Whether so much could be held if nothing ran."""
    return all((each.limit if borrowing else each.quota).holds(NOTHING, asked) for each in leaf.path)


def keep_quota(leaf: Branch, asked: Amount, *, borrows: bool) -> None:
    """Keep `asked` along the path for a job that waits for something else."""
    for branch in leaf.path:
        for account in branch.accounts(borrows=borrows):
            account.used = account.used.plus(asked)


def keep_quota_at(branch: Branch, asked: Amount, *, borrows: bool) -> None:
    """Keep `asked` for a job that waits for quota here: others take what it can spare, now and then.

    "Then" is when the oldest jobs of the branch are over, as many as it takes.
    """
    jobs = sorted((job for leaf in branch.below() for job in leaf.jobs), key=lambda job: job.age)
    for account in branch.accounts(borrows=borrows):
        bound, then = (branch.limit if account is branch.all else branch.quota), account.used
        for job in jobs:
            if bound.holds(then, asked):
                break
            if account is branch.all or not job.borrows:
                then = then.less(job.amount)
        account.used = account.used.most(then.plus(asked))
