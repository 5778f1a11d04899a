"""Which waiting jobs more nodes would help, so that an autoscaler can be asked for them: a pure function of a snapshot.

A job counts if only room on the nodes keeps it from starting, and nodes like one that is there could take it. Jobs that
wait for quota, a budget or residency ask for nothing: they would not use what they get.
"""

from __future__ import annotations

from collections.abc import Iterator

from falaj.records.scheduling.scale_up import ScaleUpHint
from falaj.records.scheduling.snapshot import Node, Reason, Request, Snapshot, Wait
from falaj.scheduling.capacity.quota_tree import fits_empty_quota
from falaj.scheduling.capacity.resources import requested_amount
from falaj.scheduling.decision.backlog import Backlog
from falaj.scheduling.decision.decide import all_decisions
from falaj.scheduling.decision.scheduling_round import SchedulingRound
from falaj.scheduling.placement.gang_placement import capacity

WAITS_FOR_ROOM = (Reason.CAPACITY, Reason.RESERVED)


def nodes_wanted(snapshot: Snapshot, *, limit: int) -> tuple[ScaleUpHint, ...]:
    """Return for which jobs nodes are wanted, in the order of decision, with at most `limit` pods in all."""
    if not snapshot.pending or limit <= 0:
        return ()
    found, left = [], limit
    for hint in _hints(snapshot):
        if hint.pods <= left:
            found.append(hint)
            left -= hint.pods
        if not left:
            break
    return tuple(found)


def _hints(snapshot: Snapshot) -> Iterator[ScaleUpHint]:
    scheduling_round = SchedulingRound(snapshot, Backlog(snapshot.pending)).decide_all()
    requests = {each.job: each for each in snapshot.pending}
    for decision in all_decisions(scheduling_round):
        if isinstance(decision, Wait) and _waits_for_room(decision, requests[decision.job], scheduling_round):
            request = requests[decision.job]
            node = _node_like(request, scheduling_round)
            if node is not None:
                yield ScaleUpHint(
                    job=request.job,
                    workspace=request.workspace,
                    pods=request.replicas,
                    each=request.each,
                    like=node.name,
                    cluster=node.cluster,
                    spread=request.affinity.spread,
                )


def _waits_for_room(decision: Wait, request: Request, scheduling_round: SchedulingRound) -> bool:
    """Return whether only the nodes keep a job from starting: they are busy, or too few, but its quota is enough."""
    if decision.reason is not Reason.TOO_LARGE:
        return decision.reason in WAITS_FOR_ROOM
    leaf = scheduling_round.quota_tree.leaves[request.queue]
    return fits_empty_quota(leaf, requested_amount(request), borrowing=request.preemptible)


def _node_like(request: Request, scheduling_round: SchedulingRound) -> Node | None:
    """Return a node that could take a replica if it were idle: the smallest of the best cluster that has one."""
    cluster, each = scheduling_round.cluster, request.each
    for nodes in cluster.by_cluster(request, cluster.permitted(request, even_cordoned=True)):
        able = [
            index
            for index in nodes
            if capacity(cluster.idle[index], each, cluster.devices(index, each) if each.gpus else 0)
        ]
        if able:
            return min((cluster.nodes[index] for index in able), key=_size)
    return None


def _size(node: Node) -> tuple[int, int, int, str]:
    return len(node.gpus), node.cpus, node.memory_bytes, node.name
