"""Moves of aliases: promotion, approval of protected aliases, and rollback.

A protected alias moves to a version only if a person with the role approver, who is neither the author of the version
nor the owner of the run that produced it, nor that of a version that it was made from, nor who is behind a service
account that is one of these, has approved it for that alias.
The author or the approver may promote: two people have reviewed the version either way. A rollback needs no approval,
because it returns to the previous version; it withdraws the approvals of the version that it leaves. It leads to no
version that the alias left before it was protected, nor to one that it was rolled back from.

An approval records how its approver was appointed. A protection may be `independent`: then only those approvals count
whose approver holds the role without the authors (decision 0021).

A policy can demand approvals too, by name, label or workspace, before an alias or endpoint is made: it forbids an
implied action unless the version is approved (`governance/policy/implied_actions.py`). It is asked in the transaction
that has the effect, while no approval of the version can be withdrawn (decision 0033).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from falaj.errors import Conflict, Denied, Fault, NotFound
from falaj.governance import objects
from falaj.governance.identity.appointments import (
    Independence,
    appointment,
    holders,
    is_service_account,
    people_behind,
)
from falaj.governance.operations.call import Call
from falaj.governance.operations.gate import Gate
from falaj.governance.policy.implied_actions import SERVE, Context, ContextValue, ImpliedAction
from falaj.ports.metadata import Transaction
from falaj.records.governance.identity import Role
from falaj.records.governance.objects import StoredObject
from falaj.records.models.gates import PromotionEvidence
from falaj.records.names import ObjectId, new_id
from falaj.records.registry import (
    Alias,
    AliasChange,
    AliasMove,
    Approval,
    ModelManifest,
    ModelVersion,
    Promotion,
    StandingApprovals,
)
from falaj.registry import store
from falaj.registry.gates import store as gate_store
from falaj.registry.gates.evaluation import PromotionGates

DEFAULT_ALIAS = "champion"
ROLE_RULE = f"role.{Role.APPROVER}"
"""The rule by which a role permits approval; a policy may permit it too."""
NAMED = 10
"""How many people an error names who could approve."""


def promote(call: Call, version: ModelVersion, alias: str, *, gates: PromotionGates) -> Promotion:
    """Point `alias` at `version`, if it passes the gates of the alias."""
    protection = store.lock_alias(call.tx, version.model, alias)
    if store.version_at(call.tx, version.model, alias, at=None) == version.id:
        raise Conflict(f"{version.reference} is already {alias}")
    approved = _counting(call.tx, version.id, alias, independent=protection.independent)
    if protection.protected and not approved:
        message = f"{alias} of {version.name} is protected, and {version.reference} is not approved for it"
        raise unapproved(call.tx, version, alias, message, independent=protection.independent)
    names = tuple(approval.by for approval in approved)
    evidence = gates.require(call, version, alias).model_copy(update={"approved_by": names})
    return _move(call, version.model, version.name, alias, version.id, AliasMove.PROMOTE, evidence)


def approve(
    call: Call, version: ModelVersion, alias: str, *, comment: str, gates: PromotionGates
) -> Approval:
    """Record the caller's approval of `version` for `alias`, if it passes the gates, with the evidence."""
    if call.caller.kind != "user":
        raise Denied(f"{call.caller.name} is a service account; only a person can approve")
    if call.caller.id in _makers(call.tx, version):
        raise Denied(
            f"{call.caller.name} made {version.reference}; someone else must approve it",
            details={"rule": "registry.four_eyes", "needs": "an approver who is not its author"},
        )
    found = Independence(call.tx, authors_of(call.tx, version), workspace=version.workspace)
    by_role = call.decision is not None and ROLE_RULE in call.decision.rule.split(", ")
    independent = by_role and found.of_caller(call.caller, Role.APPROVER)
    store.lock_alias(call.tx, version.model, alias)
    earlier = [each for each in store.approvals_of(call.tx, version.id, alias) if each.by == call.caller.name]
    if any(each.independent >= independent for each in earlier):
        raise Conflict(f"you have already approved {version.reference} for {alias}")
    evidence = gates.require(call, version, alias)
    store.withdraw_approvals(call.tx, version.id, alias, at=call.now, by=call.caller.id)
    return store.add_approval(
        call.tx,
        new_id("approval"),
        version=version.id,
        alias=alias,
        by=call.caller.id,
        comment=comment,
        at=call.now,
        appointment=appointment(
            call.tx, call.caller, Role.APPROVER, workspace=version.workspace, found=found
        ),
        independent=independent,
        evidence=evidence,
    )


