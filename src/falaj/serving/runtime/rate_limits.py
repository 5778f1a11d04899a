"""Limits of how many requests each caller may send to an endpoint: a token bucket for each of them."""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

from falaj.errors import RateLimited
from falaj.records.serving.endpoints import Endpoint

MAX_BUCKETS = 10_000
"""Callers that are remembered; beyond this, those who could send a whole burst are forgotten."""


EPSILON = 1e-6
"""Requests; what sums of times are inexact by."""


class RateLimit(NamedTuple):
    """Requests a second on average, and at once after a pause."""

    per_second: float
    burst: float


class Buckets(Protocol):
    """Remembers when the bucket of a caller at an endpoint is full again."""

    def full_at(self, key: tuple[str, str]) -> float: ...
    def fill(self, key: tuple[str, str], full_at: float, now: float) -> None: ...


class LocalBuckets:
    """The buckets of one process."""

    def __init__(self) -> None:
        self._times: dict[tuple[str, str], float] = {}

    def __len__(self) -> int:
        return len(self._times)

    def full_at(self, key: tuple[str, str]) -> float:
        return self._times.get(key, 0.0)

    def fill(self, key: tuple[str, str], full_at: float, now: float) -> None:
        self._times[key] = full_at
        if len(self._times) > MAX_BUCKETS:
            self._times = {key: time for key, time in self._times.items() if time > now}


class RateLimits:
    """The limits of all callers of a server. Times are monotonic, and given to it."""

    def __init__(self, default: RateLimit | None = None) -> None:
        """`default` holds for endpoints that have no limit of their own."""
        self._default = default
        self.buckets: Buckets = LocalBuckets()
        """Those of this process, or those that replicas share."""

    def is_limited(self, endpoint: Endpoint) -> bool:
        """Tell whether requests for an endpoint are to be counted at all."""
        return self._limit_of(endpoint) is not None

    def require(self, endpoint: Endpoint, caller: str, now: float) -> None:
        """Count a request. Raise RateLimited if the caller has sent too many."""
        limit = self._limit_of(endpoint)
        if limit is None:
            return
        key = (endpoint.name, caller)
        full_at = max(self.buckets.full_at(key), now)
        left = limit.burst - (full_at - now) * limit.per_second
        if left < 1 - EPSILON:
            raise _rate_limited(endpoint, limit, (1 - left) / limit.per_second)
        self.buckets.fill(key, full_at + 1 / limit.per_second, now)

    def _limit_of(self, endpoint: Endpoint) -> RateLimit | None:
        per_second = endpoint.settings.requests_per_second
        if per_second is None:
            return self._default
        return RateLimit(per_second, endpoint.settings.burst or max(1.0, per_second))


def _rate_limited(endpoint: Endpoint, limit: RateLimit, wait_s: float) -> RateLimited:
    return RateLimited(
        f"each caller may send {limit.per_second:g} requests a second to {endpoint.name}, and {limit.burst:g} at once; "
        f"try again in {wait_s:.3g} s",
        details={"retry_after_s": max(1, math.ceil(wait_s))},
    )
