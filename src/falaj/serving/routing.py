"""Weighted routing of requests to versions: by hash of the request id, or round robin without one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from math import gcd
from zlib import crc32

from falaj.records.serving import Route


class WeightedRouter:
    """Chooses a version by weight. The same request id always gets the same version."""

    def __init__(self, routes: Sequence[Route], *, counter: count[int] | None = None) -> None:
        self.counter = counter or count()
        self._pattern = weighted_round_robin(routes)
        self._only = self._pattern[0] if len(set(self._pattern)) == 1 else None

    def choose(self, request: str) -> str:
        """Return the version for a request id, which may be empty."""
        if self._only is not None:
            return self._only
        number = crc32(request.encode()) if request else next(self.counter)
        return self._pattern[number % len(self._pattern)]


def weighted_round_robin(routes: Sequence[Route]) -> tuple[str, ...]:
    """Return a cycle of versions in proportion to their weights (smooth weighted round robin)."""
    weighted = [route for route in routes if route.weight]
    divisor = gcd(*(route.weight for route in weighted))
    weights = {route.version: route.weight // divisor for route in weighted}
    credit = dict.fromkeys(weights, 0)
    total = sum(weights.values())
    pattern: list[str] = []
    for _ in range(total):
        for version, weight in weights.items():
            credit[version] += weight
        chosen = max(credit, key=credit.__getitem__)
        credit[chosen] -= total
        pattern.append(chosen)
    return tuple(pattern)
