"""Resources, counts and durations of the scheduler as text."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

from falaj.records.scheduling.snapshot import WHOLE_GPU, HeldByOthers, Placement, Quota, Request, Resources
from falaj.scheduling.capacity.resources import UNLIMITED, NodeResources


def count_of(count: float, unit: str) -> str:
    return f"{count:.15g} {unit}" if count == 1 else f"{count:.15g} {unit}s"


def format_memory(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.4g} GiB"


def format_resources(given: Resources | Quota) -> str:
    """Return the resources that are set, as "4 CPUs, 1 GPU"."""
    parts = [
        count_of(given.cpus, "CPU") if given.cpus is not None else "",
        format_gpus(given) if given.gpus else "",
        format_memory(given.memory_bytes) if given.memory_bytes else "",
    ]
    return ", ".join(part for part in parts if part)


def format_gpus(given: Resources | Quota) -> str:
    if isinstance(given, Quota):
        return count_of(given.gpus or 0, "GPU")
    models = f" ({' or '.join(sorted(given.gpu_models))})" if given.gpu_models else ""
    if given.gpu_profile:
        return count_of(given.gpus, f"slice {given.gpu_profile}") + models
    size = f" with {format_memory(given.gpu_memory_bytes)}" if given.gpu_memory_bytes else ""
    if given.gpu_milli < WHOLE_GPU:
        return f"{given.gpu_milli} thousandths of a GPU{models}{size}"
    return count_of(given.gpus, "GPU") + models + size


def format_free(slot: NodeResources) -> str:
    parts = count_of(slot.cpus, "CPU"), count_of(slot.gpus.bit_count(), "GPU"), format_memory(slot.memory)
    return ", ".join(parts) + " free"


def format_others(held: HeldByOthers | None) -> str:
    held = held or HeldByOthers()
    gpus = sum(held.gpus.values())
    parts = [
        count_of(held.cpus, "CPU"),
        count_of(gpus, "GPU") if gpus else "",
        format_memory(held.memory_bytes),
    ]
    return ", ".join(part for part in parts if part)


def format_request(request: Request) -> str:
    each = format_resources(request.each)
    return each if request.replicas == 1 else f"{request.replicas} replicas of {each} each"


def format_nodes(placements: Iterable[Placement]) -> str:
    return ", ".join(sorted({placement.node for placement in placements}))


UNITS = ("CPU", "GPU", "memory")


def format_amount(count: int, unit: str) -> str:
    """Return one resource of a ResourceAmount, whose GPUs are in thousandths."""
    if count >= UNLIMITED // 2:
        return "unlimited"
    if unit == "memory":
        return format_memory(count)
    return count_of(count / WHOLE_GPU if unit == "GPU" else count, unit)


def format_duration(span: timedelta) -> str:
    """Return whole seconds, rounded down, as "2d 3h" or "25m 10s"."""
    seconds = int(span.total_seconds())
    units = [
        (seconds // 86400, "d"),
        (seconds // 3600 % 24, "h"),
        (seconds // 60 % 60, "m"),
        (seconds % 60, "s"),
    ]
    return " ".join(f"{count}{unit}" for count, unit in units if count) or "0s"
