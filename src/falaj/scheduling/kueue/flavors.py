"""ResourceFlavors: the nodes of a cluster by pool and GPU, with what they offer, and quotas divided among them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeVar

from falaj.ports.machine.hardware import ClusterNode, NodeFacts
from falaj.records.config import KubernetesConfig
from falaj.records.scheduling.hardware import label_part
from falaj.records.scheduling.snapshot import WHOLE_GPU, Quota
from falaj.scheduling.capacity.resources import slice_thousandths

K = TypeVar("K", bound=Hashable)

CPU, MEMORY, GPU, MIG = "cpu", "memory", "nvidia.com/gpu", "nvidia.com/mig-"
PRODUCT, LINUX = "nvidia.com/gpu.product", {"kubernetes.io/os": "linux"}
KEEPS_OFF = ("NoSchedule", "NoExecute")

Bucket = tuple[str, str]
"""A flavor and a resource: what Kueue has quotas of."""


@dataclass(frozen=True)
class Flavor:
    """Nodes that are alike. `capacity` is what those that take jobs offer; `sizes` are thousandths of a GPU."""

    name: str
    selector: Mapping[str, str]
    tolerations: tuple[Mapping[str, str], ...]
    capacity: Mapping[str, int]
    sizes: Mapping[str, int]


def flavors_of(nodes: Iterable[NodeFacts], config: KubernetesConfig) -> list[Flavor]:
    """Return the flavors, those without GPUs first: jobs that need none then leave GPUs to others.

    A flavor whose nodes are all cordoned or lost stays, and offers nothing.
    """
    groups: dict[str, list[tuple[NodeFacts, ClusterNode]]] = {}
    for facts in nodes:
        there = facts.cluster or ClusterNode()
        if not _is_kept_off(there, config):
            groups.setdefault(_flavor_name(facts, there, config), []).append((facts, there))
    made = [_flavor(name, members, config) for name, members in groups.items()]
    if not made:
        made = [Flavor(f"{config.prefix}-cpu", {}, (), {}, {})]
    return sorted(made, key=lambda each: (bool(each.sizes), each.name))


def _is_kept_off(there: ClusterNode, config: KubernetesConfig) -> bool:
    return any(taint.effect in KEEPS_OFF and taint.key not in config.tolerate for taint in there.taints)


def _flavor_name(facts: NodeFacts, there: ClusterNode, config: KubernetesConfig) -> str:
    has_gpus = any(_is_gpu(name) for name in there.resources)
    kind = label_part(there.selector.get(PRODUCT, "")) if has_gpus else "cpu"
    return "-".join(filter(None, (config.prefix, there.pool, kind or "gpu")))[:253]


def _flavor(name: str, members: list[tuple[NodeFacts, ClusterNode]], config: KubernetesConfig) -> Flavor:
    capacity: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for facts, there in members:
        offered = {CPU: facts.cpus, MEMORY: facts.memory_bytes, **there.resources}
        for resource, amount in offered.items():
            counted = amount if there.state == "ready" else 0
            capacity[resource] = capacity.get(resource, 0) + counted
            if _is_gpu(resource):
                sizes[resource] = max(sizes.get(resource, 1), _size(resource, facts))
    selector = _common(there.selector for _, there in members)
    keys = (PRODUCT, config.pool_label)
    chosen = {key: selector[key] for key in keys if key in selector and (key != PRODUCT or sizes)}
    taints = set.intersection(*(set(there.taints) for _, there in members))
    return Flavor(
        name=name,
        selector=chosen or (LINUX if config.topology else {}),
        tolerations=tuple(
            {"key": each.key, "operator": "Equal", "value": each.value, "effect": each.effect}
            for each in sorted(taints)
            if each.effect in KEEPS_OFF
        ),
        capacity=capacity,
        sizes=sizes,
    )


def _is_gpu(resource: str) -> bool:
    return resource in (GPU, f"{GPU}.shared") or resource.startswith(MIG)


def _size(resource: str, facts: NodeFacts) -> int:
    """Return the thousandths of a GPU in one unit of a resource."""
    if resource.startswith(MIG):
        return slice_thousandths(resource.removeprefix(MIG))
    cut = {name.removeprefix(MIG) for name in (facts.cluster or ClusterNode()).resources}
    profiles = [gpu.profile for gpu in facts.gpus if gpu.profile not in cut]
    if not profiles or None in profiles:
        return WHOLE_GPU
    return max(slice_thousandths(profile) for profile in profiles if profile)


def _common(selectors: Iterable[Mapping[str, str]]) -> dict[str, str]:
    first, *others = selectors
    return {key: value for key, value in first.items() if all(each.get(key) == value for each in others)}


# ------------------------------------------------------------------------------------------------- quotas


def buckets_of(flavors: Iterable[Flavor]) -> dict[str, dict[Bucket, tuple[int, int]]]:
    """Return the capacity and the size of each flavor and resource, by the field of a Quota that bounds it.

    Resources that no quota bounds are under "".
    """
    found: dict[str, dict[Bucket, tuple[int, int]]] = {"cpus": {}, "memory_bytes": {}, "gpus": {}, "": {}}
    resources = resources_of(flavors)
    for flavor in flavors:
        for resource in resources:
            field = "gpus" if _is_gpu(resource) else {CPU: "cpus", MEMORY: "memory_bytes"}.get(resource, "")
            size = flavor.sizes.get(resource, WHOLE_GPU) if field == "gpus" else 1
            found[field][flavor.name, resource] = (flavor.capacity.get(resource, 0), size)
    return found


def resources_of(flavors: Iterable[Flavor]) -> list[str]:
    """Return the resources that any flavor offers; CPUs, memory and GPUs always."""
    others = {name for flavor in flavors for name in flavor.capacity} - {CPU, MEMORY, GPU}
    return [CPU, MEMORY, GPU, *sorted(others)]


def divided(
    quota: Quota, buckets: Mapping[str, Mapping[Bucket, tuple[int, int]]]
) -> dict[Bucket, int | None]:
    """Return the part of a quota in each flavor, by what each offers; none where the quota has no bound.

    The parts add up to the quota at most, so that what is divided never exceeds it.
    """
    parts: dict[Bucket, int | None] = {}
    for field, of_field in buckets.items():
        amount: int | None = getattr(quota, field) if field else None
        if amount is None:
            parts |= dict.fromkeys(of_field)
        else:
            parts |= apportion(amount * (WHOLE_GPU if field == "gpus" else 1), of_field)
    return parts


def apportion(amount: int, shares: Mapping[K, tuple[int, int]]) -> dict[K, int | None]:
    """Divide `amount` by capacity, into whole units of each share's size; the parts add up to `amount` at most.

    What is left by rounding down goes to those that lost most by it. Without any capacity the first gets all.
    """
    total = sum(capacity * size for capacity, size in shares.values())
    if not total:
        first, *others = shares
        return {first: amount // shares[first][1], **dict.fromkeys(others, 0)}
    exact = {key: (amount * capacity, total) for key, (capacity, _) in shares.items()}
    parts: dict[K, int | None] = {key: over // under for key, (over, under) in exact.items()}
    left = amount - sum((parts[key] or 0) * shares[key][1] for key in shares)
    for key in sorted(shares, key=lambda each: exact[each][0] % total, reverse=True):
        size = shares[key][1]
        if exact[key][0] % total and size <= left:
            parts[key] = (parts[key] or 0) + 1
            left -= size
    return parts


def quantity(resource: str, amount: int) -> str:
    """Return an amount as Kueue writes it back: in the largest unit that is exact, binary for bytes."""
    if resource in (MEMORY, "ephemeral-storage") and amount and amount % 1024 == 0:
        units = (("Ei", 60), ("Pi", 50), ("Ti", 40), ("Gi", 30), ("Mi", 20), ("Ki", 10))
        return next(f"{amount >> bits}{unit}" for unit, bits in units if amount % (1 << bits) == 0)
    return decimal_quantity(Fraction(amount))


def decimal_quantity(number: Fraction) -> str:
    """Return a number to nine digits in the unit without a fraction and with the fewest zeros: 500m, 3k."""
    nanos = max(1, round(number * 10**9)) if number > 0 else 0
    units = (("E", 27), ("P", 24), ("T", 21), ("G", 18), ("M", 15), ("k", 12), ("", 9), ("m", 6), ("u", 3))
    for unit, power in units:
        if nanos and nanos % 10**power == 0:
            return f"{nanos // 10**power}{unit}"
    return f"{nanos}n" if nanos else "0"


def as_flavor_list(
    flavors: Iterable[Flavor], fields: Mapping[Bucket, Mapping[str, int]]
) -> list[dict[str, Any]]:
    """Return the `flavors` of a resource group: `fields` has the quota fields of each flavor and resource."""
    listed = list(flavors)
    resources = resources_of(listed)
    return [
        {
            "name": flavor.name,
            "resources": [
                {"name": name}
                | {field: quantity(name, amount) for field, amount in fields[flavor.name, name].items()}
                for name in resources
            ],
        }
        for flavor in listed
    ]
