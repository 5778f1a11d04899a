"""Sentences that name the constraint a waiting job is held by, with its numbers."""

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
    format_others,
    format_request,
)
from falaj.scheduling.placement.gang_placement import capacity


def describe_reason(
    reason: Reason, request: Request, scheduling_round: SchedulingRound, leaving: Sequence[str]
) -> str:
    """Return why the job waits.

    `scheduling_round` is advanced to just before the job's decision; `leaving` are the victims preempted for it.
    """
    if reason is Reason.PREEMPTING:
        return describe_preemption(request, leaving)
    describe = {
        Reason.CAPACITY: describe_capacity,
        Reason.RESERVED: describe_reserved,
        Reason.QUOTA: describe_quota,
        Reason.AFFINITY: describe_affinity,
        Reason.BUDGET: describe_budget,
        Reason.CORDONED: describe_cordoned,
        Reason.TOPOLOGY: describe_topology,
        Reason.RESIDENCY: describe_residency,
        Reason.TOO_LARGE: describe_too_large,
        Reason.NO_QUEUE: describe_no_queue,
    }
    return describe[reason](request, scheduling_round)


def describe_capacity(request: Request, scheduling_round: SchedulingRound) -> str:
    leaf, asked = scheduling_round.quota_tree.leaves[request.queue], requested_amount(request)
    is_head = not scheduling_round.head and scheduling_round.reservation_for(request, leaf, asked)
    head = "; it gets the reservation" if is_head else ""
    view = (
        scheduling_round.capacity_now.free
        if scheduling_round.passes(request)
        else scheduling_round.capacity_now.open
    )
    return f"needs {format_request(request)}; {shortage(request, view, scheduling_round)}{head}"


def describe_reserved(request: Request, scheduling_round: SchedulingRound) -> str:
    if scheduling_round.head is None:
        others = ", ".join(
            nomination.request.job for nomination in scheduling_round.preemption_claims.nominations.open
        )
        return f"needs {format_request(request)}; free resources are reserved for {others}, which preempts others"
    head, at = scheduling_round.head.head, scheduling_round.head.at
    since = f"from {at:%Y-%m-%d %H:%M:%S %Z}" if at else "for when jobs without a time limit end"
    return (
        f"needs {format_request(request)}; waits behind {head.job} (priority {head.priority}), "
        f"for which {format_nodes(scheduling_round.head.place)} is reserved {since}"
    )


def describe_preemption(request: Request, leaving: Sequence[str]) -> str:
    if not leaving:
        return f"needs {format_request(request)}; waits for the jobs preempted for it to stop"
    return f"needs {format_request(request)}; waits for these preempted jobs to stop: {', '.join(sorted(leaving))}"


# -------------------------------------------------------------------------------------------------- quotas


def describe_quota(request: Request, scheduling_round: SchedulingRound) -> str:
    branch, account, bound = short_of_quota(request, scheduling_round)
    what = "quota" if bound == branch.quota else "limit"
    rows = zip(UNITS, bound, account.held, used_and_reserved(account), requested_amount(request), strict=True)
    parts = [
        quota_row(unit, most, used, kept, wish)
        for unit, most, used, kept, wish in rows
        if wish and kept + wish > most
    ]
    where = (
        branch.queue.name
        if branch.queue.name == request.queue
        else f"{branch.queue.name} (above {request.queue})"
    )
    tail = "; a job that is not preemptible cannot borrow" if account is branch.own else ""
    return f"the {what} of queue {where} is exhausted: " + "; ".join(parts) + tail


def short_of_quota(
    request: Request, scheduling_round: SchedulingRound
) -> tuple[QuotaNode, QuotaUsage, ResourceAmount]:
    """Return the lowest queue that has too little left, its usage and the bound that is exceeded.

    Return the job's own queue if all of them have enough by now.
    """
    path, wish = scheduling_round.quota_tree.leaves[request.queue].path, requested_amount(request)
    for branch in path:
        lack = branch.lacks(wish, borrowing=request.preemptible)
        if lack:
            return branch, *lack
    own = path[0]
    return (own, own.all, own.limit) if request.preemptible else (own, own.own, own.quota)


def bound_of(branch: QuotaNode, request: Request) -> ResourceAmount:
    return branch.limit if request.preemptible else branch.quota


def used_and_reserved(account: QuotaUsage) -> ResourceAmount:
    return account.used.most(account.then)


def quota_row(unit: str, most: int, used: int, taken: int, wish: int) -> str:
    reserved = f", {format_amount(taken - used, unit)} reserved for jobs ahead" if taken > used else ""
    in_use = f"{format_amount(used, unit)} of {format_amount(most, unit)} in use{reserved}"
    return f"{in_use}, {format_amount(wish, unit)} requested"


def describe_budget(request: Request, scheduling_round: SchedulingRound) -> str:
    (hours, money), (needs, costs) = (
        scheduling_round.budget_ledger.left(request),
        scheduling_round.budget_ledger.cost(request),
    )
    parts = []
    if hours is not None:
        parts.append(f"{max(hours, 0):.4g} GPU-hours left, up to {needs:.4g} needed")
    if money is not None:
        parts.append(f"{max(money, 0):.4g} of money left, up to {costs:.4g} needed")
    return "the budget of its workspace does not cover it in addition to the running jobs: " + "; ".join(
        parts
    )


# --------------------------------------------------------------------------------------------------- nodes


