"""Admission through the gate's hot door: tokens and decisions from memory, felt within a second when they change."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import NamedTuple

from falaj.errors import NotFound
from falaj.governance.identity.directory import Authenticator
from falaj.governance.operations.caller import Caller
from falaj.governance.operations.gate import Gate
from falaj.governance.policy.epochs import current_epoch
from falaj.records.names import ROOT
from falaj.serving.dependencies import METRICS

INFER = "endpoints.infer"
ORIGIN = "remote:model-server"
STALE_S = 0.8
"""A decision is used only if the policy epoch was read so recently."""
REMEMBERED = 10_000


class CachedCaller(NamedTuple):
    """Whom a token belongs to, as of an epoch, and until which monotonic moment."""

    caller: Caller
    epoch: int
    until: float


class GateAdmission:
    """Who may call which endpoint, as the gate decides it; every call is counted in its audit window."""

    def __init__(self, gate: Gate, authenticator: Authenticator, clock: Callable[[], datetime]) -> None:
        self._gate = gate
        self._hot = gate.hot
        self._authenticator = authenticator
        self._clock = clock
        self._known: dict[str, CachedCaller] = {}
        self._epoch = -1
        self._read_at = float("-inf")
        self.endpoints: Mapping[str, str] = {}
        """The objects of the endpoints that are served, by their names in paths."""

    def observe(self, epoch: int) -> None:
        """The policy epoch was read just now; whoever serves calls this several times a second."""
        if epoch > self._epoch:
            self._epoch = epoch
        self._read_at = time.monotonic()

    def admit(self, credential: str, endpoint: str | None, data: bytes) -> str | None:
        known, now = self._known.get(credential), time.monotonic()
        if known is None or known.epoch < self._epoch or now > known.until or now - self._read_at > STALE_S:
            return None
        resource = self.endpoints.get(endpoint or "")
        action, resource = _of_server(endpoint) if resource is None else (INFER, resource)
        counted = self._hot.count(known.caller, action, resource, data, epoch=self._epoch)
        return known.caller.name if counted else None

    def decide(self, credential: str, endpoint: str | None) -> None:
        with self._gate.database.read() as tx:
            epoch = current_epoch(tx)
        self.observe(epoch)
        caller, until = self._authenticator.authenticate(credential, origin=ORIGIN)
        left_s = (until - self._clock()).total_seconds()
        if len(self._known) >= REMEMBERED:
            self._known.clear()
        self._known[credential] = CachedCaller(caller, epoch, time.monotonic() + left_s)
        resource = self.endpoints.get(endpoint or "")
        action, resource = _of_server(endpoint) if resource is None else (INFER, resource)
        self._hot.decide(caller, action, resource)


def _of_server(endpoint: str | None) -> tuple[str, str]:
    """The action and object for what is asked of the server itself."""
    if endpoint is None:
        return "platform.status", ROOT
    if endpoint == METRICS:
        return "platform.metrics", ROOT
    raise NotFound(f"there is no endpoint '{endpoint}' that you may call")