def require_approved(
    tx: Transaction, version: ModelVersion, alias: str, *, independent: bool, where: str
) -> None:
    """Raise Denied unless `version` is approved for `alias`, or is what the protected alias points at."""
    protection = store.lock_alias(tx, version.model, alias)
    if protection.protected and store.version_at(tx, version.model, alias, at=None) == version.id:
        return
    independent = independent or protection.independent
    if not _counting(tx, version.id, alias, independent=independent):
        message = f"{where} needs versions that are approved for {alias}, and {version.reference} is not"
        raise unapproved(tx, version, alias, message, independent=independent)


def rollback_target(tx: Transaction, model: StoredObject, alias: str) -> ObjectId:
    """Lock `alias` and return the version that a rollback of it leads to."""
    store.lock_alias(tx, model.id, alias)
    history = targets(store.moves(tx, model.id, alias))
    if len(history) < 2:
        raise Conflict(f"{alias} of {model.name} has no previous version to roll back to")
    return history[-2]


def targets(moves: list[tuple[AliasMove, ObjectId]]) -> list[ObjectId]:
    """Return the versions to which an alias can go back, the current one last.

    A promotion adds a version, a rollback removes the one that it leaves, and a protection those before the current. A
    removed alias begins anew.
    """
    history: list[ObjectId] = []
    for move, version in moves:
        if move is AliasMove.REMOVE:
            history = []
            continue
        if move is AliasMove.PROTECT:
            history = []
        elif move is AliasMove.ROLLBACK:
            history = [each for each, _ in groupby(each for each in history if each != history[-1])]
        if history[-1:] != [version]:
            history.append(version)
    return history


def roll_back(call: Call, model: StoredObject, alias: str, *, to: ModelVersion) -> Promotion:
    """Point `alias` at version `to`, and withdraw the approvals of the current version."""
    protection = store.lock_alias(call.tx, model.id, alias)
    recorded = _is_protection_recorded(call.tx, model.id, alias)
    if protection.protected and not recorded and not store.approvals_of(call.tx, to.id, alias):
        message = f"{alias} of {model.name} is protected, and {to.reference} was never approved for it"
        raise unapproved(call.tx, to, alias, message, independent=protection.independent)
    current = store.version_at(call.tx, model.id, alias, at=None)
    if current is not None:
        store.withdraw_approvals(call.tx, current, alias, at=call.now)
        gate_store.withdraw_waivers(call.tx, current, alias, at=call.now)
    return _move(call, model.id, model.name, alias, to.id, AliasMove.ROLLBACK, None)


def _is_protection_recorded(tx: Transaction, model: ObjectId, alias: str) -> bool:
    """Tell whether it is known where `alias` pointed when it was protected; that was not always recorded."""
    return any(move is AliasMove.PROTECT for move, _ in store.moves(tx, model, alias))


def protect(call: Call, model: ObjectId, alias: str, *, independent: bool) -> Alias:
    store.lock_alias(call.tx, model, alias)
    store.protect_alias(call.tx, model, alias, independent=independent)
    current = store.version_at(call.tx, model, alias, at=None)
    if current is not None and not _is_protection_recorded(call.tx, model, alias):
        move = AliasMove.PROTECT
        store.add_change(call.tx, model, alias, version=current, move=move, by=call.caller.id, at=call.now)
    return next(each for each in aliases_of(call.tx, [model])[model] if each.alias == alias)


def remove(call: Call, model: StoredObject, alias: str) -> AliasChange:
    """Let `alias` point at no version; its history stays."""
    if store.lock_alias(call.tx, model.id, alias).protected:
        raise Conflict(
            f"{alias} of {model.name} is protected, and always points at a version; point it at another one: "
            f"falaj models promote {model.name}@N --to {alias}"
        )
    current = require_known(
        store.version_at(call.tx, model.id, alias, at=None), model.name, alias, when="now"
    )
    move = AliasMove.REMOVE
    return store.add_change(
        call.tx, model.id, alias, version=current, move=move, by=call.caller.id, at=call.now
    )


