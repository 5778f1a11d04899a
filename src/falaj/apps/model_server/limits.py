"""The limits of a model server."""

from __future__ import annotations

import os
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What a server takes before it refuses, and how long it waits before it hangs up."""

    head_bytes: int = 64 * 1024
    body_bytes: int = 16 * 2**20
    held_bytes: int = 256 * 2**20
    """Bytes of all requests that are not answered yet."""
    connections: int = 4096
    pipelined: int = 64
    """Requests of one connection that may wait; reading stops until some are answered."""
    waiting: int | None = None
    """Requests that may wait for one model version; none: what its measured cost affords."""
    head_s: float = 10.0
    body_s: float = 60.0
    idle_s: float = 75.0
    linger_s: float = 2.0
    """How long a refused sender may go on sending before it is cut off, so that it can read the refusal."""
    stop_s: float = 10.0
    sweep_s: float = 0.5
    """How often deadlines are looked at."""
    threads: int = field(default_factory=lambda: os.cpu_count() or 1)
    """Threads for heavy models, one per core."""
