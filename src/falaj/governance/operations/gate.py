"""The gate: every operation is authorized, performed and recorded by `Gate.perform`."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any, TypeVar, cast

from pydantic import BaseModel

from falaj.errors import (
    Denied,
    FalajError,
    Internal,
    InvalidInput,
    NotFound,
    ProcessFailed,
    Tampered,
    Unauthenticated,
)
from falaj.governance import objects
from falaj.governance.audit.log import AuditLog, Draft
from falaj.governance.lineage import graph
from falaj.governance.operations import events, idempotency
from falaj.governance.operations.call import Call, current_call, enter, leave, running_call
from falaj.governance.operations.caller import Caller, current_caller, current_terms
from falaj.governance.operations.cursors import Cursors
from falaj.governance.operations.hot import HotPath
from falaj.governance.operations.operation import Mode, Operation, ResponseShape
from falaj.governance.policy.authorizer import SEE, Authorizer
from falaj.governance.policy.visibility import Visibility
from falaj.governance.residency.zones import ZoneRegistry
from falaj.ports.metadata import Database, Transaction
from falaj.records.governance.objects import StoredObject
from falaj.records.governance.policy import Decision
from falaj.records.names import DEFAULT_WORKSPACE, ROOT, ObjectId
from falaj.records.record import utc_now

log = logging.getLogger("falaj.gate")
R = TypeVar("R")

INTERNAL = Decision(allowed=False, rule="internal", reason="only the platform's own services may call it")
UNSEEN = Decision(allowed=False, rule="hidden", reason="the caller may not see what it refers to")


MAX_REFERENCES = 4096
"""Objects that one parameter of a call may refer to."""


class Gate:
    """Checks, performs and records operations.

    `owner` acts where no interface set a caller: in an embedded home only. `fence` returns the fencing number of the
    controller that has the lease; `holds` tells whether a caller's credential is still valid. `cursor_key` binds
    cursors; processes that answer the same callers have the same one. `failing` returns the processes of the platform
    that keep failing, each with a sentence that says so.
    """

    def __init__(
        self,
        database: Database,
        *,
        authorizer: Authorizer,
        audit: AuditLog,
        zones: ZoneRegistry,
        seal: idempotency.Seal,
        fence: Callable[[Transaction], int] | None = None,
        owner: Caller | None = None,
        holds: Callable[[Transaction, Caller, datetime | None], bool] = lambda _tx, _caller, _now: True,
        clock: Callable[[], datetime] = utc_now,
        recheck_s: float = 0.5,
        cursor_key: bytes | None = None,
        failing: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        self.database = database
        self.authorizer = authorizer
        self.audit = audit
        self.zones = zones
        self.clock = clock
        self.failing = failing
        self._seal = seal
        self._fence = fence
        self._owner = owner
        self._holds = holds
        self._recheck_s = recheck_s
        self.cursors = Cursors(cursor_key or os.urandom(32))
        self.hot = HotPath(database, authorizer=authorizer, audit=audit, clock=clock)

    def perform(self, operation: Operation, service: Any, given: BaseModel) -> Any:
        """Authorize `operation`, run its body and record the outcome."""
        if running_call() is not None:
            raise RuntimeError(
                f"{operation.name} was called inside {current_call().operation.name}: use its store"
            )
        caller = current_caller() or self._owner
        if caller is None:
            raise Unauthenticated("no caller, no action: present a token")
        call = Call(operation, caller, given, current_terms(), self.clock())
        token = enter(call)
        try:
            return self._run(call, service)
        except FalajError as error:
            self._record_failure(call, error)
            raise
        except Exception as error:
            log.exception("operation failed", extra={"action": operation.name, "request": call.terms.request})
            self._record_failure(call, Internal(type(error).__name__))
            raise Internal(f"{operation.name} failed; the platform's log says why") from error
        finally:
            leave(token)

    def require_running(self, process: str) -> None:
        """Raise ProcessFailed if a process of the platform keeps failing: nobody should wait for what it does."""
        if (sentence := self.failing().get(process)) is not None:
            raise ProcessFailed(sentence)

    def reject(self, operation: Operation, error: FalajError) -> None:
        """Record a call whose input was not valid."""
        caller = current_caller() or self._owner
        if caller is not None:
            call = Call(operation, caller, operation.input.model_construct(), current_terms(), self.clock())
            call.digest = self.audit.digest(b"")
            self._record_failure(call, error)

    def commit(self, call: Call, work: Callable[[], R]) -> R:
        """Do `work` and record it in the one transaction of `call`; a repeated key gets its first answer."""
        call.digest = call.digest or self._input_digest(call)
        with self.database.write() as plain:
            call._tx = tx = self.audit.recording(plain)
            try:
                if (answer := idempotency.claim(call, tx, self._seal)) is not None:
                    self._admit_again(call, tx)
                    self.audit.append(tx, [self._draft(call, rule="replayed")])
                    return cast(R, answer.value)
                self._hold_fence(call)
                self._admit(call, tx)
                result = work()
                graph.record(call)
                idempotency.remember(call, tx, self._seal, result)
                events.emit(call, self.audit.append(tx, [self._draft(call)]))
                return result
            finally:
                call._tx = None

    def _admit_again(self, call: Call, tx: Transaction) -> None:
        """Authorize a repeated call again, unless its target is gone: it may have deleted it."""
        try:
            self._admit(call, tx)
        except NotFound:
            if call.decision is not None and not call.decision.allowed:
                raise

    def visible(self, found: Sequence[StoredObject], *, action: str = SEE) -> list[StoredObject]:
        """Return those of `found` that the caller of the running operation may see."""
        return [*filter(self.visibility(action).allows, found)]

    def visibility(self, action: str = SEE) -> Visibility:
        """Return what the caller of the running operation may see, or do `action` on."""
        call = current_call()
        caller = replace(call.caller, actions=None) if action == SEE else call.caller
        return Visibility(self.authorizer, call.tx, caller, action)

    def named(
        self, call: Call, kind: str, name: str, *, workspace: StoredObject, tx: Transaction | None = None
    ) -> StoredObject | None:
        """Return the object of that name, which the body is about to change; NotFound if the caller may not see it."""
        tx = tx or call.tx
        found = objects.by_name(tx, workspace=workspace.id, kind=kind, name=name)
        if found is not None and not self.authorizer.sees(tx, call.caller, found):
            raise objects.unknown(name, kind)
        return found

    def require(
        self,
        call: Call,
        action: str,
        found: StoredObject,
        *,
        tx: Transaction | None = None,
        reference: str | None = None,
    ) -> None:
        """Raise Denied unless the caller may do `action` on `found` too, or NotFound if they may not see it.

        The error names the `reference` that the caller gave, if the body resolved it: the caller may not know the name.
        """
        tx = tx or call.tx
        decision = self.authorizer.decide(tx, call.caller, action, found)
        if decision.allowed:
            return
        if not self.authorizer.sees(tx, call.caller, found):
            raise objects.unknown(reference or found.name, found.kind)
        raise Denied(f"{call.caller.name} may not {action} on {found.address}: {decision.reason}")

    def _run(self, call: Call, service: Any) -> Any:
        self._refuse_internal(call)
        if call.operation.mode is Mode.READ:
            return self._read(call, service)
        if call.operation.mode is Mode.FREE:
            return self._read_freely(call, service)
        if call.operation.mode is Mode.HOT:
            return self._pass_hot(call, service)
        call.digest = self._input_digest(call)
        if call.operation.mode is Mode.WRITE:
            return self.commit(call, lambda: self._body(call, service))
        with self.database.read() as tx:
            self._admit(call, tx)
        return self._body(call, service)

    def _refuse_internal(self, call: Call) -> None:
        """Raise Denied for an internal operation that a user calls, whatever roles they have."""
        if call.operation.internal and not call.caller.is_platform:
            call.decision = INTERNAL
            raise Denied(
                f"{call.operation.name} is an internal operation: {INTERNAL.reason}",
                details={"rule": INTERNAL.rule, "roles": [], "action": call.operation.name, "needs": ""},
            )

    def _read(self, call: Call, service: Any) -> Any:
        with self.database.read() as tx:
            call._tx = tx
            self._admit(call, tx)
            result = self._body(call, service)
            call._tx = None
        self.audit.append_or_hold(self._draft(call))
        return result if call.operation.shape is ResponseShape.RECORD else self._watched(call, result)

    def _read_freely(self, call: Call, service: Any) -> Any:
        with self.database.read() as tx:
            self._admit(call, tx)
        self.audit.append_or_hold(self._draft(call))
        result = self._body(call, service)
        return result if call.operation.shape is ResponseShape.RECORD else self._watched(call, result)

    def _pass_hot(self, call: Call, service: Any) -> Any:
        """Perform a hot operation; a target named by id is not looked up, and the body gets `call.hot_id`."""
        subject, ident = call.operation.subject, str(ROOT)
        with self.database.read() as tx:
            self._require_valid_token(call, tx)
            epoch = self.authorizer.state(tx).epoch
        if subject is not None:
            asked = getattr(call.given, subject)
            ident = asked if objects.is_id(asked) else self._hot_id(call, asked)
        call.hot_id = ObjectId(ident)
        try:
            asked = self.zones.require_download if call.operation.hands_out else None
            data = call.operation.recorded_input(call.given)
            self.hot.admit(call.caller, call.operation.name, ident, data, residency=asked, epoch=epoch)
        except FalajError:
            call.recorded = True
            raise
        return self._body(call, service)

    def _hot_id(self, call: Call, asked: str) -> ObjectId:
        kind = call.operation.references[cast(str, call.operation.subject)].kind
        with self.database.read() as tx:
            return self._resolve(call, tx, asked, kind, judged_by=(call.operation.name, SEE)).id

    def _body(self, call: Call, service: Any) -> Any:
        given = {name: getattr(call.given, name) for name in call.operation.parameters}
        return call.operation.body(service, **given)

    def _watched(self, call: Call, stream: Any) -> Any:
        """Wrap a stream so that it stops when its caller may no longer read it."""
        if call.operation.shape is ResponseShape.ARROW:
            import pyarrow as pa

            return pa.RecordBatchReader.from_batches(stream.schema, self._rechecked(call, iter(stream)))
        return self._rechecked(call, stream)

    def _rechecked(self, call: Call, stream: Iterator[Any]) -> Iterator[Any]:
        due = time.monotonic() + self._recheck_s
        try:
            for item in stream:
                if time.monotonic() >= due:
                    self._recheck(call)
                    due = time.monotonic() + self._recheck_s
                yield item
        except FalajError as error:
            self._record_failure(call, error)
            raise
        except Exception as error:
            log.exception(
                "stream failed", extra={"action": call.operation.name, "request": call.terms.request}
            )
            raise Internal(f"{call.operation.name} broke; the platform's log says why") from error

    def _recheck(self, call: Call) -> None:
        with self.database.read() as tx:
            if not self._holds(tx, call.caller, self.clock()):
                raise Unauthenticated("the token was revoked, or expired, while this stream was open")
            call.decision = self.authorizer.decide(tx, call.caller, call.operation.name, call.target)
            if not call.decision.allowed:
                raise self._refusal(call, tx, call.target.name)

    def _admit(self, call: Call, tx: Transaction) -> None:
        """Resolve what the call refers to, and check policy and residency."""
        self._require_valid_token(call, tx)
        call.referred.clear()
        self._find_target(call, tx)
        for parameter in call.operation.references:
            if parameter not in call.referred:
                self._find_others(call, tx, parameter)
        if call.operation.hands_out:
            seen = partial(self.authorizer.sees, tx, call.caller)
            self.zones.require_download(tx, self._inputs(call), call.caller.origin, seen=seen)
        if call.operation.placements:
            zone = self.zones.named(getattr(call.given, call.operation.placements[0]))
            call.zone = zone.name
            seen = partial(self.authorizer.sees, tx, call.caller)
            self.zones.require(tx, [*self._inputs(call), self._home(tx, call.target)], zone, seen=seen)

    def _require_valid_token(self, call: Call, tx: Transaction) -> None:
        """Raise Unauthenticated if the caller's token was revoked, or the caller disabled, since it was recognized."""
        known = call.caller.epoch
        if known is None or known == self.authorizer.state(tx).epoch:
            return
        if not self._holds(tx, call.caller, call.now):
            raise Unauthenticated("the token was revoked, or has expired; ask an administrator for a new one")

    def _inputs(self, call: Call) -> list[StoredObject]:
        return [found for group in call.referred.values() for found in group]

    def _find_target(self, call: Call, tx: Transaction) -> None:
        """Resolve the target. Unless named, the workspace is the caller's own, and the user is the caller."""
        op = call.operation
        asked: str = ROOT
        if op.subject is None:
            call.resource = objects.resolve(tx, ROOT, kind="workspace", workspace=ROOT)
        else:
            kind = op.references[op.subject].kind
            own = call.caller.id if kind == "user" else self._workspace_name(call, tx)
            asked = getattr(call.given, op.subject) or own
            call.resource = self._resolve(call, tx, asked, kind, judged_by=(op.name, SEE))
            call.referred[op.subject] = [call.resource]
        call.decision = self.authorizer.decide(tx, call.caller, op.name, call.resource)
        if not call.decision.allowed:
            raise self._refusal(call, tx, asked)

    def _find_others(self, call: Call, tx: Transaction, parameter: str) -> None:
        """Resolve the other objects that the call refers to, each once; the caller must be allowed to see them."""
        value, kind = getattr(call.given, parameter), call.operation.references[parameter].kind
        names = () if value is None else (value,) if isinstance(value, str) else value
        if len(names) > MAX_REFERENCES:
            raise InvalidInput.at(
                parameter, given=f"{len(names)} references", allowed=f"at most {MAX_REFERENCES}"
            )
        found: dict[str, StoredObject] = {}
        for name in dict.fromkeys(names):
            found[name] = self._resolve(call, tx, name, kind, judged_by=(SEE,))
            if not self.authorizer.sees(tx, call.caller, found[name]):
                call.decision = UNSEEN
                raise objects.unknown(name, kind)
        call.referred[parameter] = [found[name] for name in names]

    def _resolve(
        self, call: Call, tx: Transaction, name: str, kind: str | None, *, judged_by: Sequence[str]
    ) -> StoredObject:
        """Return what `name` names. If that is nothing, it is judged by the same actions as what the caller may not
        see, so that neither the answer nor the time that it takes tells one from the other."""
        workspace = self._workspace_name(call, tx)
        try:
            return objects.resolve(tx, name, kind=kind, workspace=workspace)
        except NotFound:
            missing = objects.stand_in(tx, name, kind=kind, workspace=workspace)
            for action in judged_by:
                self._judge(call, tx, action, missing)
            raise

    def _judge(self, call: Call, tx: Transaction, action: str, found: StoredObject) -> None:
        if action == SEE:
            self.authorizer.sees(tx, call.caller, found)
        else:
            self.authorizer.decide(tx, call.caller, action, found)

    def _refusal(self, call: Call, tx: Transaction, asked: str) -> FalajError:
        """Return Denied, or NotFound if the caller may not know of the object."""
        found, decision = call.target, cast(Decision, call.decision)
        if found.id != ROOT and not self.authorizer.sees(tx, call.caller, found):
            return objects.unknown(asked, call.operation.references[cast(str, call.operation.subject)].kind)
        return Denied(
            f"{call.caller.name} may not {call.operation.name} on {found.address}: {decision.reason}",
            details={
                "rule": decision.rule,
                "roles": list(decision.roles),
                "action": call.operation.name,
                "needs": " or ".join(decision.roles),
            },
        )

    def _workspace_name(self, call: Call, tx: Transaction) -> str:
        if call.caller.workspace is None:
            return DEFAULT_WORKSPACE
        scope = objects.by_id(tx, call.caller.workspace)
        return scope.name if scope is not None else DEFAULT_WORKSPACE

    def _home(self, tx: Transaction, found: StoredObject) -> StoredObject:
        """Return the workspace of `found`."""
        return objects.resolve(tx, found.home, kind="workspace", workspace=ROOT)

    def _hold_fence(self, call: Call) -> None:
        if call.terms.fence is not None and self._fence is not None:
            idempotency.hold_fence(call.terms.fence, self._fence(call.tx))

    def _input_digest(self, call: Call) -> str:
        return self.audit.digest(call.operation.recorded_input(call.given))

    def _draft(self, call: Call, *, outcome: str = "done", rule: str | None = None) -> Draft:
        """Return the audit entry of `call`."""
        target = call.resource
        referred = [found.id for group in call.referred.values() for found in group]
        decided = call.decision.rule if call.decision is not None else "none"
        draft: Draft = {
            "at": call.now,
            "caller": call.caller.name,
            "action": call.operation.name,
            "outcome": outcome,
            "objects": referred or ([] if target is None else [target.id]),
            "workspace": None if target is None else target.home,
            "origin": call.caller.origin,
            "rule": rule or decided,
            "input": call.digest or self._input_digest(call),
        }
        optional = {
            "request": call.terms.request,
            "token": call.caller.token,
            "created": [new.id for new in call.created],
            "published": call.published,
        }
        # What an operation adds comes first: it cannot say otherwise than the gate who did what, and how it ended.
        return call.details | draft | {key: value for key, value in optional.items() if value}

    def _record_failure(self, call: Call, error: FalajError) -> None:
        """Append the entry of a call that was rolled back, in a transaction of its own."""
        if call.recorded:
            return
        call.created.clear()
        call.published.clear()
        call.details.clear()
        outcome = "denied" if isinstance(error, Denied) or _hidden(call, error) else "failed"
        draft = self._draft(call, outcome=outcome) | {"error": error.code}
        try:
            self.audit.append_or_hold(draft)
        except Exception:
            log.critical("failed to record a failed operation", exc_info=True, extra=_plain(draft))
            if not isinstance(error, Tampered):
                raise


def _hidden(call: Call, error: FalajError) -> bool:
    """Tell whether `error` is NotFound because policy denies."""
    return error.code == "object.not_found" and call.decision is not None and not call.decision.allowed


def _plain(draft: Draft) -> dict[str, Any]:
    return {"action": draft["action"], "caller_name": draft["caller"], "error_code": draft["error"]}
