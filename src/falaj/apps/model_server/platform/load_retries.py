"""When to try again to load a model version: with growing pauses, and only while another attempt can help."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from falaj.apps.model_server.platform.recorder import VersionKey
from falaj.errors import Conflict, Damaged, Denied, FalajError, InvalidInput, NotFound

MIN_RETRY_S, MAX_RETRY_S = 10.0, 600.0
"""Seconds before the first further attempt, and between two at most; each pause is twice the one before."""

PERMANENT_ERRORS = (InvalidInput, NotFound, Conflict, Damaged, Denied)
"""What another attempt cannot mend, such as a file that is no model; a change of the deployment or a policy may."""

NEVER = float("inf")


@dataclass(frozen=True)
class _FailedLoad:
    wanted: Hashable
    problem: str
    retry_at: float
    pause_s: float


class LoadRetries:
    """The versions that could not be loaded, and when to try again. Times are monotonic, and given to it."""

    def __init__(self) -> None:
        self._failed: dict[VersionKey, _FailedLoad] = {}

    @property
    def next_at(self) -> float:
        """Return when the next attempt is due; infinity if none is."""
        return min((each.retry_at for each in self._failed.values()), default=NEVER)

    def problem(self, key: VersionKey, wanted: Hashable, now: float) -> str | None:
        """Return why a version cannot be loaded, unless an attempt is due or what is `wanted` has changed."""
        known = self._failed.get(key)
        return known.problem if known and known.wanted == wanted and now < known.retry_at else None

    def failed(self, key: VersionKey, wanted: Hashable, error: FalajError, now: float) -> bool:
        """Note a failed attempt; return whether its reason is a new one."""
        known, problem = self._failed.get(key), str(error)
        again = known is not None and known.wanted == wanted
        pause_s = min(2 * known.pause_s, MAX_RETRY_S) if again and known is not None else MIN_RETRY_S
        retry_at = NEVER if isinstance(error, PERMANENT_ERRORS) else now + pause_s
        self._failed[key] = _FailedLoad(wanted, problem, retry_at, pause_s)
        return not again or known is None or known.problem != problem

    def keep(self, failing: set[VersionKey]) -> None:
        """Forget all versions but those that still fail."""
        self._failed = {key: each for key, each in self._failed.items() if key in failing}
