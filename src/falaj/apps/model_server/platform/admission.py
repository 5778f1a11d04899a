"""Admission through the gate's hot path: cached tokens and decisions, which expire within a second of a change."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

from falaj.governance import objects
from falaj.governance.identity.directory import Authenticator
from falaj.governance.operations.caller import Caller
from falaj.governance.operations.gate import Gate
from falaj.governance.policy.epochs import current_epoch
from falaj.records.names import ROOT
from falaj.serving.dependencies import METRICS

INFER = "endpoints.infer"
ORIGIN = "remote:model-server"
MAX_EPOCH_AGE_S = 0.8
"""Cached decisions are used only if the policy epoch was read within this time."""
CACHED_CALLERS = 10_000


class CachedCaller(NamedTuple):
    """The caller of a token as of a policy epoch, valid until a monotonic time."""

    caller: Caller
    epoch: int
    until: float


class GateAdmission:
    """Admission by the decisions of the gate; every call is counted in its audit window."""

    def __init__(self, gate: Gate, authenticator: Authenticator, clock: Callable[[], datetime]) -> None:
        self._gate = gate
        self._hot = gate.hot
        self._authenticator = authenticator
        self._clock = clock
        self._callers: dict[str, CachedCaller] = {}
        self._epoch = -1
        self._read_at = float("-inf")
        self.endpoints: Mapping[str, str] = {}
        """Ids of the served endpoints by their names in paths."""

    def observe(self, epoch: int) -> None:
        """Record the current policy epoch; the server calls this several times a second."""
        if epoch > self._epoch:
            self._epoch = epoch
        self._read_at = time.monotonic()

    def recognize(self, credential: str) -> str | None:
        known = self._callers.get(credential)
        if known is None or known.epoch < self._epoch or time.monotonic() > known.until:
            return None
        return known.caller.id

    def authenticate(self, credential: str) -> str:
        return self._authenticated(credential).id

    def admit(self, credential: str, endpoint: str | None, data: bytes, *, calls: int = 1) -> str | None:
        known, now = self._callers.get(credential), time.monotonic()
        if (
            known is None
            or known.epoch < self._epoch
            or now > known.until
            or now - self._read_at > MAX_EPOCH_AGE_S
        ):
            return None
        action, resource = self._resource(endpoint)
        counted = self._hot.count(known.caller, action, resource, data, epoch=self._epoch, calls=calls)
        return known.caller.name if counted else None

    def decide(self, credential: str, endpoint: str | None) -> None:
        caller = self._authenticated(credential)
        action, resource = self._resource(endpoint)
        self._hot.decide(caller, action, resource)

    def permitted(self, credential: str, endpoints: Sequence[str]) -> Sequence[str]:
        caller = self._authenticated(credential)
        authorizer = self._gate.authorizer
        with self._gate.database.read() as tx:
            state = authorizer.state(tx)
            found = {name: objects.by_id(tx, self.endpoints.get(name, "")) for name in endpoints}
            return [
                name
                for name, endpoint in found.items()
                if endpoint is not None and authorizer.decide_in(state, tx, caller, INFER, endpoint).allowed
            ]

    def _authenticated(self, credential: str) -> Caller:
        with self._gate.database.read() as tx:
            epoch = current_epoch(tx)
        self.observe(epoch)
        caller, until = self._authenticator.authenticate(credential, origin=ORIGIN)
        left_s = (until - self._clock()).total_seconds()
        if len(self._callers) >= CACHED_CALLERS:
            self._callers.clear()
        self._callers[credential] = CachedCaller(caller, epoch, time.monotonic() + left_s)
        return caller

    def _resource(self, endpoint: str | None) -> tuple[str, str]:
        """Return the action and object of a request; a name that no endpoint has is decided about like one that has."""
        if endpoint is None:
            return "platform.status", ROOT
        if endpoint == METRICS:
            return "platform.metrics", ROOT
        return INFER, self.endpoints.get(endpoint) or f"endpoint:{endpoint}"
