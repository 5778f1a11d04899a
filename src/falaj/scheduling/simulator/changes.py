"""Apply the changes of a what-if (quotas, limits, weights, nodes) to a world, and describe them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from falaj.errors import Fault, InvalidInput
from falaj.records.scheduling.simulation import Changes, MoreNodes, ResourceBound, SimulatedCluster
from falaj.records.scheduling.snapshot import Gpu, Node, Queue, Quota
from falaj.scheduling.explanation.formatting import count_of, format_memory
from falaj.scheduling.queue_tree import require_sound


def apply_changes(world: SimulatedCluster, changes: Changes) -> SimulatedCluster:
    """Return `world` with `changes`; raise InvalidInput with every fault if they do not apply."""
    faults = [*unknown_queues(world, changes), *unknown_nodes(world, changes)]
    if faults:
        raise InvalidInput("the changes cannot be applied", faults=faults)
    nodes = tuple(node for node in world.nodes if node.name not in changes.remove_nodes)
    queues = tuple(changed_queue(queue, changes) for queue in world.queues)
    if faults := unsound(world.queues, queues):
        raise InvalidInput("invalid settings for the changed queues", faults=faults)
    return world.model_copy(
        update={"nodes": (*nodes, *added(world.nodes, changes.add_nodes)), "queues": queues}
    )


def describe_changes(world: SimulatedCluster, changes: Changes) -> tuple[str, ...]:
    """Return one line for each change, as "quota of risk: 4 GPUs → 8 GPUs"."""
    queues = {queue.name: queue for queue in world.queues}
    lines = []
    for what, bounds in (("quota", changes.quotas), ("limit", changes.limits)):
        for bound in bounds:
            queue = queues[bound.queue]
            before = getattr(queue.quota if what == "quota" else queue.limit or queue.quota, bound.resource)
            words = f"{format_bound(bound.resource, before)} → {format_bound(bound.resource, bound.amount)}"
            lines.append(f"{what} of {bound.queue}: {words}")
    for new in changes.weights:
        lines.append(f"weight of {new.queue}: {queues[new.queue].weight:g} → {new.weight:g}")
    for more in changes.add_nodes:
        other = f", with {format_gpus_of(more)}" if more.gpus is not None or more.gpu_model else ""
        lines.append(f"{count_of(more.count, 'node')} more like {more.like}{other}")
    lines.extend(f"without node {name}" for name in changes.remove_nodes)
    return tuple(lines)


# ------------------------------------------------------------------------------------------------------- queues


def changed_queue(queue: Queue, changes: Changes) -> Queue:
    """Return the queue with its changes; a changed limit starts from the quota if the queue has none."""
    quota = with_bounds(queue.quota, queue.name, changes.quotas)
    limit = queue.limit
    if any(bound.queue == queue.name for bound in changes.limits):
        limit = with_bounds(quota if queue.limit is None else queue.limit, queue.name, changes.limits)
    weight = next((new.weight for new in reversed(changes.weights) if new.queue == queue.name), queue.weight)
    return queue.model_copy(update={"quota": quota, "limit": limit, "weight": weight})


def with_bounds(quota: Quota, queue: str, bounds: Iterable[ResourceBound]) -> Quota:
    return quota.model_copy(update={bound.resource: bound.amount for bound in bounds if bound.queue == queue})


def unsound(before: Sequence[Queue], after: Sequence[Queue]) -> list[Fault]:
    """Return the faults for which `queues.set` would refuse the changed queues."""
    tree = {queue.name: queue for queue in after}
    faults = []
    for old, queue in zip(before, after, strict=True):
        if queue != old:
            try:
                require_sound(queue, {name: other for name, other in tree.items() if name != queue.name})
            except InvalidInput as refused:
                faults += [
                    fault.model_copy(update={"where": f"{queue.name}: {fault.where}"})
                    for fault in refused.faults
                ]
    return faults


def unknown_queues(world: SimulatedCluster, changes: Changes) -> list[Fault]:
    known = sorted(queue.name for queue in world.queues)
    named = [
        ("quotas", [bound.queue for bound in changes.quotas]),
        ("limits", [bound.queue for bound in changes.limits]),
        ("weights", [new.queue for new in changes.weights]),
    ]
    return [
        Fault(where=f"changes.{part}", given=name, allowed=f"a queue: {', '.join(known)}")
        for part, names in named
        for name in names
        if name not in known
    ]


# -------------------------------------------------------------------------------------------------------- nodes


def unknown_nodes(world: SimulatedCluster, changes: Changes) -> list[Fault]:
    known = sorted(node.name for node in world.nodes)
    allowed = f"a node: {', '.join(known) or 'none'}"
    faults = [
        Fault(where=f"changes.{part}", given=name, allowed=allowed)
        for part, names in [
            ("add_nodes", [more.like for more in changes.add_nodes]),
            ("remove_nodes", list(changes.remove_nodes)),
        ]
        for name in names
        if name not in known
    ]
    if not faults and not changes.add_nodes and set(changes.remove_nodes) >= set(known):
        faults = [
            Fault(
                where="changes.remove_nodes", given=", ".join(known), allowed="at least one node must remain"
            )
        ]
    return faults


def added(nodes: Sequence[Node], more: Sequence[MoreNodes]) -> list[Node]:
    there = {node.name: node for node in nodes}
    taken = set(there)
    found = []
    for each in more:
        for _ in range(each.count):
            name = free_name(each.like, taken)
            taken.add(name)
            found.append(another(there[each.like], name, each))
    return found


def free_name(like: str, taken: set[str]) -> str:
    number = 1
    while (name := f"{like[:110]}-more-{number}") in taken:
        number += 1
    return name


def another(like: Node, name: str, more: MoreNodes) -> Node:
    count = len(like.gpus) if more.gpus is None else more.gpus
    patterns = like.gpus or (Gpu(id="none", model="GPU", memory_bytes=0),)
    gpus = []
    for number in range(count):
        pattern = patterns[number % len(patterns)]
        model = more.gpu_model or pattern.model
        gpus.append(pattern.model_copy(update={"id": f"{name[:100]}-gpu-{number}", "model": model}))
    return like.model_copy(update={"name": name, "gpus": tuple(gpus)})


# --------------------------------------------------------------------------------------------------- formatting


def format_bound(resource: str, amount: int | None) -> str:
    if amount is None:
        return "unlimited"
    if resource == "memory_bytes":
        return format_memory(amount)
    return count_of(amount, "GPU" if resource == "gpus" else "CPU")


def format_gpus_of(more: MoreNodes) -> str:
    model = more.gpu_model or "GPU"
    return f"GPUs of model {model}" if more.gpus is None else count_of(more.gpus, model)