def aliases_of(tx: Transaction, idents: Sequence[ObjectId]) -> dict[ObjectId, tuple[Alias, ...]]:
    """Return every alias of each model, and where it points."""
    found: dict[ObjectId, tuple[Alias, ...]] = dict.fromkeys(idents, ())
    for row in store.alias_rows(tx, idents):
        removed = row["move"] == AliasMove.REMOVE
        if (row["at"] is not None and not removed) or row["protected"]:
            alias = Alias(
                alias=row["alias"],
                version=None if removed else row["version"],
                protected=row["protected"],
                independent=bool(row["independent"]),
                since=row["at"],
            )
            found[row["model"]] += (alias,)
    return found


def find_by_alias(tx: Transaction, workspace: str, name: str) -> StoredObject | None:
    """Return the version that `name`, such as churn@champion, stands for now; none if there is no such alias."""
    model_name, _, alias = name.rpartition("@")
    model = objects.by_name(tx, workspace=workspace, kind="model", name=model_name)
    version = None if model is None else store.version_at(tx, model.id, alias, at=None)
    return None if version is None else objects.by_id(tx, version)


objects.ALIASES["model_version"] = find_by_alias


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
    evidence: PromotionEvidence | None,
) -> Promotion:
    change = store.add_change(
        call.tx, model, alias, version=version, move=move, by=call.caller.id, at=call.now, evidence=evidence
    )
    return Promotion(model=name, change=change, approved_by=() if evidence is None else evidence.approved_by)


def require_other(call: Call, version: ModelVersion, alias: str, *, doing: str) -> None:
    """Raise Denied if the caller made `version`, and `alias` is protected."""
    if store.lock_alias(call.tx, version.model, alias).protected and call.caller.id in _makers(
        call.tx, version
    ):
        raise Denied(
            f"{call.caller.name} made {version.reference}; someone else must {doing}",
            details={"rule": "registry.four_eyes", "needs": "an administrator who is not its author"},
        )


def authors_of(tx: Transaction, version: ModelVersion) -> set[str]:
    """Return who made a version, and who issued their tokens: who could have acted as them."""
    return {person for maker in _makers(tx, version) for person in people_behind(tx, maker)}


def unapproved(
    tx: Transaction, version: ModelVersion, alias: str, message: str, *, independent: bool
) -> Denied:
    """Return the refusal of a version that is not approved for `alias`: it says who can approve, and how."""
    author = objects.ever(tx, version.author)
    needed = f"someone with the role approver, other than its author {author.name if author else ''}".rstrip()
    if independent:
        needed += ", whom the author did not appoint, directly or through others"
    able = _able(tx, version, independent=independent)
    appoint = "falaj workspaces grant WORKSPACE USER --role approver"
    who = ", ".join(able) or f"nobody yet; an administrator can appoint one ({appoint})"
    fault = Fault(
        where=f"approval of {version.reference} for {alias}",
        given="none",
        allowed=f"an approval by {needed}: {who}",
        fix=f"falaj models approve {version.reference} --alias {alias}",
    )
    return Denied(
        message, faults=[fault], details={"rule": "registry.protected", "needs": needed, "able": able}
    )


def _counting(tx: Transaction, version: ObjectId, alias: str, *, independent: bool) -> list[Approval]:
    """Return the approvals that count."""
    found = store.approvals_of(tx, version, alias)
    return [each for each in found if each.independent or not independent]


def _makers(tx: Transaction, version: ModelManifest) -> set[str]:
    """Return the author of a version, the owner of its run, and those of the versions that it was made from.

    Of a service account also who made it and who issued its tokens: it acts for them.
    """
    made: dict[str, ModelManifest] = {version.id: version}
    left, found = [version], set[str]()
    while left:
        each = left.pop()
        run = None if each.run is None else objects.ever(tx, each.run)
        found |= {each.author, *([] if run is None else [run.owner])}
        rows = (store.version_row(tx, source) for source in each.sources if source not in made)
        for row in filter(None, rows):
            made[row["id"]] = ModelManifest.model_validate_json(row["manifest"])
            left.append(made[row["id"]])
    robots = [each for each in found if is_service_account(tx, each)]
    return found.union(*(people_behind(tx, each) for each in robots))


def _able(tx: Transaction, version: ModelVersion, *, independent: bool) -> list[str]:
    """Return the names of who could approve `version`, a few of them."""
    makers = _makers(tx, version)
    found = Independence(tx, authors_of(tx, version), workspace=version.workspace)
    able = [
        ident
        for ident in holders(tx, Role.APPROVER, version.workspace)
        if ident not in makers and (not independent or found.holds(ident, Role.APPROVER))
    ]
    return [objects.name_of(tx, ident) for ident in able[:NAMED]]


