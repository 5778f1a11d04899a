"""Figures of the queue, as people say them."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

from falaj.records.scheduling import Placement, Quota, Request, Resources
from falaj.scheduling.ledger import Slot


def several(count: int, unit: str) -> str:
    return f"{count} {unit}" if count == 1 else f"{count} {unit}s"


def memory(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.4g} GiB"


def amount(given: Resources | Quota) -> str:
    """Without what it does not name: "4 CPUs, 1 GPU"."""
    parts = [
        several(given.cpus, "CPU") if given.cpus is not None else "",
        several(given.gpus, "GPU") if given.gpus else "",
        memory(given.memory_bytes) if given.memory_bytes else "",
    ]
    return ", ".join(part for part in parts if part)


def free(slot: Slot) -> str:
    parts = several(slot.cpus, "CPU"), several(slot.gpus.bit_count(), "GPU"), memory(slot.memory)
    return ", ".join(parts) + " free"


def asked(request: Request) -> str:
    each = amount(request.each)
    return each if request.replicas == 1 else f"{request.replicas} replicas of {each} each"


def places(placements: Iterable[Placement]) -> str:
    return ", ".join(sorted({placement.node for placement in placements}))


def duration(span: timedelta) -> str:
    """In whole seconds, rounded down: "2d 3h", "25m 10s"."""
    seconds = int(span.total_seconds())
    units = [
        (seconds // 86400, "d"),
        (seconds // 3600 % 24, "h"),
        (seconds // 60 % 60, "m"),
        (seconds % 60, "s"),
    ]
    return " ".join(f"{count}{unit}" for count, unit in units if count) or "0s"
