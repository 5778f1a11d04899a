"""Weighted routing of requests to versions: by hash of a key, or round robin without one."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from itertools import count
from math import gcd, log

from falaj.records.serving.endpoints import Route

HASH_BITS = 64


class WeightedRouter:
    """Chooses a version by weight. The same key always gets the same version while the weights stay the same.

    Versions are chosen by weighted rendezvous hashing: no process has state, and when weights change, keys move only
    to versions whose weight has grown in relation to theirs. `name` is that of the endpoint: two endpoints divide the
    same keys independently, so that one experiment does not bias another.
    """

    def __init__(self, routes: Sequence[Route], *, name: str = "", counter: count[int] | None = None) -> None:
        self.counter = counter or count()
        self._pattern = weighted_round_robin(routes)
        self._only = self._pattern[0] if len(set(self._pattern)) == 1 else None
        self._hashes = [
            (route.version, route.weight, _hash_of(name, route.version)) for route in routes if route.weight
        ]

    @property
    def only(self) -> str | None:
        """Return the version that gets all requests, if one does."""
        return self._only

    def choose(self, key: str) -> str:
        """Return the version for a key; without one, the next in turn."""
        if self._only is not None:
            return self._only
        if not key:
            return self._pattern[next(self.counter) % len(self._pattern)]
        text = key.encode("utf-8", "surrogatepass")
        best, chosen = -1.0, ""
        for version, weight, start in self._hashes:
            hashed = start.copy()
            hashed.update(text)
            place = (int.from_bytes(hashed.digest(), "big") + 0.5) / (1 << HASH_BITS)
            score = weight / -log(place) if place < 1.0 else float("inf")
            if score > best:
                best, chosen = score, version
        return chosen


def _hash_of(name: str, version: str) -> blake2b:
    """Return the beginning of the hash of every key for one version; the lengths keep the parts apart."""
    return blake2b(f"{len(name)}:{name}{len(version)}:{version}".encode(), digest_size=HASH_BITS // 8)


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
