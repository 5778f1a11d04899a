"""The caller and the terms of a call: context variables that the interface sets, never parameters."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from falaj.records.governance.identity import PrincipalKind
from falaj.records.names import ObjectId, PrincipalId

PLATFORM_SERVICES = frozenset({"controller", "model-server"})
"""The platform's own service accounts; their processes act without a token."""

PLATFORM_ORIGINS = frozenset({"controller", "workflow", "job"})
"""Where calls come from that the controller makes on behalf of a user; no interface sets one of these."""


@dataclass(frozen=True, slots=True)
class Caller:
    """An authenticated principal and the scope of its token (none: unlimited).

    `vouchers` are others who could hold its credential, besides those that its token names. `epoch` is the policy
    epoch in which its token was valid: in a later one the gate asks again.
    """

    id: PrincipalId
    name: str
    kind: PrincipalKind
    origin: str
    workspace: ObjectId | None = None
    actions: tuple[str, ...] | None = None
    token: str | None = None
    vouchers: tuple[str, ...] = ()
    epoch: int | None = field(default=None, compare=False)

    @property
    def is_platform(self) -> bool:
        """Whether the platform itself calls: one of its services, or the controller on behalf of a user."""
        if self.origin.partition(":")[0] in PLATFORM_ORIGINS:
            return True
        return self.kind == "service" and self.name in PLATFORM_SERVICES and self.token is None

    def may_name(self, action: str) -> bool:
        """Tell whether the token's scope covers `action`."""
        if self.actions is None:
            return True
        group = action.partition(".")[0]
        return any(pattern in ("*", action, f"{group}.*") for pattern in self.actions)


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms of a call: an idempotency `key`, and the `fence` of the lease that must still be current."""

    key: str | None = None
    fence: int | None = None
    request: str | None = None


_caller: contextvars.ContextVar[Caller | None] = contextvars.ContextVar("falaj_caller", default=None)
_terms: contextvars.ContextVar[Terms | None] = contextvars.ContextVar("falaj_terms", default=None)


def current_caller() -> Caller | None:
    return _caller.get()


def current_terms() -> Terms:
    return _terms.get() or Terms()


@contextmanager
def acting_as(caller: Caller) -> Iterator[None]:
    """Perform the operations inside for `caller`."""
    token = _caller.set(caller)
    try:
        yield
    finally:
        _caller.reset(token)


@contextmanager
def on_terms(
    *, key: str | None = None, fence: int | None = None, request: str | None = None
) -> Iterator[None]:
    """Perform the operations inside on these terms; one idempotency key is for one operation."""
    token = _terms.set(Terms(key=key, fence=fence, request=request))
    try:
        yield
    finally:
        _terms.reset(token)


@contextmanager
def once(key: str) -> Iterator[None]:
    """Make the one operation inside take effect once, however often it is retried under this key."""
    with on_terms(key=key):
        yield


def start_thread(target: Callable[..., Any], *args: Any, name: str, daemon: bool = True) -> threading.Thread:
    """Start a thread that acts for the caller who started it."""
    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(target, *args), name=name, daemon=daemon)
    thread.start()
    return thread
