"""Profiler events, read from a trace in Chrome's format as written by torch."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

PREFIX = "falaj."
"""Our ranges are called falaj.step, falaj.data, falaj.forward, falaj.backward, falaj.optimizer …"""

EventKind = Literal["range", "operation", "launch", "kernel", "copy", "communication"]
"""range: one of ours. operation: on a CPU. launch: the call that sends work to a GPU. The others run on the
device; communication on a CPU runs in a thread of its own."""

EVENT_KINDS: Mapping[str, EventKind] = {
    "cpu_op": "operation",
    "cuda_runtime": "launch",
    "cuda_driver": "launch",
    "kernel": "kernel",
    "gpu_memset": "kernel",
    "gpu_memcpy": "copy",
}
COLLECTIVES = ("gloo:", "mpi:", "ucc:")
HOST_TO_GPU, GPU_TO_GPU = "Memcpy HtoD", "Memcpy DtoD"


class TraceEvent(NamedTuple):
    """`start` and `end` are seconds of one clock. Launched work has the `correlation` of its launch; 0 is none."""

    name: str
    kind: EventKind
    start: float
    end: float
    correlation: int = 0


def read_trace(path: str | Path) -> list[TraceEvent]:
    """Return the events of a trace file."""
    file = Path(path)
    data = file.read_bytes()
    trace = json.loads(gzip.decompress(data) if file.suffix == ".gz" else data)
    return list(events_of(trace["traceEvents"]))


def events_of(rows: list[dict[str, Any]]) -> Iterator[TraceEvent]:
    """Yield the rows of a trace that account for time."""
    for row in rows:
        if row.get("ph") != "X":
            continue
        name, kind = str(row.get("name", "")), _kind(row)
        if kind is not None:
            start = float(row["ts"]) / 1e6
            yield TraceEvent(name, kind, start, start + float(row.get("dur", 0)) / 1e6, _correlation(row))


def _kind(row: Mapping[str, Any]) -> EventKind | None:
    name, category = str(row.get("name", "")), str(row.get("cat", ""))
    if category == "user_annotation":
        if name.startswith(COLLECTIVES):
            return "communication"
        return "range" if name.startswith(PREFIX) else None
    kind = EVENT_KINDS.get(category)
    if kind == "kernel" and "nccl" in name.lower():
        return "communication"
    if kind == "copy" and not name.startswith(HOST_TO_GPU):
        return "kernel" if name.startswith(GPU_TO_GPU) else None
    return kind


def _correlation(row: Mapping[str, Any]) -> int:
    found = (row.get("args") or {}).get("correlation", 0)
    return found if isinstance(found, int) else 0
