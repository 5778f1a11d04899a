"""Protected endpoints: they serve only versions that were approved for an alias.

An endpoint is protected by an administrator (`endpoints.protect`), or because it serves a version at which a protected
alias points or has pointed. The protection belongs to the name in its workspace: removing the endpoint and making it
again does not end it. An approver can release it. Decision 0021. A policy can demand approvals as well
(`endpoints.serve`, decision 0033).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from sqlalchemy import RowMapping

from falaj.errors import Conflict, Denied, FalajError
from falaj.governance.identity.appointments import ways_to
from falaj.governance.operations.call import Call
from falaj.ports.metadata import Transaction
from falaj.records.governance.identity import Role
from falaj.records.governance.objects import StoredObject
from falaj.records.names import ObjectId
from falaj.records.registry import ModelVersion
from falaj.records.serving.endpoints import DeployedEndpoint, ServedRoute
from falaj.serving import store
from falaj.serving.dependencies import VersionApprovals

LoadSteps = Callable[[Transaction, ObjectId], Sequence[ModelVersion]]
"""Loads the versions that are steps of a version; none unless it is an ensemble."""

CONTROLLER = "controller"
"""The service account that reverts what a workflow began."""


@dataclass(frozen=True)
class EndpointProtection:
    """Decides which versions an endpoint may serve."""

    approvals: VersionApprovals
    steps: LoadSteps

    def require(
        self,
        call: Call,
        target: StoredObject,
        versions: Sequence[ModelVersion],
        *,
        routes: Sequence[ServedRoute],
        before: DeployedEndpoint | None,
    ) -> None:
        """Raise Denied unless `target` may serve `versions`; protect it if one of them makes it protected.

        The steps of an ensemble need what the ensemble needs, each for itself: whoever approves the whole may be the
        author of a step. On an endpoint that was protected before, a version that answers requests now may stay: it
        was approved when it came, and a rollback to it must not wait.
        """
        earlier = store.protection(call.tx, target)
        kept = set() if earlier is None else self._kept(call, versions, routes, before)
        served = [] if before is None else [route.id for route in before.routes]
        bound = self.bind(call, target, [*served, *(version.id for version in versions)])
        if bound is None:
            return
        for version in versions:
            if version.id not in kept:
                for each in self._whole(call.tx, version):
                    self._require(call, target, each, bound["alias"], independent=bound["independent"])

    def require_by_policy(
        self,
        call: Call,
        target: StoredObject,
        versions: Sequence[ModelVersion],
        *,
        routes: Sequence[ServedRoute],
        before: DeployedEndpoint | None,
    ) -> None:
        """Raise Denied if a policy forbids that one of `versions` answers requests of `target`.

        What answers requests there already may stay, and the controller's way back after a canary does not wait.
        """
        caller = call.caller
        if (caller.kind, caller.name, caller.token) == ("service", CONTROLLER, None):
            return
        kept = self._kept(call, versions, routes, before)
        for version in versions:
            if version.id not in kept:
                for each in self._whole(call.tx, version):
                    self.approvals.require_by_policy(call, target, each)

    def alias_of(self, call: Call, target: StoredObject, versions: Iterable[ObjectId]) -> str | None:
        """Return the alias that protects an endpoint which serves `versions`, or for which policies demand approval."""
        row = store.protection(call.tx, target)
        found = self._aliases(call.tx, versions) if row is None else [(row["alias"], row["independent"])]
        alias = found[0][0] if found else None
        return alias or self.approvals.demanded_alias(call, target)

    def bind(self, call: Call, target: StoredObject, versions: Iterable[ObjectId]) -> RowMapping | None:
        """Protect `target` if a protected alias has pointed at one of `versions`; return its protection, if any."""
        if store.protection(call.tx, target) is None:
            found = self._aliases(call.tx, self.with_steps(call.tx, versions))
            if found:
                independent = any(demands for _, demands in found)
                store.set_protection(call, target, found[0][0], independent=independent)
        row = store.protection(call.tx, target)
        return None if row is None or row["alias"] is None else row

    def with_steps(self, tx: Transaction, versions: Iterable[ObjectId]) -> list[ObjectId]:
        """Return versions and the steps of ensembles among them, as far as they can be read.

        What is served now may be damaged; it must be possible to replace it.
        """
        found: list[ObjectId] = []
        for version in versions:
            found.append(version)
            with suppress(FalajError):
                found += [step.id for step in self.steps(tx, version)]
        return found

    def protect(
        self,
        call: Call,
        target: StoredObject,
        alias: str,
        versions: Sequence[ModelVersion],
        *,
        independent: bool,
    ) -> None:
        """Protect `target` by the approvals for `alias`; all `versions` that it serves must have them."""
        row = store.protection(call.tx, target)
        demanded = independent or (row is not None and row["alias"] is not None and row["independent"])
        for version in versions:
            for each in self._whole(call.tx, version):
                self._require(call, target, each, alias, independent=demanded)
        store.set_protection(call, target, alias, independent=demanded)

    def release(self, call: Call, target: StoredObject) -> None:
        """End the protection of `target`."""
        row = store.protection(call.tx, target)
        if row is None or row["alias"] is None:
            raise Conflict(f"endpoint {target.name} is not protected")
        ways = ways_to(call.tx, call.caller.id, Role.APPROVER, target.workspace)
        if row["independent"] and all(call.caller.id in way.people() for way in ways):
            raise Denied(
                f"{call.caller.name} made themselves an approver; someone whom another administrator appointed "
                f"can release {target.name}",
                details={"rule": "serving.protected", "needs": "an approver whom somebody else appointed"},
            )
        store.set_protection(call, target, None, independent=False)

    def _kept(
        self,
        call: Call,
        versions: Sequence[ModelVersion],
        routes: Sequence[ServedRoute],
        before: DeployedEndpoint | None,
    ) -> set[ObjectId]:
        """Return those of `versions` that answer requests already. One whose approval was withdrawn does not grow."""
        shares = {} if before is None else {r.id: r.weight for r in before.routes if r.weight}
        total = sum(shares.values()) or 1
        asked = {route.id: route.weight for route in routes}
        of_all = sum(asked.values()) or 1
        return {
            version.id
            for version in versions
            if version.id in shares
            and (
                asked[version.id] * total <= shares[version.id] * of_all
                or not self.approvals.were_withdrawn(call.tx, version)
            )
        }

    def _whole(self, tx: Transaction, version: ModelVersion) -> list[ModelVersion]:
        """Return a version, and the steps of one that is an ensemble."""
        return [version, *self.steps(tx, version.id)]

    def _aliases(self, tx: Transaction, versions: Iterable[ObjectId]) -> list[tuple[str, bool]]:
        return [found for each in versions for found in self.approvals.protected_aliases(tx, each)]

    def _require(
        self, call: Call, target: StoredObject, version: ModelVersion, alias: str, *, independent: bool
    ) -> None:
        where = f"endpoint {target.name} is protected: it"
        self.approvals.require(call.tx, version, alias, independent=independent, where=where)
