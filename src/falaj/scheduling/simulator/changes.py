"""Another world: the one there is, with other quotas, limits, weights or machines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from falaj.errors import Fault, InvalidInput
from falaj.records.scheduling.simulation import Changes, MoreNodes, ResourceBound, SimulatedCluster
from falaj.records.scheduling.snapshot import Gpu, Node, Queue, Quota
from falaj.scheduling.explanation.formatting import count_of, format_memory
from falaj.scheduling.queue_tree import require_sound


def apply_changes(world: SimulatedCluster, changes: Changes) -> SimulatedCluster:
    """`world` with `changes`; InvalidInput, with all that is wrong with them, if it has no such queue or node."""
    faults = [*unknown_queues(world, changes), *unknown_nodes(world, changes)]
    if faults:
        raise InvalidInput("the changes do not fit what there is", faults=faults)
    nodes = tuple(node for node in world.nodes if node.name not in changes.remove_nodes)
    queues = tuple(changed_queue(queue, changes) for queue in world.queues)
    if faults := unsound(world.queues, queues):
        raise InvalidInput("the queues cannot be set so", faults=faults)
    return world.model_copy(
        update={"nodes": (*nodes, *added(world.nodes, changes.add_nodes)), "queues": queues}
    )


def describe_changes(world: SimulatedCluster, changes: Changes) -> tuple[str, ...]:
    """Each change in a few words: "quota of risk: 4 → 8 GPUs"."""
    queues = {queue.name: queue for queue in world.queues}
    said = []
    for what, bounds in (("quota", changes.quotas), ("limit", changes.limits)):
        for bound in bounds:
            queue = queues[bound.queue]
            before = getattr(queue.quota if what == "quota" else queue.limit or queue.quota, bound.resource)
            words = f"{figure(bound.resource, before)} → {figure(bound.resource, bound.amount)}"
            said.append(f"{what} of {bound.queue}: {words}")
    for new in changes.weights:
        said.append(f"weight of {new.queue}: {queues[new.queue].weight:g} → {new.weight:g}")
    for more in changes.add_nodes:
        other = f", with {gpus_in_words(more)}" if more.gpus is not None or more.gpu_model else ""
        said.append(f"{count_of(more.count, 'node')} more like {more.like}{other}")
    said.extend(f"without node {name}" for name in changes.remove_nodes)
    return tuple(said)


# ------------------------------------------------------------------------------------------------------- queues


def changed_queue(queue: Queue, changes: Changes) -> Queue:
    """A limit that is none is the quota as it was, and keeps those figures that are not changed."""
    quota = with_bounds(queue.quota, queue.name, changes.quotas)
    limit = queue.limit
    if any(bound.queue == queue.name for bound in changes.limits):
        limit = with_bounds(quota if queue.limit is None else queue.limit, queue.name, changes.limits)
    weight = next((new.weight for new in reversed(changes.weights) if new.queue == queue.name), queue.weight)
    return queue.model_copy(update={"quota": quota, "limit": limit, "weight": weight})


def with_bounds(quota: Quota, queue: str, bounds: Iterable[ResourceBound]) -> Quota:
    return quota.model_copy(update={bound.resource: bound.amount for bound in bounds if bound.queue == queue})


def unsound(before: Sequence[Queue], after: Sequence[Queue]) -> list[Fault]:
    """What the room would refuse too, if the changed queues were set so: a quota beyond its limit, for one."""
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
    allowed = f"a node: {', '.join(known) or 'there are none'}"
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
            Fault(where="changes.remove_nodes", given=", ".join(known), allowed="at least one node stays")
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


# -------------------------------------------------------------------------------------------------------- words


def figure(resource: str, amount: int | None) -> str:
    if amount is None:
        return "no bound"
    if resource == "memory_bytes":
        return format_memory(amount)
    return count_of(amount, "GPU" if resource == "gpus" else "CPU")


def gpus_in_words(more: MoreNodes) -> str:
    model = more.gpu_model or "GPU"
    return f"GPUs of model {model}" if more.gpus is None else count_of(more.gpus, model)
