"""Traces of requests: which are taken, by the W3C `traceparent` or by chance, and the spans of each."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from random import Random
from typing import ClassVar, NamedTuple, Protocol

_PARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
SAMPLED = 1


class TraceParent(NamedTuple):
    """The trace of a caller, its span, and whether it is recorded."""

    trace: str
    span: str
    is_sampled: bool


def read_traceparent(header: bytes | None) -> TraceParent | None:
    """Return what a `traceparent` says; None if there is none, or none that is valid."""
    found = None if header is None or len(header) > 512 else _PARENT.fullmatch(header.strip())
    if found is None:
        return None
    version, trace, span, flags, more = found.groups()
    is_known = version != b"ff" and (version != b"00" or more is None)
    if not is_known or not trace.strip(b"0") or not span.strip(b"0"):
        return None
    return TraceParent(trace.decode(), span.decode(), bool(int(flags, 16) & SAMPLED))


class TraceSpan(NamedTuple):
    """A part of a trace, in nanoseconds of `time.perf_counter_ns`."""

    name: str
    began: int
    ended: int


class FinishedTrace(NamedTuple):
    """A request that was answered."""

    trace: str
    span: str
    parent: str | None
    endpoint: str
    version: str
    status: int
    began: int
    ended: int
    parts: tuple[TraceSpan, ...]


class TraceSink(Protocol):
    """Takes finished traces; called on the event loop, so it does not block."""

    def add(self, trace: FinishedTrace) -> None: ...


class RequestTrace:
    """The trace of one request, marked as it proceeds."""

    __slots__ = (
        *("_began", "_end", "_parent", "_sink", "endpoint", "lookup"),
        *("prepared", "run", "span", "trace", "version"),
    )

    started: ClassVar[bool] = False
    """Whether this process has traced a request: if not, batches need not be looked through for traces."""

    def __init__(self, sink: TraceSink, endpoint: str, began_s: float, parent: TraceParent | None) -> None:
        RequestTrace.started = True
        self._sink = sink
        self._began = int(began_s * 1e9)
        self._parent = None if parent is None else parent.span
        self._end = 0
        self.trace = os.urandom(16).hex() if parent is None else parent.trace
        self.span = os.urandom(8).hex()
        self.endpoint = endpoint
        self.version = ""
        self.lookup: tuple[int, int] | None = None
        """When features were looked up."""
        self.prepared = 0
        """When the request was parsed and went to the queue."""
        self.run: tuple[int, int] | None = None
        """When the model ran; that of the batch."""

    def ran(self, version: str, run: tuple[int, int]) -> None:
        """Mark which version ran, and when."""
        self.version, self.run = version, run

    def end(self, status: int) -> None:
        """Hand the trace on; only the first call counts."""
        if self._end:
            return
        self._end = time.perf_counter_ns()
        self._sink.add(
            FinishedTrace(
                self.trace,
                self.span,
                self._parent,
                self.endpoint,
                self.version,
                status,
                self._began,
                self._end,
                tuple(self._parts()),
            )
        )

    def _parts(self) -> list[TraceSpan]:
        """Return the spans within the request, each after the one before."""
        parts = []
        if self.lookup is not None:
            parts.append(TraceSpan("lookup", *self.lookup))
        if self.run is not None:
            began, ended = self.run
            parts.append(TraceSpan("queue", min(self.prepared or self._began, began), began))
            parts.append(TraceSpan("model", began, ended))
            parts.append(TraceSpan("response", ended, self._end))
        return parts


class Tracer:
    """Decides which requests are traced."""

    def __init__(self, sink: TraceSink, *, share: float, chance: Callable[[], float] | None = None) -> None:
        self._sink = sink
        self._share = share
        self._chance = chance or Random().random  # noqa: S311 - a sample

    def start(self, endpoint: str, began_s: float, traceparent: bytes | None) -> RequestTrace | None:
        """Return the trace of a request that arrived at `began_s` of `time.perf_counter`; None if it is not traced."""
        parent = read_traceparent(traceparent)
        is_taken = self._chance() < self._share if parent is None else parent.is_sampled
        return RequestTrace(self._sink, endpoint, began_s, parent) if is_taken else None
