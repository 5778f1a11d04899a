"""The hot path: decisions from memory, and one audit entry per caller, object and window instead of one per call."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Protocol

from falaj.errors import Denied, ResidencyDenied
from falaj.governance import objects
from falaj.governance.audit.log import AuditLog, Draft
from falaj.governance.operations.caller import Caller
from falaj.governance.policy.authorizer import Authorizer
from falaj.governance.policy.epochs import RecentEpoch
from falaj.ports.metadata import Database, Transaction
from falaj.records.governance.objects import StoredObject
from falaj.records.governance.policy import Decision
from falaj.records.names import DEFAULT_WORKSPACE, ROOT

WINDOW = timedelta(seconds=10)

_Key = tuple[str, str | None, str, str, str]


class ResidencyCheck(Protocol):
    """Raises ResidencyDenied if data of `found` may not go to where `origin` is."""

    def __call__(
        self,
        tx: Transaction,
        found: Sequence[StoredObject],
        origin: str,
        *,
        seen: Callable[[StoredObject], bool],
    ) -> None: ...


class HotPath:
    """Authorizes calls in microseconds. A revoked token or changed policy takes effect within a second."""

    def __init__(
        self,
        database: Database,
        *,
        authorizer: Authorizer,
        audit: AuditLog,
        clock: Callable[[], datetime],
        window: timedelta = WINDOW,
    ) -> None:
        self._database = database
        self._authorizer = authorizer
        self._audit = audit
        self._clock = clock
        self._length = window
        self._epoch = RecentEpoch(database)
        self._windows: dict[_Key, _Window] = {}
        self._ended: list[_Window] = []
        self._lock = threading.Lock()

    def admit(
        self,
        caller: Caller,
        action: str,
        resource: str,
        data: bytes = b"",
        *,
        residency: ResidencyCheck | None = None,
        epoch: int | None = None,
    ) -> None:
        """Authorize `action` of `caller` on the object `resource`, or raise; `data` goes into the window's digest.

        `residency` asks whether data of the object may go to where the caller is. `epoch` is the policy epoch now;
        if it is not given, one that was read within a second will do.
        """
        key = _key(caller, action, resource)
        window = self._windows.get(key)
        least = self._epoch.value() if epoch is None else epoch
        while window is None or window.epoch < least or not window.count_in(data):
            window = self._open(caller, action, resource, residency)

    def decide(self, caller: Caller, action: str, resource: str) -> None:
        """Make the decision for `count`, or raise. It reads the database: do not call it on an event loop."""
        self._open(caller, action, resource)

    def count(
        self, caller: Caller, action: str, resource: str, data: bytes, *, epoch: int, calls: int = 1
    ) -> bool:
        """Count calls without I/O; false if no decision of `epoch` or later is in memory: call `decide` first.

        `data` is that of all calls, one after another: the digest is the same as if each was counted alone.
        """
        window = self._windows.get(_key(caller, action, resource))
        return window is not None and window.epoch >= epoch and window.count_in(data, calls)

    def flush(self, *, all_windows: bool = False) -> None:
        """Append the entries of windows that have ended, or of all."""
        now = self._clock()
        with self._lock:
            over = [k for k, w in self._windows.items() if all_windows or now - w.since >= self._length]
            self._ended += [self._windows.pop(key) for key in over]
        self._write_ended()

    def _write_ended(self) -> None:
        """Append windows that have ended; what cannot be appended now is retried, so that no call goes uncounted."""
        while True:
            with self._lock:
                if not self._ended:
                    return
                window = self._ended.pop()
            try:
                self._audit.append_grouped(window.draft(self._clock(), self._audit))
            except BaseException:
                with self._lock:
                    self._ended.append(window)
                raise

    def _open(
        self, caller: Caller, action: str, resource: str, residency: ResidencyCheck | None = None
    ) -> _Window:
        with self._database.read() as tx:
            found = objects.by_id(tx, resource)
            judged = found or objects.stand_in(tx, resource, kind=None, workspace=DEFAULT_WORKSPACE)
            decision = self._authorizer.decide(tx, caller, action, judged)
            seen = judged.id == ROOT or self._authorizer.sees(tx, caller, judged)
            epoch = self._authorizer.state(tx).epoch
        if found is None or not decision.allowed:
            self._refuse(caller, action, found, decision)
            raise (
                objects.unknown(resource, None)
                if found is None or not seen
                else Denied(f"{caller.name} may not {action} on {found.address}: {decision.reason}")
            )
        if residency is not None:
            self._require_residency(caller, action, found, residency)
        window = _Window(epoch, _entry(caller, action, found, decision.rule, self._clock()))
        key = _key(caller, action, resource)
        with self._lock:
            self._ended += [replaced] if (replaced := self._windows.get(key)) is not None else []
            self._windows[key] = window
        self._write_ended()
        return window

    def _require_residency(
        self, caller: Caller, action: str, found: StoredObject, residency: ResidencyCheck
    ) -> None:
        try:
            with self._database.read() as tx:
                residency(tx, [found], caller.origin, seen=partial(self._authorizer.sees, tx, caller))
        except ResidencyDenied as error:
            entry = _entry(caller, action, found, "residency", self._clock())
            denial = {"outcome": "denied", "error": error.code, "input": self._audit.digest(b"")}
            self._audit.append_grouped(entry | denial)
            raise

    def _refuse(self, caller: Caller, action: str, found: StoredObject | None, decision: Decision) -> None:
        """Append the entry of a call that was denied."""
        rule = "unknown" if found is None else decision.rule
        entry = _entry(caller, action, found, rule, self._clock())
        denial = {"outcome": "denied", "error": Denied.code, "input": self._audit.digest(b"")}
        self._audit.append_grouped(entry | denial)


class _Window:
    """The calls of one caller on one object since `since`, counted and digested."""

    __slots__ = ("closed", "count", "digest", "entry", "epoch", "lock", "since")

    def __init__(self, epoch: int, entry: Draft) -> None:
        self.epoch = epoch
        self.entry = entry
        self.since: datetime = entry["at"]
        self.count = 0
        self.closed = False
        self.digest: Any = hashlib.sha256()
        self.lock = threading.Lock()

    def count_in(self, data: bytes, calls: int = 1) -> bool:
        """Count calls; false if this window was appended already."""
        with self.lock:
            if self.closed:
                return False
            self.count += calls
            self.digest.update(data)
            return True

    def draft(self, until: datetime, audit: AuditLog) -> Draft:
        with self.lock:
            self.closed = True
            return self.entry | {
                "count": self.count,
                "until": until,
                "input": audit.digest(self.digest.digest()),
            }


def _key(caller: Caller, action: str, resource: str) -> _Key:
    """What is decided and counted together; one token may be used from several places."""
    return (caller.id, caller.token, action, resource, caller.origin)


def _entry(caller: Caller, action: str, found: StoredObject | None, rule: str, at: datetime) -> Draft:
    entry: Draft = {
        "at": at,
        "caller": caller.name,
        "action": action,
        "outcome": "done",
        "objects": [] if found is None else [found.id],
        "workspace": None if found is None else found.home,
        "origin": caller.origin,
        "rule": rule,
    }
    return entry | ({"token": caller.token} if caller.token else {})
