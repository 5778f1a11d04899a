"""Export of traces by OTLP over HTTP, as JSON, from a thread with a bounded buffer."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from falaj.apps.model_server.tracing.spans import FinishedTrace, TraceSpan
from falaj.ports.egress import DeliveryFailed
from falaj.version import VERSION

MAX_WAITING = 4096
"""Traces that may wait; more are dropped."""
BATCH = 512
EVERY_S = 2.0
SERVER_KIND, INTERNAL_KIND = 2, 1
STATUS_OK, STATUS_ERROR = 1, 2

Send = Callable[[bytes], int]
"""Sends a body to the collector, and returns the status of its answer. Raises DeliveryFailed."""

_log = logging.getLogger(__name__)


class TraceExporter:
    """Collects finished traces, and sends them every few seconds. What cannot be sent is dropped and counted."""

    def __init__(self, send: Send, *, replica: str = "0") -> None:
        self._send = send
        self._replica = replica
        self._waiting: deque[FinishedTrace] = deque()
        self._wakeup = threading.Event()
        self._stopped = False
        self._failing = False
        self._thread: threading.Thread | None = None
        self.outcomes: Counter[str] = Counter()
        """Traces that were sent, that the collector did not take, and that found no place to wait."""

    def add(self, trace: FinishedTrace) -> None:
        if len(self._waiting) >= MAX_WAITING:
            self.outcomes["dropped"] += 1
            return
        self._waiting.append(trace)
        if len(self._waiting) == BATCH:
            self._wakeup.set()

    def start(self) -> None:
        self._thread = threading.Thread(target=self._work, name="traces", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Send what waits, and end the thread."""
        self._stopped = True
        self._wakeup.set()
        if self._thread is not None:
            self._thread.join()

    def flush(self) -> None:
        """Send what waits; after a failure the rest of it waits for the next time."""
        while self._waiting:
            batch = [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]
            try:
                status = self._send(encode_traces(batch, replica=self._replica, offset_ns=clock_offset_ns()))
                problem = None if 200 <= status < 300 else f"it answered {status}"
            except DeliveryFailed as error:
                problem = str(error)
            self.outcomes["sent" if problem is None else "failed"] += len(batch)
            if problem is not None:
                if not self._failing:
                    _log.warning("the collector of traces does not take them: %s", problem)
                self._failing = True
                return
            self._failing = False

    def _work(self) -> None:
        while not self._stopped:
            self._wakeup.wait(EVERY_S)
            self._wakeup.clear()
            try:
                self.flush()
            except Exception:
                _log.exception("exporting traces failed")


def clock_offset_ns() -> int:
    """Return what is to be added to `time.perf_counter_ns` for nanoseconds since 1970."""
    return time.time_ns() - time.perf_counter_ns()


def encode_traces(traces: Sequence[FinishedTrace], *, replica: str, offset_ns: int) -> bytes:
    """Return an ExportTraceServiceRequest of OTLP in its JSON form."""
    resource = {
        "service.name": "falaj-model-server",
        "service.version": VERSION,
        "service.instance.id": replica,
    }
    spans = [span for trace in traces for span in _spans(trace, offset_ns)]
    scope = {"scope": {"name": "falaj", "version": VERSION}, "spans": spans}
    resources = {"resource": {"attributes": _attributes(resource)}, "scopeSpans": [scope]}
    return msgspec.json.encode({"resourceSpans": [resources]})


def _spans(trace: FinishedTrace, offset_ns: int) -> Iterator[dict[str, Any]]:
    """Yield the span of the request and those within it."""
    facts = {
        "falaj.endpoint": trace.endpoint,
        "falaj.version": trace.version,
        "http.response.status_code": trace.status,
    }
    code = STATUS_OK if trace.status < 400 else STATUS_ERROR
    yield {
        "traceId": trace.trace,
        "spanId": trace.span,
        **({} if trace.parent is None else {"parentSpanId": trace.parent}),
        **_times(TraceSpan(f"infer {trace.endpoint}", trace.began, trace.ended), offset_ns),
        "kind": SERVER_KIND,
        "attributes": _attributes(facts),
        "status": {"code": code},
    }
    for part in trace.parts:
        yield {
            "traceId": trace.trace,
            "spanId": os.urandom(8).hex(),
            "parentSpanId": trace.span,
            **_times(part, offset_ns),
            "kind": INTERNAL_KIND,
        }


def _times(span: TraceSpan, offset_ns: int) -> dict[str, str]:
    """Return name and times; 64-bit numbers are texts in JSON."""
    return {
        "name": span.name,
        "startTimeUnixNano": str(span.began + offset_ns),
        "endTimeUnixNano": str(max(span.began, span.ended) + offset_ns),
    }


def _attributes(facts: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"key": key, "value": {"intValue": str(value)} if isinstance(value, int) else {"stringValue": value}}
        for key, value in facts.items()
    ]
