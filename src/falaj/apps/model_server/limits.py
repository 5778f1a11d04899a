"""The limits of a model server."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace

from falaj.records.config import ServingConfig, ServingLimits
from falaj.serving.runtime.rate_limits import RateLimit


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Limits of sizes, queues and times; beyond them requests are rejected or connections closed."""

    head_bytes: int = 64 * 1024
    body_bytes: int = 16 * 2**20
    held_bytes: int = 256 * 2**20
    """Bytes of all unanswered requests."""
    connections: int = 4096
    pipelined: int = 64
    """Pipelined requests of one connection; beyond this, reading pauses until some are answered."""
    waiting: int | None = None
    """Queued requests of one model version; None: derived from its measured cost."""
    head_s: float = 10.0
    body_s: float = 60.0
    idle_s: float = 75.0
    linger_s: float = 2.0
    """Seconds before the connection of a rejected client is closed, so that it can read the response."""
    stop_s: float = 10.0
    sweep_s: float = 0.5
    """Seconds between checks of deadlines."""
    rate: RateLimit | None = None
    """Requests of each caller to each endpoint that has no limit of its own; None: no limit."""
    threads: int = field(default_factory=lambda: os.cpu_count() or 1)
    """Threads for slow models, one per core."""


def limits_of(config: ServingConfig) -> ServerLimits:
    """Return the limits of a server; what it may hold grows with the largest body."""
    usual = ServerLimits()
    held_bytes = max(usual.held_bytes, 4 * config.max_body)
    rate = _rate_limit(config.limits)
    return replace(usual, body_bytes=config.max_body, held_bytes=held_bytes, rate=rate)


def _rate_limit(limits: ServingLimits) -> RateLimit | None:
    per_second = limits.requests_per_second
    return None if per_second is None else RateLimit(per_second, limits.burst or max(1.0, per_second))


def limits_of_replica(serving: ServingConfig) -> ServerLimits:
    """Return the limits of one of several replicas, which share the memory and the cores of the machine."""
    whole, config = limits_of(serving), serving.replicas
    return replace(
        whole,
        held_bytes=max(whole.held_bytes // config.most, 4 * whole.body_bytes),
        threads=max(1, whole.threads // max(1, config.min)),
    )
