"""The tree of queues: what may be set, and what sums up from the leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

from falaj.errors import Conflict, Fault, InvalidInput
from falaj.records.scheduling.snapshot import Queue, Quota

T = TypeVar("T")

RESOURCES = ("cpus", "gpus", "memory_bytes")


def require_sound(new: Queue, others: Mapping[str, Queue]) -> None:
    """Refuse `new` among `others` where the tree would not hold, with the figures."""
    faults = [*_limit_faults(new), *_ancestry_faults(new, others)]
    if not faults:
        faults = [*_share_faults(new, others), *_children_faults(new, others)]
    if faults:
        raise InvalidInput(f"queue {new.name} cannot be set so", faults=faults)


def require_unused(name: str, queues: Mapping[str, Queue], *, running: int, waiting: int) -> None:
    """Refuse to remove a queue that others hang on."""
    below = children_of(name, queues.values())
    if below:
        raise Conflict(f"queue {name} is the parent of {', '.join(below)}; move or remove those first")
    if running or waiting:
        raise Conflict(f"in queue {name} {running} jobs run and {waiting} wait; cancel them, or let them end")


def children_of(name: str, queues: Iterable[Queue]) -> list[str]:
    return sorted(queue.name for queue in queues if queue.parent == name)


def upward(name: str, queues: Mapping[str, Queue]) -> Iterator[str]:
    """The queue, its parent, and so on; nothing twice, whatever the tree is like."""
    seen: set[str] = set()
    current: str | None = name
    while current is not None and current in queues and current not in seen:
        yield current
        seen.add(current)
        current = queues[current].parent


def summed(
    own: Mapping[str, T], queues: Mapping[str, Queue], *, zero: T, plus: Callable[[T, T], T]
) -> dict[str, T]:
    """For every queue its own figure and those of all below it."""
    total = dict.fromkeys(queues, zero)
    for name, figure in own.items():
        for each in upward(name, queues):
            total[each] = plus(total[each], figure)
    return total


def _limit_faults(new: Queue) -> Iterator[Fault]:
    for resource, quota, limit in _paired(new.quota, new.limit):
        if limit is not None and quota is None:
            yield Fault(
                where=f"limit.{resource}",
                given=f"{limit}, with no quota",
                allowed="a limit on what has a quota; without one the queue may have all",
                fix=f"quota {resource} {limit}, or 0 for a queue that only borrows",
            )
        elif limit is not None and quota is not None and limit < quota:
            yield Fault(
                where=f"limit.{resource}",
                given=f"{limit}, with a quota of {quota}",
                allowed=f"at least the quota, {quota}",
            )


def _ancestry_faults(new: Queue, others: Mapping[str, Queue]) -> Iterator[Fault]:
    if new.parent is None:
        return
    if new.parent != new.name and new.parent not in others:
        allowed = f"one of {', '.join(sorted(others))}" if others else "none"
        yield Fault(where="parent", given=new.parent, allowed=allowed)
        return
    path = [new.name, *upward(new.parent, {**others, new.name: new})]
    if new.name in path[1:]:
        round_trip = " under ".join(path[: path.index(new.name, 1) + 1])
        yield Fault(where="parent", given=round_trip, allowed="a queue that is not below this one")


def _share_faults(new: Queue, others: Mapping[str, Queue]) -> Iterator[Fault]:
    """The quotas of the parent's children must be covered by the parent's."""
    if new.parent is None:
        return
    siblings = [each for each in others.values() if each.parent == new.parent and each.name != new.name]
    yield from _over(others[new.parent], [*siblings, new], blame=new)


def _children_faults(new: Queue, others: Mapping[str, Queue]) -> Iterator[Fault]:
    yield from _over(new, [each for each in others.values() if each.parent == new.name], blame=new)


def _over(parent: Queue, children: list[Queue], *, blame: Queue) -> Iterator[Fault]:
    for resource in RESOURCES:
        had: int | None = getattr(parent.quota, resource)
        parts = {each.name: getattr(each.quota, resource) or 0 for each in children}
        together = sum(parts.values())
        if had is None or together <= had:
            continue
        asked: int | None = getattr(blame.quota, resource)
        words = " + ".join(f"{name} {part}" for name, part in sorted(parts.items()) if part)
        left = had - (together - (asked or 0))
        allowed = (
            f"at least {together}, what its children have"
            if parent is blame
            else f"at most {max(left, 0)}: {parent.name} has {had}"
        )
        given = f"{asked}" if parent is blame else f"{asked}; together {together} ({words})"
        yield Fault(where=f"quota.{resource}", given=given, allowed=allowed)


def _paired(quota: Quota, limit: Quota | None) -> Iterator[tuple[str, int | None, int | None]]:
    for resource in RESOURCES:
        yield resource, getattr(quota, resource), None if limit is None else getattr(limit, resource)
