"""The constraint that binds a waiting job, with the figures that show it."""

from __future__ import annotations

from collections.abc import Sequence

from falaj.records.scheduling.snapshot import WHOLE_GPU, Reason, Request
from falaj.scheduling.deciding.branches import Account, Branch
from falaj.scheduling.deciding.ledger import NOTHING, Amount, Slot, total
from falaj.scheduling.deciding.turns import Turns
from falaj.scheduling.deciding.words import UNITS, asked, figure, free, places, several
from falaj.scheduling.placing.placement import capacity


def in_words(reason: Reason, request: Request, turns: Turns, leaving: Sequence[str]) -> str:
    """`turns` stands just before the job's own turn; `leaving` are the jobs that make room for it now."""
    if reason is Reason.PREEMPTING:
        return making_room(request, leaving)
    say = {
        Reason.CAPACITY: busy_nodes,
        Reason.RESERVED: kept_for_others,
        Reason.QUOTA: used_quota,
        Reason.AFFINITY: unwanted_nodes,
        Reason.BUDGET: spent_budget,
        Reason.TOPOLOGY: no_island,
        Reason.RESIDENCY: forbidden_nodes,
        Reason.TOO_LARGE: too_large,
        Reason.NO_QUEUE: no_queue,
    }
    return say[reason](request, turns)


def busy_nodes(request: Request, turns: Turns) -> str:
    head = "" if turns.head else "; the next place is kept for it"
    view = turns.ground.free if turns.passes(request) else turns.ground.open
    return f"asks {asked(request)}; {shortage(request, view, turns)}{head}"


def kept_for_others(request: Request, turns: Turns) -> str:
    if turns.head is None:
        others = ", ".join(promise.request.job for promise in turns.claimants.promises.open)
        return f"asks {asked(request)}; what is free is promised to {others}, which others make room for"
    head, at = turns.head.head, turns.head.at
    since = f"from {at:%Y-%m-%d %H:%M:%S %Z} on" if at else "once jobs without a time limit end"
    return (
        f"asks {asked(request)}, and waits behind {head.job} (priority {head.priority}), "
        f"for which {places(turns.head.place)} is kept {since}"
    )


def making_room(request: Request, leaving: Sequence[str]) -> str:
    if not leaving:
        return f"asks {asked(request)}; others were told to make room, and it starts when they have left"
    return f"asks {asked(request)}; told to make room for it: {', '.join(sorted(leaving))}"


# -------------------------------------------------------------------------------------------------- quotas


def used_quota(request: Request, turns: Turns) -> str:
    branch, account, bound = short_of_quota(request, turns)
    what = "quota" if bound == branch.quota else "limit"
    rows = zip(UNITS, bound, account.held, in_use_and_kept(account), total(request), strict=True)
    parts = [
        quota_row(unit, most, used, kept, wish)
        for unit, most, used, kept, wish in rows
        if wish and kept + wish > most
    ]
    where = (
        branch.queue.name if branch.queue.name == request.queue else f"{branch.queue.name}, above its own,"
    )
    tail = "; a job that is not preemptible does not borrow" if account is branch.own else ""
    return f"the {what} of queue {where} is used up: " + "; ".join(parts) + tail


def short_of_quota(request: Request, turns: Turns) -> tuple[Branch, Account, Amount]:
    """The lowest branch that has not enough, of which bound; the queue itself if by now there is enough."""
    path, wish = turns.branches.leaves[request.queue].path, total(request)
    for branch in path:
        lack = branch.lacks(wish, borrowing=request.preemptible)
        if lack:
            return branch, *lack
    own = path[0]
    return (own, own.all, own.limit) if request.preemptible else (own, own.own, own.quota)


def bound_of(branch: Branch, request: Request) -> Amount:
    return branch.limit if request.preemptible else branch.quota


def in_use_and_kept(account: Account) -> Amount:
    return account.used.most(account.then)


def quota_row(unit: str, most: int, used: int, taken: int, wish: int) -> str:
    kept = f", {figure(taken - used, unit)} kept for jobs ahead" if taken > used else ""
    in_use = f"{figure(used, unit)} of {figure(most, unit)} in use{kept}"
    return f"{in_use}, and the job asks {figure(wish, unit)}"


