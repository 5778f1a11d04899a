"""The constraint that binds a waiting job, with the figures that show it."""

from __future__ import annotations

from collections.abc import Sequence

from falaj.records.scheduling.snapshot import WHOLE_GPU, Reason, Request
from falaj.scheduling.capacity.quota_tree import QuotaNode, QuotaUsage
from falaj.scheduling.capacity.resources import NOTHING, NodeResources, ResourceAmount, requested_amount
from falaj.scheduling.decision.scheduling_round import SchedulingRound
from falaj.scheduling.explanation.formatting import (
    UNITS,
    count_of,
    format_amount,
    format_free,
    format_nodes,
    format_request,
)
from falaj.scheduling.placement.gang_placement import capacity


def describe_reason(
    reason: Reason, request: Request, scheduling_round: SchedulingRound, leaving: Sequence[str]
) -> str:
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
    return say[reason](request, scheduling_round)


def busy_nodes(request: Request, scheduling_round: SchedulingRound) -> str:
    head = "" if scheduling_round.head else "; the next place is kept for it"
    view = (
        scheduling_round.capacity_now.free
        if scheduling_round.passes(request)
        else scheduling_round.capacity_now.open
    )
    return f"asks {format_request(request)}; {shortage(request, view, scheduling_round)}{head}"


def kept_for_others(request: Request, scheduling_round: SchedulingRound) -> str:
    if scheduling_round.head is None:
        others = ", ".join(
            nomination.request.job for nomination in scheduling_round.preemption_claims.nominations.open
        )
        return f"asks {format_request(request)}; what is free is promised to {others}, which others make room for"
    head, at = scheduling_round.head.head, scheduling_round.head.at
    since = f"from {at:%Y-%m-%d %H:%M:%S %Z} on" if at else "once jobs without a time limit end"
    return (
        f"asks {format_request(request)}, and waits behind {head.job} (priority {head.priority}), "
        f"for which {format_nodes(scheduling_round.head.place)} is kept {since}"
    )


def making_room(request: Request, leaving: Sequence[str]) -> str:
    if not leaving:
        return f"asks {format_request(request)}; others were told to make room, and it starts when they have left"
    return f"asks {format_request(request)}; told to make room for it: {', '.join(sorted(leaving))}"


# -------------------------------------------------------------------------------------------------- quotas


def used_quota(request: Request, scheduling_round: SchedulingRound) -> str:
    branch, account, bound = short_of_quota(request, scheduling_round)
    what = "quota" if bound == branch.quota else "limit"
    rows = zip(UNITS, bound, account.held, in_use_and_kept(account), requested_amount(request), strict=True)
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


def short_of_quota(
    request: Request, scheduling_round: SchedulingRound
) -> tuple[QuotaNode, QuotaUsage, ResourceAmount]:
    """The lowest branch that has not enough, of which bound; the queue itself if by now there is enough."""
    path, wish = scheduling_round.quota_tree.leaves[request.queue].path, requested_amount(request)
    for branch in path:
        lack = branch.lacks(wish, borrowing=request.preemptible)
        if lack:
            return branch, *lack
    own = path[0]
    return (own, own.all, own.limit) if request.preemptible else (own, own.own, own.quota)


def bound_of(branch: QuotaNode, request: Request) -> ResourceAmount:
    return branch.limit if request.preemptible else branch.quota


def in_use_and_kept(account: QuotaUsage) -> ResourceAmount:
    return account.used.most(account.then)


def quota_row(unit: str, most: int, used: int, taken: int, wish: int) -> str:
    kept = f", {format_amount(taken - used, unit)} kept for jobs ahead" if taken > used else ""
    in_use = f"{format_amount(used, unit)} of {format_amount(most, unit)} in use{kept}"
    return f"{in_use}, and the job asks {format_amount(wish, unit)}"


def spent_budget(request: Request, scheduling_round: SchedulingRound) -> str:
    (hours, money), (needs, costs) = (
        scheduling_round.budget_ledger.left(request),
        scheduling_round.budget_ledger.cost(request),
    )
    parts = []
    if hours is not None:
        parts.append(f"{max(hours, 0):.4g} GPU-hours are left, and it needs up to {needs:.4g}")
    if money is not None:
        parts.append(f"{max(money, 0):.4g} in money is left, and it costs up to {costs:.4g}")
    return "the budget of its workspace does not cover it beside what runs: " + "; ".join(parts)


