"""Limits of how many requests each caller may send to an endpoint: a token bucket for each of them."""

from __future__ import annotations

import math
from typing import NamedTuple

from falaj.errors import RateLimited
from falaj.records.serving import Endpoint

MAX_BUCKETS = 10_000
"""Callers that are remembered; beyond this, those who could send a whole burst are forgotten."""


class RateLimit(NamedTuple):
    """Requests a second on average, and at once after a pause."""

    per_second: float
    burst: float


class RateLimits:
    """The limits of all callers of a server. Times are monotonic, and given to it."""

    def __init__(self, default: RateLimit | None = None) -> None:
        """`default` holds for endpoints that have no limit of their own."""
        self._default = default
        self._buckets: dict[tuple[str, str], tuple[float, float, RateLimit]] = {}
        """Requests that a caller may send to an endpoint at once, as of a time."""

    def require(self, endpoint: Endpoint, caller: str, now: float) -> None:
        """Count a request. Raise RateLimited if the caller has sent too many."""
        limit = self._limit_of(endpoint)
        if limit is None:
            return
        key = (endpoint.name, caller)
        left, since, _ = self._buckets.get(key) or (limit.burst, now, limit)
        left = min(limit.burst, left + (now - since) * limit.per_second)
        if left < 1:
            self._buckets[key] = (left, now, limit)
            raise _rate_limited(endpoint, limit, (1 - left) / limit.per_second)
        self._buckets[key] = (left - 1, now, limit)
        if len(self._buckets) > MAX_BUCKETS:
            self._forget(now)

    def _limit_of(self, endpoint: Endpoint) -> RateLimit | None:
        per_second = endpoint.settings.requests_per_second
        if per_second is None:
            return self._default
        return RateLimit(per_second, endpoint.settings.burst or max(1.0, per_second))

    def _forget(self, now: float) -> None:
        self._buckets = {
            key: (left, since, limit)
            for key, (left, since, limit) in self._buckets.items()
            if left + (now - since) * limit.per_second < limit.burst
        }


def _rate_limited(endpoint: Endpoint, limit: RateLimit, wait_s: float) -> RateLimited:
    return RateLimited(
        f"each caller may send {limit.per_second:g} requests a second to {endpoint.name}, and {limit.burst:g} at once; "
        f"try again in {wait_s:.3g} s",
        details={"retry_after_s": max(1, math.ceil(wait_s))},
    )
