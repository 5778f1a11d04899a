"""Moves of aliases: promotion, approval of protected aliases, and rollback.

A protected alias moves to a version only if a person with the role approver, who is neither the author of the version
nor the owner of the run that produced it, has approved that version for that alias. The author or the approver may
promote: two people have reviewed the version either way. A rollback needs no approval, because it returns to the
previous version; it withdraws the approvals of the version that it leaves.
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
        raise Conflict(f"{version.reference} is already {alias}")
    approved = store.approvals_of(call.tx, version.id, alias)
    if protected and not approved:
        raise _unapproved(call.tx, version, alias)
    return _move(call, version.model, version.name, alias, version.id, AliasMove.PROMOTE, approved)


def approve(call: Call, version: ModelVersion, alias: str, *, comment: str) -> Approval:
    """Record the caller's approval of `version` for `alias`."""
    if call.caller.kind != "user":
        raise Denied(f"{call.caller.name} is a service account; only a person can approve")
    if call.caller.id in _authors(call.tx, version):
        raise Denied(
            f"{call.caller.name} made {version.reference}; someone else must approve it",
            details={"rule": "registry.four_eyes", "needs": "an approver who is not its author"},
        )
    store.lock_alias(call.tx, version.model, alias)
    if store.has_approved(call.tx, version.id, alias, by=call.caller.id):
        raise Conflict(f"you have already approved {version.reference} for {alias}")
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
    """Lock `alias` and return the version that a rollback of it leads to."""
    store.lock_alias(tx, model.id, alias)
    history = targets(store.moves(tx, model.id, alias))
    if len(history) < 2:
        raise Conflict(f"{alias} of {model.name} has no previous version to roll back to")
    return history[-2]


def targets(moves: list[tuple[AliasMove, ObjectId]]) -> list[ObjectId]:
    """Return the versions of an alias, the current one last: a promotion adds one, a rollback removes the last."""
    history: list[ObjectId] = []
    for move, version in moves:
        if move is AliasMove.ROLLBACK:
            history.pop()
        else:
            history.append(version)
    return history


def roll_back(call: Call, model: StoredObject, alias: str, *, to: ObjectId) -> Promotion:
    """Point `alias` at version `to`, and withdraw the approvals of the current version."""
    current = store.version_at(call.tx, model.id, alias, at=None)
    if current is not None:
        store.withdraw_approvals(call.tx, current, alias, at=call.now)
    return _move(call, model.id, model.name, alias, to, AliasMove.ROLLBACK, [])


def protect(call: Call, model: ObjectId, alias: str) -> Alias:
    store.lock_alias(call.tx, model, alias)
    store.protect_alias(call.tx, model, alias)
    return next(each for each in aliases_of(call.tx, model) if each.alias == alias)


def aliases_of(tx: Transaction, model: ObjectId) -> tuple[Alias, ...]:
    """Return every alias of a model, and where it points."""
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