# ------------------------------------------------------------------------------- policies that demand approvals


class ApprovalPolicy:
    """Asks the policies whether a version may come into use."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def require(
        self,
        call: Call,
        action: ImpliedAction,
        resource: StoredObject,
        version: ModelVersion,
        *,
        doing: str,
        besides: Mapping[str, ContextValue] | None = None,
    ) -> None:
        """Raise Denied if a policy forbids `action` with the approvals that `version` has; say which would do."""
        store.lock_approved_aliases(call.tx, version)
        besides = besides or {}
        found = store.standing_approvals(call.tx, version)
        if "alias" in besides:
            found = _only(found, str(besides["alias"]))
        decision = self._gate.authorizer.decide_implied(
            call.tx, call.caller, action, resource, {**_context(found), **besides}
        )
        if decision.allowed:
            return
        message = f"{call.caller.name} may not {doing}: {decision.reason}"
        aliases = [row["alias"] for row in store.alias_rows(call.tx, [version.model])]
        demanded = self._demanded(call, action, resource, aliases, besides)
        if demanded is None:
            raise Denied(message, details={"rule": decision.rule, "action": action.name, "needs": ""})
        alias, independent = demanded
        refusal = unapproved(call.tx, version, alias, message, independent=independent)
        refusal.details.update(rule=decision.rule, action=action.name)
        raise refusal

    def demanded_alias(self, call: Call, action: ImpliedAction, resource: StoredObject) -> str | None:
        """Return the alias for which policies demand an approval before a version comes into use by `action`."""
        if self._gate.authorizer.decide_implied(call.tx, call.caller, action, resource, {}).allowed:
            return None
        demanded = self._demanded(call, action, resource, [], {})
        return None if demanded is None else demanded[0]

    def _demanded(
        self,
        call: Call,
        action: ImpliedAction,
        resource: StoredObject,
        aliases: list[str],
        besides: Mapping[str, ContextValue],
    ) -> tuple[str, bool] | None:
        """Return the alias whose approval would lift the refusal, and whether it must be independent, if any would."""
        named = [str(besides["alias"])] if "alias" in besides else [DEFAULT_ALIAS, *aliases]
        for independent in (False, True):
            for alias in dict.fromkeys(named):
                own = frozenset({alias})
                approved = StandingApprovals(approved=own, independent=own if independent else frozenset())
                context = {**_context(approved), **besides}
                if self._gate.authorizer.decide_implied(
                    call.tx, call.caller, action, resource, context
                ).allowed:
                    return alias, independent
        return None


class ServingApprovals:
    """The approvals of versions as serving needs them."""

    def __init__(self, gate: Gate) -> None:
        self._policy = ApprovalPolicy(gate)

    def protected_aliases(self, tx: Transaction, version: ObjectId) -> list[tuple[str, bool]]:
        """Return the protected aliases that have pointed at `version`, and whether they demand independence."""
        return store.protected_aliases(tx, version)

    def require(
        self, tx: Transaction, version: ModelVersion, alias: str, *, independent: bool, where: str
    ) -> None:
        """Raise Denied unless `version` is approved for `alias`, or is what the protected alias points at."""
        require_approved(tx, version, alias, independent=independent, where=where)

    def were_withdrawn(self, tx: Transaction, version: ModelVersion) -> bool:
        """Tell whether approvals of `version` were withdrawn, and not given again."""
        return bool(store.standing_approvals(tx, version).withdrawn)

    def require_by_policy(self, call: Call, endpoint: StoredObject, version: ModelVersion) -> None:
        """Raise Denied if a policy forbids that `version`, with its approvals, answers requests of `endpoint`."""
        doing = f"let {version.reference} answer requests of {endpoint.address}"
        self._policy.require(call, SERVE, endpoint, version, doing=doing)

    def demanded_alias(self, call: Call, endpoint: StoredObject) -> str | None:
        """Return the alias for which policies demand an approval of what `endpoint` serves."""
        return self._policy.demanded_alias(call, SERVE, endpoint)


def _only(found: StandingApprovals, alias: str) -> StandingApprovals:
    own = frozenset({alias})
    return StandingApprovals(approved=found.approved & own, independent=found.independent & own)


def _context(found: StandingApprovals) -> Context:
    return {
        "approved": bool(found.approved),
        "approvals": tuple(sorted(found.approved)),
        "independent": tuple(sorted(found.independent)),
    }
