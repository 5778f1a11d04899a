"""The gate: nothing happens in the platform but through `Gate.perform`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import Any, TypeVar, cast

from pydantic import BaseModel

from falaj.errors import Denied, FalajError, Internal, Unauthenticated
from falaj.governance import idempotency, lineage_store, objects, outbox
from falaj.governance.audit.log import AuditLog, Draft
from falaj.governance.call import Call, current_call, enter, leave, running_call
from falaj.governance.caller import Caller, current_caller, current_terms
from falaj.governance.hot import HotDoor
from falaj.governance.operations import Mode, Operation, Shape
from falaj.governance.policy.authorizer import Authorizer
from falaj.governance.residency import Zones
from falaj.ports.metadata import Database, Transaction
from falaj.records.names import DEFAULT_WORKSPACE, ROOT
from falaj.records.objects import StoredObject
from falaj.records.policy import Decision
from falaj.records.record import utc_now

log = logging.getLogger("falaj.gate")
R = TypeVar("R")

SEE = "object.show"
"""The action that decides whether a caller may know of an object at all."""


class Gate:
    """Checks, performs and records operations. `owner` acts where no door set a caller: in an embedded home only."""

    def __init__(
        self,
        database: Database,
        *,
        authorizer: Authorizer,
        audit: AuditLog,
        zones: Zones,
        seal: idempotency.Seal,
        fence: Callable[[Transaction], int] | None = None,
        owner: Caller | None = None,
        clock: Callable[[], datetime] = utc_now,
        recheck_s: float = 0.5,
    ) -> None:
        self.database = database
        self.authorizer = authorizer
        self.audit = audit
        self.zones = zones
        self.clock = clock
        self._seal = seal
        self._fence = fence
        self._owner = owner
        self._recheck_s = recheck_s
        self.hot = HotDoor(database, authorizer=authorizer, audit=audit, clock=clock)

    def perform(self, operation: Operation, room: Any, given: BaseModel) -> Any:
        """Check `operation`, run its body, record what came of it."""
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
            return self._run(call, room)
        except FalajError as error:
            self._record_failure(call, error)
            raise
        except Exception as error:
            log.exception("operation failed", extra={"action": operation.name, "request": call.terms.request})
            self._record_failure(call, Internal(type(error).__name__))
            raise Internal(f"{operation.name} failed; the platform's log says why") from error
        finally:
            leave(token)

    def reject(self, operation: Operation, error: FalajError) -> None:
        """Record a call that did not get as far as the gate: its input was not valid."""
        caller = current_caller() or self._owner
        if caller is not None:
            call = Call(operation, caller, operation.input.model_construct(), current_terms(), self.clock())
            call.digest = self.audit.digest(b"")
            self._record_failure(call, error)

    def commit(self, call: Call, work: Callable[[], R]) -> R:
        """Do `work` in the one transaction of `call`, and all that records it; a repeated key gets its first answer."""
        with self.database.write() as tx:
            call._tx = tx
            try:
                if (answer := idempotency.claim(call, tx, self._seal)) is not None:
                    self.audit.append(tx, [self._draft(call, rule="replayed")])
                    return cast(R, answer.value)
                self._hold_fence(call)
                self._admit(call, tx)
                result = work()
                lineage_store.record(call)
                outbox.emit(call)
                idempotency.remember(call, tx, self._seal, result)
                self.audit.append(tx, [self._draft(call)])
                return result
            finally:
                call._tx = None

    def visible(self, found: Sequence[StoredObject], *, action: str = SEE) -> list[StoredObject]:
        """Those of `found` that the caller of the running operation may see."""
        call = current_call()
        return [each for each in found if self.authorizer.decide(call.tx, call.caller, action, each).allowed]

    def _run(self, call: Call, room: Any) -> Any:
        if call.operation.mode is Mode.READ:
            return self._read(call, room)
        if call.operation.mode is Mode.HOT:
            return self._pass_hot(call, room)
        call.digest = self._input_digest(call)
        if call.operation.mode is Mode.WRITE:
            return self.commit(call, lambda: self._body(call, room))
        with self.database.read() as tx:
            answer = idempotency.recall(call, tx, self._seal)
            if answer is None:
                self._admit(call, tx)
        if answer is not None:
            self.audit.append_grouped(self._draft(call, rule="replayed"))
            return answer.value
        return self._body(call, room)

    def _read(self, call: Call, room: Any) -> Any:
        with self.database.read() as tx:
            call._tx = tx
            self._admit(call, tx)
            result = self._body(call, room)
            call._tx = None
        self.audit.append_grouped(self._draft(call))
        return result if call.operation.shape is Shape.RECORD else self._watched(call, result)

    def _pass_hot(self, call: Call, room: Any) -> Any:
        """A hot operation is on the platform itself, or its door calls `hot.admit` with the object's id."""
        self.hot.admit(call.caller, call.operation.name, ROOT, call.given.model_dump_json().encode())
        return self._body(call, room)

    def _body(self, call: Call, room: Any) -> Any:
        given = {name: getattr(call.given, name) for name in call.operation.parameters}
        return call.operation.body(room, **given)

    def _watched(self, call: Call, stream: Any) -> Any:
        """A stream that stops when its caller is no longer allowed to read it."""
        if call.operation.shape is Shape.ARROW:
            import pyarrow as pa

            return pa.RecordBatchReader.from_batches(stream.schema, self._rechecked(call, iter(stream)))
        return self._rechecked(call, stream)

    def _rechecked(self, call: Call, stream: Iterator[Any]) -> Iterator[Any]:
        due = time.monotonic() + self._recheck_s
        for item in stream:
            if time.monotonic() >= due:
                with self.database.read() as tx:
                    self._authorize(call, tx, call.target, call.operation.name)
                due = time.monotonic() + self._recheck_s
            yield item

    def _admit(self, call: Call, tx: Transaction) -> None:
        """Find what the call refers to, and ask policy and residency about it."""
        self._refer(call, tx)
        call.decision = self._authorize(call, tx, call.target, call.operation.name)
        for parameter, group in call.referred.items():
            if parameter != call.operation.subject:
                for found in group:
                    self._authorize(call, tx, found, SEE)
        if call.operation.placements:
            zone = self.zones.named(getattr(call.given, call.operation.placements[0]))
            call.zone = zone.name
            inputs = [found for group in call.referred.values() for found in group]
            self.zones.require(tx, [*inputs, self._home(tx, call.target)], zone)

    def _refer(self, call: Call, tx: Transaction) -> None:
        """Resolve every reference. Unless named, the workspace is the caller's own, and the user is the caller."""
        op = call.operation
        for parameter, ref in op.references.items():
            value = getattr(call.given, parameter)
            if value is None and parameter == op.subject:
                value = call.caller.id if ref.kind == "user" else self._workspace_name(call, tx)
            names = () if value is None else (value,) if isinstance(value, str) else value
            found = [
                objects.resolve(tx, name, kind=ref.kind, workspace=self._workspace_name(call, tx))
                for name in names
            ]
            call.referred[parameter] = found
            call.asked |= {
                each.id: objects.unknown(n, ref.kind) for n, each in zip(names, found, strict=True)
            }
        found = call.referred.get(op.subject or "", [])
        call.resource = found[0] if found else objects.resolve(tx, ROOT, kind="workspace", workspace=ROOT)

    def _authorize(self, call: Call, tx: Transaction, found: StoredObject, action: str) -> Decision:
        decision = self.authorizer.decide(tx, call.caller, action, found)
        if decision.allowed:
            return decision
        call.decision = decision
        known = found.id == ROOT or (
            action != SEE and self.authorizer.decide(tx, call.caller, SEE, found).allowed
        )
        if not known:
            raise call.asked.get(found.id) or objects.unknown(found.name, found.kind)
        needs = " or ".join(decision.roles)
        raise Denied(
            f"{call.caller.name} may not {action} on {found.address}: {decision.reason}",
            details={"rule": decision.rule, "roles": list(decision.roles), "action": action, "needs": needs},
        )

    def _workspace_name(self, call: Call, tx: Transaction) -> str:
        if call.caller.workspace is None:
            return DEFAULT_WORKSPACE
        scope = objects.by_id(tx, call.caller.workspace)
        return scope.name if scope is not None else DEFAULT_WORKSPACE

    def _home(self, tx: Transaction, found: StoredObject) -> StoredObject:
        """The workspace that `found` is in."""
        return (
            found
            if found.kind == "workspace"
            else objects.resolve(tx, found.workspace, kind="workspace", workspace=ROOT)
        )

    def _hold_fence(self, call: Call) -> None:
        if call.terms.fence is not None and self._fence is not None:
            idempotency.hold_fence(call.terms.fence, self._fence(call.tx))

    def _input_digest(self, call: Call) -> str:
        exclude = {call.operation.upload} if call.operation.upload else None
        return self.audit.digest(call.given.model_dump_json(exclude=exclude).encode())

    def _draft(self, call: Call, *, outcome: str = "done", rule: str | None = None) -> Draft:
        """The audit entry of `call`."""
        decision = call.decision
        referred = [found.id for group in call.referred.values() for found in group]
        if not referred and call.resource is not None:
            referred = [call.resource.id]
        target = call.resource
        draft: Draft = {
            "at": call.now,
            "caller": call.caller.name,
            "action": call.operation.name,
            "outcome": outcome,
            "objects": referred,
            "workspace": None
            if target is None
            else target.id
            if target.kind == "workspace"
            else target.workspace,
            "origin": call.caller.origin,
            "rule": rule or (decision.rule if decision is not None else "none"),
            "input": call.digest or self._input_digest(call),
        }
        if call.terms.request:
            draft["request"] = call.terms.request
        if call.caller.token:
            draft["token"] = call.caller.token
        if call.created:
            draft["created"] = [new.id for new in call.created]
        return draft

    def _record_failure(self, call: Call, error: FalajError) -> None:
        """The entry of a call that was rolled back, in a transaction of its own."""
        call.created.clear()
        outcome = "denied" if isinstance(error, Denied) or _hidden(call, error) else "failed"
        draft = self._draft(call, outcome=outcome) | {"error": error.code}
        try:
            self.audit.append_grouped(draft)
        except Exception:
            log.critical("a failed operation could not be recorded", exc_info=True, extra=_plain(draft))
            raise


def _hidden(call: Call, error: FalajError) -> bool:
    """Whether `error` says unknown because the rules say no."""
    return error.code == "object.not_found" and call.decision is not None and not call.decision.allowed


def _plain(draft: Draft) -> dict[str, Any]:
    return {"action": draft["action"], "caller_name": draft["caller"], "error_code": draft["error"]}
