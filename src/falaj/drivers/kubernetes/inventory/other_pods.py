"""What pods that are not this platform's request of their nodes: the cluster's own, and those of other teams. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any, NamedTuple

from falaj.drivers.kubernetes.inventory.gpu_devices import GPU, MIG, resource_of_device
from falaj.drivers.kubernetes.inventory.quantities import read_quantity
from falaj.ports.machine.hardware import NodeFacts
from falaj.records.scheduling.snapshot import HeldByOthers

Amounts = Counter[str]


class PodRequests(NamedTuple):
    """What a pod holds of its node: thousandths of CPUs, bytes, and GPU resources by their names."""

    node: str
    cpus_milli: int
    memory_bytes: int
    gpus: tuple[tuple[str, int], ...] = ()


def requests_of(pod: Mapping[str, Any]) -> PodRequests | None:
    """Return what a pod holds; none if it is on no node, or has ended.

    As the cluster's scheduler counts: all containers together, or the largest step of initialization if that is more;
    requests of the pod as a whole replace those of its containers.
    """
    spec, status = pod.get("spec") or {}, pod.get("status") or {}
    if not spec.get("nodeName") or status.get("phase") in ("Succeeded", "Failed"):
        return None
    as_a_whole = _thousandths((spec.get("resources") or {}).get("requests"))
    held = Counter({**_of_containers(spec), **as_a_whole}) + _thousandths(spec.get("overhead"))
    gpus = {name: count // 1000 for name, count in held.items() if name.startswith((GPU, MIG))}
    return PodRequests(spec["nodeName"], held["cpu"], -(-held["memory"] // 1000), tuple(sorted(gpus.items())))


def _of_containers(spec: Mapping[str, Any]) -> Amounts:
    """Return what the containers need at once, at most."""
    beside, peak = Amounts(), Amounts()  # sidecars are begun during initialization, and stay
    for each in spec.get("initContainers") or ():
        asked = _thousandths((each.get("resources") or {}).get("requests"))
        if each.get("restartPolicy") == "Always":
            beside += asked
            peak |= beside
        else:
            peak |= beside + asked
    for each in spec.get("containers") or ():
        beside += _thousandths((each.get("resources") or {}).get("requests"))
    return peak | beside


def _thousandths(requests: Mapping[str, Any] | None) -> Amounts:
    return Counter({name: _up(read_quantity(text) * 1000) for name, text in (requests or {}).items()})


def _up(number: Fraction) -> int:
    return -(-number.numerator // number.denominator)


def held_on(pods: Iterable[PodRequests | None]) -> dict[str, PodRequests]:
    """Return what all pods of each node hold together."""
    found: dict[str, PodRequests] = {}
    for pod in pods:
        if pod is not None:
            before = found.get(pod.node)
            found[pod.node] = pod if before is None else _sum(before, pod)
    return found


def _sum(one: PodRequests, other: PodRequests) -> PodRequests:
    gpus = Counter(dict(one.gpus)) + Counter(dict(other.gpus)) if one.gpus or other.gpus else {}
    return PodRequests(
        one.node,
        one.cpus_milli + other.cpus_milli,
        one.memory_bytes + other.memory_bytes,
        tuple(sorted(gpus.items())),
    )


def with_others(facts: NodeFacts, held: PodRequests | None) -> NodeFacts:
    """Return the node with what others hold of it, in whole CPUs: what they leave is rounded down once."""
    if held is None or facts.cluster is None:
        return facts
    left = max(0, facts.cluster.cpus_milli - held.cpus_milli) // 1000
    profiles = {resource_of_device(gpu.id): gpu.profile or "" for gpu in facts.gpus}
    gpus: Counter[str] = Counter()
    for name, count in held.gpus:
        if name in profiles and count:
            gpus[profiles[name]] += count
    memory_bytes = min(held.memory_bytes, facts.memory_bytes)
    found = HeldByOthers(cpus=max(0, facts.cpus - left), memory_bytes=memory_bytes, gpus=dict(gpus))
    return facts if found == HeldByOthers() else replace(facts, others=found)