def spent_budget(request: Request, turns: Turns) -> str:
    (hours, money), (needs, costs) = turns.purse.left(request), turns.purse.cost(request)
    parts = []
    if hours is not None:
        parts.append(f"{max(hours, 0):.4g} GPU-hours are left, and it needs up to {needs:.4g}")
    if money is not None:
        parts.append(f"{max(money, 0):.4g} in money is left, and it costs up to {costs:.4g}")
    return "the budget of its workspace does not cover it beside what runs: " + "; ".join(parts)


# --------------------------------------------------------------------------------------------------- nodes


def unwanted_nodes(request: Request, turns: Turns) -> str:
    affinity, nodes = request.affinity, turns.cluster.permitted(request)
    wishes = [
        f"in {' or '.join(sorted(affinity.pools))}" if affinity.pools else "",
        f"labelled {', '.join(sorted(affinity.labels))}" if affinity.labels else "",
        f"not labelled {', '.join(sorted(affinity.avoid))}" if affinity.avoid else "",
        f"beside {', '.join(sorted(affinity.near))}" if affinity.near else "",
        f"apart from {', '.join(sorted(affinity.apart))}" if affinity.apart else "",
        f"on {several(request.replicas, 'node')} of their own" if affinity.spread else "",
    ]
    wanted = ", ".join(wish for wish in wishes if wish) or "apart from jobs that keep away from its group"
    suiting = len(turns.company.suits(request, nodes))
    all_nodes = len(turns.cluster.nodes)
    return f"asks {asked(request)} {wanted}; {several(suiting, 'node')} of {all_nodes} will do"


def no_island(request: Request, turns: Turns) -> str:
    kind = {"nvlink": "one NVLink island", "rdma": "one RDMA fabric"}[request.affinity.island or "nvlink"]
    return f"asks {asked(request)} in {kind}, and none is so large, even when idle"


def forbidden_nodes(request: Request, turns: Turns) -> str:
    nodes, permitted = turns.cluster.nodes, turns.cluster.permitted(request)
    allowed = ", ".join(sorted(request.label.only or ())) or "nowhere"
    there = sorted({node.jurisdiction for node in nodes})
    if not permitted:
        return f"its data may lie only in {allowed}; the nodes are in {', '.join(there)}"
    return f"its data may lie only in {allowed}, where the nodes are too small even when idle: " + shortage(
        request, turns.cluster.idle, turns
    )


def too_large(request: Request, turns: Turns) -> str:
    wish = total(request)
    for branch in turns.branches.leaves[request.queue].path:
        bound = bound_of(branch, request)
        if not bound.holds(NOTHING, wish):
            over = [
                f"{figure(wished, unit)}, and queue {branch.queue.name} may hold {figure(most, unit)}"
                for unit, most, wished in zip(UNITS, bound, wish, strict=True)
                if wished > most
            ]
            tail = "" if request.preemptible else ", as a job that is not preemptible does not borrow"
            return "asks more than its queue may ever hold: " + "; ".join(over) + tail
    return f"asks {asked(request)}, more than there is: " + shortage(request, turns.cluster.idle, turns)


def no_queue(request: Request, turns: Turns) -> str:
    known = ", ".join(turns.branches.all) or "none"
    return f"there is no queue {request.queue}; the queues are: {known}"


def shortage(request: Request, slots: Sequence[Slot], turns: Turns) -> str:
    """How far the free nodes are from holding the job."""
    cluster, each = turns.cluster, request.each
    permitted = cluster.permitted(request)
    if not permitted:
        return "there are no nodes"
    if request.replicas > 1:
        fit = sum(capacity(slots[index], each, cluster.devices(index, each)) for index in permitted)
        return f"{fit} of {request.replicas} replicas fit"
    if each.gpu_milli < WHOLE_GPU and not any(cluster.nodes[index].shares for index in permitted):
        return "no node shares its GPUs"
    closest = max(permitted, key=lambda index: (closeness(request, slots[index], index, turns), -index))
    return f"the closest node, {cluster.nodes[closest].name}, has {free(slots[closest])}"


def closeness(request: Request, slot: Slot, index: int, turns: Turns) -> float:
    """The share of what a replica asks that is there, in the scarcest resource."""
    each = request.each
    shares = [slot.cpus / each.cpus]
    if each.gpus:
        shares.append((slot.gpus & turns.cluster.devices(index, each)).bit_count() / each.gpus)
    if each.memory_bytes:
        shares.append(slot.memory / each.memory_bytes)
    return min(shares)