# --------------------------------------------------------------------------------------------------- nodes


def unwanted_nodes(request: Request, scheduling_round: SchedulingRound) -> str:
    affinity, nodes = request.affinity, scheduling_round.cluster.permitted(request)
    wishes = [
        f"in {' or '.join(sorted(affinity.pools))}" if affinity.pools else "",
        f"labelled {', '.join(sorted(affinity.labels))}" if affinity.labels else "",
        f"not labelled {', '.join(sorted(affinity.avoid))}" if affinity.avoid else "",
        f"beside {', '.join(sorted(affinity.near))}" if affinity.near else "",
        f"apart from {', '.join(sorted(affinity.apart))}" if affinity.apart else "",
        f"on {count_of(request.replicas, 'node')} of their own" if affinity.spread else "",
    ]
    wanted = ", ".join(wish for wish in wishes if wish) or "apart from jobs that keep away from its group"
    suiting = len(scheduling_round.group_affinity.suits(request, nodes))
    all_nodes = len(scheduling_round.cluster.nodes)
    return f"asks {format_request(request)} {wanted}; {count_of(suiting, 'node')} of {all_nodes} will do"


def no_island(request: Request, scheduling_round: SchedulingRound) -> str:
    kind = {"nvlink": "one NVLink island", "rdma": "one RDMA fabric"}[request.affinity.island or "nvlink"]
    return f"asks {format_request(request)} in {kind}, and none is so large, even when idle"


def forbidden_nodes(request: Request, scheduling_round: SchedulingRound) -> str:
    nodes, permitted = scheduling_round.cluster.nodes, scheduling_round.cluster.permitted(request)
    allowed = ", ".join(sorted(request.label.only or ())) or "nowhere"
    there = sorted({node.jurisdiction for node in nodes})
    if not permitted:
        return f"its data may lie only in {allowed}; the nodes are in {', '.join(there)}"
    return f"its data may lie only in {allowed}, where the nodes are too small even when idle: " + shortage(
        request, scheduling_round.cluster.idle, scheduling_round
    )


def too_large(request: Request, scheduling_round: SchedulingRound) -> str:
    wish = requested_amount(request)
    for branch in scheduling_round.quota_tree.leaves[request.queue].path:
        bound = bound_of(branch, request)
        if not bound.holds(NOTHING, wish):
            over = [
                f"{format_amount(wished, unit)}, and queue {branch.queue.name} may hold {format_amount(most, unit)}"
                for unit, most, wished in zip(UNITS, bound, wish, strict=True)
                if wished > most
            ]
            tail = "" if request.preemptible else ", as a job that is not preemptible does not borrow"
            return "asks more than its queue may ever hold: " + "; ".join(over) + tail
    return f"asks {format_request(request)}, more than there is: " + shortage(
        request, scheduling_round.cluster.idle, scheduling_round
    )


def no_queue(request: Request, scheduling_round: SchedulingRound) -> str:
    known = ", ".join(scheduling_round.quota_tree.all) or "none"
    return f"there is no queue {request.queue}; the queues are: {known}"


def shortage(request: Request, slots: Sequence[NodeResources], scheduling_round: SchedulingRound) -> str:
    """How far the free nodes are from holding the job."""
    cluster, each = scheduling_round.cluster, request.each
    permitted = cluster.permitted(request)
    if not permitted:
        return "there are no nodes"
    if request.replicas > 1:
        fit = sum(capacity(slots[index], each, cluster.devices(index, each)) for index in permitted)
        return f"{fit} of {request.replicas} replicas fit"
    if each.gpu_milli < WHOLE_GPU and not any(cluster.nodes[index].shares for index in permitted):
        return "no node shares its GPUs"
    closest = max(
        permitted, key=lambda index: (closeness(request, slots[index], index, scheduling_round), -index)
    )
    return f"the closest node, {cluster.nodes[closest].name}, has {format_free(slots[closest])}"


def closeness(request: Request, slot: NodeResources, index: int, scheduling_round: SchedulingRound) -> float:
    """The share of what a replica asks that is there, in the scarcest resource."""
    each = request.each
    shares = [slot.cpus / each.cpus]
    if each.gpus:
        shares.append((slot.gpus & scheduling_round.cluster.devices(index, each)).bit_count() / each.gpus)
    if each.memory_bytes:
        shares.append(slot.memory / each.memory_bytes)
    return min(shares)
