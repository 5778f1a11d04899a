"""The tree of queues: rules for its settings, walks and sums."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

from falaj.errors import Conflict, Fault, InvalidInput
from falaj.records.scheduling.snapshot import Queue, Quota

T = TypeVar("T")

RESOURCES = ("cpus", "gpus", "memory_bytes")


def require_sound(new: Queue, others: Mapping[str, Queue]) -> None:
    """Raise InvalidInput if the settings of `new` break a rule of the tree formed with `others`."""
    faults = [*_limit_faults(new), *_ancestry_faults(new, others)]
    if not faults:
        faults = [*_share_faults(new, others), *_children_faults(new, others)]
    if faults:
        raise InvalidInput(f"invalid settings for queue {new.name}", faults=faults)


def require_unused(name: str, queues: Mapping[str, Queue], *, running: int, waiting: int) -> None:
    """Raise Conflict if the queue has children or unfinished jobs."""
    below = children_of(name, queues.values())
    if below:
        raise Conflict(f"queue {name} is the parent of {', '.join(below)}; move or remove those first")
    if running or waiting:
        raise Conflict(
            f"queue {name} has {running} running and {waiting} waiting jobs; cancel them, or wait for them to end"
        )


def children_of(name: str, queues: Iterable[Queue]) -> list[str]:
    return sorted(queue.name for queue in queues if queue.parent == name)


def path_to_root(start: T, parent_of: Callable[[T], T | None]) -> Iterator[T]:
    """Yield `start`, its parent, and so on. In a cycle each is yielded once."""
    seen: set[T] = set()
    current: T | None = start
    while current is not None and current not in seen:
        yield current
        seen.add(current)
        current = parent_of(current)


def ancestry(name: str, queues: Mapping[str, Queue]) -> Iterator[str]:
    """Yield the name of the queue and of those above it, as far as `queues` knows them."""

    def parent_of(child: str) -> str | None:
        parent = queues[child].parent
        return parent if parent in queues else None

    return path_to_root(name, parent_of) if name in queues else iter(())


def summed(
    own: Mapping[str, T], queues: Mapping[str, Queue], *, zero: T, plus: Callable[[T, T], T]
) -> dict[str, T]:
    """Return for every queue the sum of its own value and those of all queues below it."""
    total = dict.fromkeys(queues, zero)
    for name, figure in own.items():
        for each in ancestry(name, queues):
            total[each] = plus(total[each], figure)
    return total


def _limit_faults(new: Queue) -> Iterator[Fault]:
    for resource, quota, limit in _paired(new.quota, new.limit):
        if limit is not None and quota is None:
            yield Fault(
                where=f"limit.{resource}",
                given=f"{limit}, with no quota",
                allowed="a limit only with a quota; without a quota the queue may use all",
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
    path = [new.name, *ancestry(new.parent, {**others, new.name: new})]
    if new.name in path[1:]:
        round_trip = " under ".join(path[: path.index(new.name, 1) + 1])
        yield Fault(where="parent", given=round_trip, allowed="a queue that is not below this one")


def _share_faults(new: Queue, others: Mapping[str, Queue]) -> Iterator[Fault]:
    """The quotas of a parent's children must not exceed the parent's quota in total."""
    if new.parent is None:
        return
    siblings = [each for each in others.values() if each.parent == new.parent and each.name != new.name]
    yield from _over(others[new.parent], [*siblings, new], blame=new)


def _children_faults(new: Queue, others: Mapping[str, Queue]) -> Iterator[Fault]:
    yield from _over(new, [each for each in others.values() if each.parent == new.name], blame=new)


def _over(parent: Queue, children: list[Queue], *, blame: Queue) -> Iterator[Fault]:
    for resource in RESOURCES:
        available: int | None = getattr(parent.quota, resource)
        parts = {each.name: getattr(each.quota, resource) or 0 for each in children}
        together = sum(parts.values())
        if available is None or together <= available:
            continue
        requested: int | None = getattr(blame.quota, resource)
        words = " + ".join(f"{name} {part}" for name, part in sorted(parts.items()) if part)
        left = available - (together - (requested or 0))
        allowed = (
            f"at least {together}, the total of its children"
            if parent is blame
            else f"at most {max(left, 0)}: {parent.name} has {available}"
        )
        given = f"{requested}" if parent is blame else f"{requested}; total {together} ({words})"
        yield Fault(where=f"quota.{resource}", given=given, allowed=allowed)


def _paired(quota: Quota, limit: Quota | None) -> Iterator[tuple[str, int | None, int | None]]:
    for resource in RESOURCES:
        yield resource, getattr(quota, resource), None if limit is None else getattr(limit, resource)
