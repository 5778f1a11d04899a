"""How aliases move: promotion, approval of protected ones, and the way back.

The rule for a protected alias: it moves to a version only if a person with the role approver, who is neither the
version's author nor the owner of the run that made it, has approved that version for that alias. Whoever promotes
may be the author or the approver: two people have looked at it either way. A rollback needs no approval, because it
returns to what stood there before, and it withdraws the approvals of what it leaves.
"""

from __future__ import annotations

from falaj.errors import Conflict, Denied, Fault, NotFound
from falaj.governance import objects
from falaj.governance.operations.call import Call
from falaj.ports.metadata import Transaction
from falaj.records.governance.objects import StoredObject
from falaj.records.names import ObjectId, new_id
from falaj.records.registry import Alias, AliasMove, Approval, ModelVersion, Promotion
from falaj.registry import store


def promote(call: Call, version: ModelVersion, alias: str) -> Promotion:
    """Point `alias` at `version`."""
    protected = store.lock_alias(call.tx, version.model, alias)
    if store.version_at(call.tx, version.model, alias, at=None) == version.id:
        raise Conflict(f"{version.reference} is {alias} already")
    approved = store.approvals_of(call.tx, version.id, alias)
    if protected and not approved:
        raise _unapproved(call.tx, version, alias)
    return _move(call, version.model, version.name, alias, version.id, AliasMove.PROMOTE, approved)


def approve(call: Call, version: ModelVersion, alias: str, *, comment: str) -> Approval:
    """The caller's approval of `version` for `alias`."""
    if call.caller.kind != "user":
        raise Denied(f"{call.caller.name} is a service account: a person approves")
    if call.caller.id in _authors(call.tx, version):
        raise Denied(
            f"{call.caller.name} made {version.reference}: someone else approves it",
            details={"rule": "registry.four_eyes", "needs": "an approver who is not its author"},
        )
    store.lock_alias(call.tx, version.model, alias)
    if store.has_approved(call.tx, version.id, alias, by=call.caller.id):
        raise Conflict(f"you have approved {version.reference} for {alias} already")
    return store.add_approval(
        call.tx,
        new_id("approval"),
        version=version.id,
        alias=alias,
        by=call.caller.id,
        comment=comment,
        at=call.now,
    )


def rollback_target(tx: Transaction, model: StoredObject, alias: str) -> ObjectId:
    """Where a rollback of `alias`, which is held from now on, leads."""
    store.lock_alias(tx, model.id, alias)
    standing = targets(store.moves(tx, model.id, alias))
    if len(standing) < 2:
        raise Conflict(f"{alias} of {model.name} has no earlier target to go back to")
    return standing[-2]


def targets(moves: list[tuple[AliasMove, ObjectId]]) -> list[ObjectId]:
    """The versions behind an alias, the present one last: a promotion adds one, a rollback takes the last away."""
    standing: list[ObjectId] = []
    for move, version in moves:
        if move is AliasMove.ROLLBACK:
            standing.pop()
        else:
            standing.append(version)
    return standing


def roll_back(call: Call, model: StoredObject, alias: str, *, to: ObjectId) -> Promotion:
    """Point `alias` at its earlier target, and withdraw the approvals of the present one."""
    present = store.version_at(call.tx, model.id, alias, at=None)
    if present is not None:
        store.withdraw_approvals(call.tx, present, alias, at=call.now)
    return _move(call, model.id, model.name, alias, to, AliasMove.ROLLBACK, [])


def protect(call: Call, model: ObjectId, alias: str) -> Alias:
    store.lock_alias(call.tx, model, alias)
    store.protect_alias(call.tx, model, alias)
    return next(each for each in aliases_of(call.tx, model) if each.alias == alias)


def aliases_of(tx: Transaction, model: ObjectId) -> tuple[Alias, ...]:
    """Every alias of a model, and where it points."""
    found = []
    for row in store.alias_rows(tx, model):
        last = store.changes(tx, model, row["alias"], before=None, limit=1)
        if last or row["protected"]:
            found.append(
                Alias(
                    alias=row["alias"],
                    version=last[0].version if last else None,
                    protected=row["protected"],
                    since=last[0].at if last else None,
                )
            )
    return tuple(found)


def require_known(found: ObjectId | None, model: str, alias: str, *, when: str) -> ObjectId:
    if found is None:
        raise NotFound(f"{model} has no {alias} {when}")
    return found


def _move(
    call: Call,
    model: ObjectId,
    name: str,
    alias: str,
    version: ObjectId,
    move: AliasMove,
    approved: list[Approval],
) -> Promotion:
    change = store.add_change(
        call.tx, model, alias, version=version, move=move, by=call.caller.id, at=call.now
    )
    return Promotion(model=name, change=change, approved_by=tuple(approval.by for approval in approved))


def _authors(tx: Transaction, version: ModelVersion) -> set[str]:
    run = None if version.run is None else objects.ever(tx, version.run)
    return {version.author, *([] if run is None else [run.owner])}


def _unapproved(tx: Transaction, version: ModelVersion, alias: str) -> Denied:
    author = objects.ever(tx, version.author)
    needed = f"someone with the role approver, other than its author {author.name if author else ''}".rstrip()
    fault = Fault(
        where=f"approval of {version.reference} for {alias}",
        given="none",
        allowed=f"an approval by {needed}",
        fix=f"falaj models approve {version.reference} --alias {alias}",
    )
    return Denied(
        f"{alias} of {version.name} is protected, and {version.reference} is not approved for it",
        faults=[fault],
        details={"rule": "registry.protected", "needs": needed},
    )