def describe_affinity(request: Request, scheduling_round: SchedulingRound) -> str:
    affinity = request.affinity
    nodes = scheduling_round.cluster.permitted(request, even_cordoned=True)
    wishes = [
        f"in pool {' or '.join(sorted(affinity.pools))}" if affinity.pools else "",
        f"labelled {', '.join(sorted(affinity.labels))}" if affinity.labels else "",
        f"not labelled {', '.join(sorted(affinity.avoid))}" if affinity.avoid else "",
        f"with jobs of group {', '.join(sorted(affinity.near))}" if affinity.near else "",
        f"without jobs of group {', '.join(sorted(affinity.apart))}" if affinity.apart else "",
        "with one replica each" if affinity.spread and request.replicas > 1 else "",
    ]
    wanted = ", ".join(wish for wish in wishes if wish) or "without jobs that keep apart from its group"
    suiting = len(scheduling_round.group_affinity.suits(request, nodes))
    needs, all_nodes = (
        f"needs {format_request(request)} on nodes {wanted}",
        len(scheduling_round.cluster.nodes),
    )
    if affinity.spread and suiting < request.replicas:
        there = "there is 1" if suiting == 1 else f"there are {suiting}"
        return f"{needs}: {request.replicas} nodes are needed, {there}"
    return f"{needs}; {suiting} of {count_of(all_nodes, 'node')} match"


def describe_cordoned(request: Request, scheduling_round: SchedulingRound) -> str:
    cordoned = [node.name for node in scheduling_round.cluster.nodes if node.cordoned]
    named = ", ".join(cordoned[:5]) + (f" and {len(cordoned) - 5} more" if len(cordoned) > 5 else "")
    return (
        f"needs {format_request(request)}, for which the nodes that start jobs are too small or too few; "
        f"cordoned: {named}"
    )


def describe_topology(request: Request, scheduling_round: SchedulingRound) -> str:
    kind = {"nvlink": "NVLink island", "rdma": "RDMA fabric"}[request.affinity.island or "nvlink"]
    return f"needs {format_request(request)} in one {kind}; no {kind} is large enough, even when idle"


def describe_residency(request: Request, scheduling_round: SchedulingRound) -> str:
    nodes = scheduling_round.cluster.nodes
    permitted = scheduling_round.cluster.permitted(request, even_cordoned=True)
    allowed = ", ".join(sorted(request.label.only or ())) or "no jurisdiction"
    there = sorted({node.jurisdiction for node in nodes})
    if not permitted:
        return f"its data may be stored only in {allowed}; the nodes are in {', '.join(there)}"
    return (
        f"its data may be stored only in {allowed}, where the nodes are too small even when idle: "
        + shortage(request, scheduling_round.cluster.idle, scheduling_round)
    )


def describe_too_large(request: Request, scheduling_round: SchedulingRound) -> str:
    wish = requested_amount(request)
    for branch in scheduling_round.quota_tree.leaves[request.queue].path:
        bound = bound_of(branch, request)
        if not bound.holds(NOTHING, wish):
            over = [
                f"{format_amount(wished, unit)} requested, "
                f"queue {branch.queue.name} may hold {format_amount(most, unit)}"
                for unit, most, wished in zip(UNITS, bound, wish, strict=True)
                if wished > most
            ]
            tail = "" if request.preemptible else "; a job that is not preemptible cannot borrow"
            return "needs more than its queue may ever hold: " + "; ".join(over) + tail
    return f"needs {format_request(request)}, more than the cluster has: " + shortage(
        request, scheduling_round.cluster.idle, scheduling_round
    )


def describe_no_queue(request: Request, scheduling_round: SchedulingRound) -> str:
    known = ", ".join(scheduling_round.quota_tree.all) or "none"
    return f"queue {request.queue} does not exist; the queues are: {known}"


def shortage(request: Request, slots: Sequence[NodeResources], scheduling_round: SchedulingRound) -> str:
    """Return how much of the job fits on the nodes, or what the closest node has free."""
    cluster, each = scheduling_round.cluster, request.each
    permitted = cluster.permitted(request)
    if not permitted:
        return "there are no nodes"
    if request.replicas > 1:
        fits = [
            sum(capacity(slots[index], each, cluster.devices(index, each)) for index in nodes)
            for nodes in cluster.by_cluster(request, permitted)
        ]
        where = " in one cluster" if len(fits) > 1 else ""
        return f"{max(fits)} of {request.replicas} replicas fit{where}"
    if each.gpu_milli < WHOLE_GPU and not any(cluster.nodes[index].shares for index in permitted):
        return "no node shares its GPUs"
    closest = max(
        permitted, key=lambda index: (closeness(request, slots[index], index, scheduling_round), -index)
    )
    node = cluster.nodes[closest]
    free = f"the closest node, {node.name}, has {format_free(slots[closest])}"
    is_shared = node.others is not None and slots is not cluster.idle
    return f"{free} beside {format_others(node.others)} that others hold" if is_shared else free


def closeness(request: Request, slot: NodeResources, index: int, scheduling_round: SchedulingRound) -> float:
    """Return the fraction of a replica's request that the node has free, of its scarcest resource."""
    each = request.each
    shares = [slot.cpus / each.cpus]
    if each.gpus:
        shares.append((slot.gpus & scheduling_round.cluster.devices(index, each)).bit_count() / each.gpus)
    if each.memory_bytes:
        shares.append(slot.memory / each.memory_bytes)
    return min(shares)
