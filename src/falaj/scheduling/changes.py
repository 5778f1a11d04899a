"""Single changes that would let a waiting job start now, each one tried before it is offered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta

from falaj.records.scheduling import HIGHEST_PRIORITY, Node, Quota, Reason, Request, Snapshot, Start
from falaj.scheduling.decide import Turns, in_order
from falaj.scheduling.ledger import UNLIMITED, total
from falaj.scheduling.words import amount, duration, several

Change = tuple[str, Snapshot]


def changes_that_start(snapshot: Snapshot, request: Request, reason: Reason, turns: Turns) -> tuple[str, ...]:
    """In words, what the person who asked can change, then what an operator can. Never a looser label.

    `turns` stands where the job had its turn.
    """
    return tuple(
        words
        for words, changed in candidates(snapshot, request, reason, turns)
        if starts(changed, request.job)
    )


def starts(snapshot: Snapshot, job: str) -> bool:
    turns = Turns(snapshot)
    for request in in_order(snapshot.pending):
        decision = turns.take(request)
        if decision.job == job:
            return isinstance(decision, Start)
    return False


def candidates(snapshot: Snapshot, request: Request, reason: Reason, turns: Turns) -> Iterator[Change]:
    if reason is Reason.NO_QUEUE:
        for name in sorted(turns.quotas):
            yield f"queue {name}", asking(snapshot, request, queue=name)
        return
    yield from smaller(snapshot, request)
    yield from sooner(snapshot, request, turns)
    if reason is not Reason.RESIDENCY:
        yield from more_quota(snapshot, request, turns)
    yield from more_nodes(snapshot, request)


def smaller(snapshot: Snapshot, request: Request) -> Iterator[Change]:
    """The most that still starts: fewer replicas, or fewer GPUs or CPUs in each."""
    each = request.each

    def replicas(count: int) -> Snapshot:
        return asking(snapshot, request, replicas=count)

    def gpus(count: int) -> Snapshot:
        return asking(snapshot, request, each=each.model_copy(update={"gpus": count}))

    def cpus(count: int) -> Snapshot:
        return asking(snapshot, request, each=each.model_copy(update={"cpus": count}))

    sizes: list[tuple[Callable[[int], Snapshot], int, str, str]] = [
        (replicas, request.replicas, "replica", ""),
        (gpus, each.gpus, "GPU", " a replica"),
        (cpus, each.cpus, "CPU", " a replica"),
    ]
    for change, asked, unit, per in sizes:
        most = largest(change, below=asked, job=request.job)
        if most:
            yield f"at most {several(most, unit)}{per}", change(most)


def largest(change: Callable[[int], Snapshot], *, below: int, job: str) -> int:
    """The largest count under `below` with which the job starts; 0 if there is none."""
    low, high = 0, below - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if starts(change(middle), job) else (low, middle - 1)
    return low


def sooner(snapshot: Snapshot, request: Request, turns: Turns) -> Iterator[Change]:
    """A time limit that ends before the head's moment; a priority above all who wait."""
    until = turns.head.at - turns.now if turns.head and turns.head.at else timedelta(0)
    gap = timedelta(seconds=until // timedelta(seconds=1))
    if gap and (request.time_limit is None or request.time_limit > gap):
        yield f"a time limit of at most {duration(gap)}", asking(snapshot, request, time_limit=gap)
    highest = max(other.priority for other in snapshot.pending)
    if highest < HIGHEST_PRIORITY and in_order(snapshot.pending)[0].job != request.job:
        yield f"a priority above {highest}", asking(snapshot, request, priority=highest + 1)


def more_quota(snapshot: Snapshot, request: Request, turns: Turns) -> Iterator[Change]:
    """Enough for this job beside what its queue uses and keeps."""
    queue = next(queue for queue in snapshot.queues if queue.name == request.queue)
    asked, left, most = total(request), turns.left[queue.name], turns.quotas[queue.name]
    enough = [limit + max(wish - free, 0) for limit, wish, free in zip(most, asked, left, strict=True)]
    cpus, gpus, memory = (None if figure >= UNLIMITED else figure for figure in enough)
    quota = Quota(cpus=cpus, gpus=gpus, memory_bytes=memory)
    if quota != queue.quota:
        queues = tuple(
            q.model_copy(update={"quota": quota}) if q.name == queue.name else q for q in snapshot.queues
        )
        yield (
            f"a quota of {amount(quota)} for queue {queue.name}",
            snapshot.model_copy(update={"queues": queues}),
        )


def more_nodes(snapshot: Snapshot, request: Request) -> Iterator[Change]:
    """One more node like one that is there; in a jurisdiction that the label permits."""
    for node in kinds(snapshot.nodes):
        for place in sorted(request.label.only or {node.jurisdiction}):
            extra = node.model_copy(update={"name": f"{node.name}-again"[-128:], "jurisdiction": place})
            where = "" if place == node.jurisdiction else f" in {place}"
            yield (
                f"one more node like {node.name}{where}",
                snapshot.model_copy(update={"nodes": (*snapshot.nodes, extra)}),
            )


def kinds(nodes: tuple[Node, ...]) -> list[Node]:
    """One node of each size, the smallest first."""
    found: dict[tuple[int, int, int], Node] = {}
    for node in sorted(nodes, key=lambda node: node.name):
        found.setdefault((len(node.gpus), node.cpus, node.memory_bytes), node)
    return [node for _, node in sorted(found.items())]


def asking(snapshot: Snapshot, request: Request, **other: object) -> Snapshot:
    """The snapshot in which the job asked for something else."""
    changed = request.model_copy(update=other)
    pending = tuple(changed if each.job == request.job else each for each in snapshot.pending)
    return snapshot.model_copy(update={"pending": pending})
