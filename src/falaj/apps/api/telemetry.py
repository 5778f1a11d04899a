"""Metrics of the HTTP door."""

from __future__ import annotations

from prometheus_client import Counter, Histogram

REQUESTS = Counter("falaj_requests_total", "Requests by operation and status", ["operation", "status"])
SECONDS = Histogram("falaj_request_seconds", "Seconds until the answer begins", ["operation"])
