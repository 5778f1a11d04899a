"""The constraint that binds a waiting job, with the figures that show it."""

from __future__ import annotations

from collections.abc import Sequence

from falaj.records.scheduling import Reason, Request
from falaj.scheduling.decide import Turns
from falaj.scheduling.ledger import UNLIMITED, Slot, total
from falaj.scheduling.placement import capacity
from falaj.scheduling.words import asked, free, memory, places, several


def in_words(reason: Reason, request: Request, turns: Turns) -> str:
    """`turns` stands just before the job's own turn."""
    say = {
        Reason.CAPACITY: busy_nodes,
        Reason.RESERVED: kept_for_the_head,
        Reason.QUOTA: used_quota,
        Reason.RESIDENCY: forbidden_nodes,
        Reason.TOO_LARGE: too_large,
        Reason.NO_QUEUE: no_queue,
    }
    return say[reason](request, turns)


def busy_nodes(request: Request, turns: Turns) -> str:
    head = "" if turns.head else "; the next place is kept for it"
    return f"asks {asked(request)}; {shortage(request, turns.open_to(request), turns)}{head}"


def kept_for_the_head(request: Request, turns: Turns) -> str:
    if turns.head is None:
        raise ValueError("nothing is kept before there is a head")
    head, at = turns.head.head, turns.head.at
    since = f"from {at:%Y-%m-%d %H:%M:%S %Z} on" if at else "once jobs without a time limit end"
    return (
        f"asks {asked(request)}, and waits behind {head.job} (priority {head.priority}), "
        f"for which {places(turns.head.place)} is kept {since}"
    )


def used_quota(request: Request, turns: Turns) -> str:
    most, left = turns.quotas[request.queue], turns.left[request.queue]
    unused = most
    for held in turns.held:
        if held.queue == request.queue:
            unused = unused.less(held.amount)
    rows = zip(UNITS, most, unused, left, total(request), strict=True)
    parts = [quota_row(*row) for row in rows if row[-1] > row[-2] and row[-1]]
    return f"the quota of queue {request.queue} is used up: " + "; ".join(parts)


def quota_row(unit: str, most: int, unused: int, left: int, wish: int) -> str:
    kept = f", {figure(unused - left, unit)} kept for jobs ahead" if unused > left else ""
    used = f"{figure(most - unused, unit)} of {figure(most, unit)} in use{kept}"
    return f"{used}, and the job asks {figure(wish, unit)}"


def forbidden_nodes(request: Request, turns: Turns) -> str:
    nodes, permitted = turns.cluster.nodes, turns.cluster.permitted(request.label)
    allowed = ", ".join(sorted(request.label.only or ())) or "nowhere"
    there = sorted({node.jurisdiction for node in nodes})
    if not permitted:
        return f"its data may lie only in {allowed}; the nodes are in {', '.join(there)}"
    return f"its data may lie only in {allowed}, where the nodes are too small even when idle: " + shortage(
        request, turns.cluster.idle, turns
    )


def too_large(request: Request, turns: Turns) -> str:
    most, wish = turns.quotas[request.queue], total(request)
    over = [
        f"{figure(wished, unit)}, and queue {request.queue} may hold {figure(limit, unit)}"
        for unit, limit, wished in zip(UNITS, most, wish, strict=True)
        if wished > limit
    ]
    if over:
        return "asks more than its queue may ever hold: " + "; ".join(over)
    return f"asks {asked(request)}, more than there is: " + shortage(request, turns.cluster.idle, turns)


def no_queue(request: Request, turns: Turns) -> str:
    known = ", ".join(sorted(turns.quotas)) or "none"
    return f"there is no queue {request.queue}; the queues are: {known}"


# ------------------------------------------------------------------------------------------------ figures

UNITS = ("CPU", "GPU", "memory")


def figure(count: int, unit: str) -> str:
    if count >= UNLIMITED // 2:
        return "unlimited"
    return memory(count) if unit == "memory" else several(count, unit)


def shortage(request: Request, slots: Sequence[Slot], turns: Turns) -> str:
    """How far the free nodes are from holding the job."""
    permitted = turns.cluster.permitted(request.label)
    if not permitted:
        return "there are no nodes"
    if request.replicas > 1:
        fit = sum(capacity(slots[index], request.each) for index in permitted)
        return f"{fit} of {request.replicas} replicas fit"
    closest = max(permitted, key=lambda index: (closeness(request, slots[index]), -index))
    return f"the closest node, {turns.cluster.nodes[closest].name}, has {free(slots[closest])}"


def closeness(request: Request, slot: Slot) -> float:
    """The share of what a replica asks that is there, in the scarcest resource."""
    each = request.each
    shares = [slot.cpus / each.cpus]
    if each.gpus:
        shares.append(slot.gpus.bit_count() / each.gpus)
    if each.memory_bytes:
        shares.append(slot.memory / each.memory_bytes)
    return min(shares)
