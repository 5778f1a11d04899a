"""Which workspaces a caller may see figures of."""

from __future__ import annotations

from falaj.governance import objects
from falaj.governance.operations.caller import Caller
from falaj.governance.operations.gate import Gate
from falaj.ports.metadata import Transaction
from falaj.records.governance.identity import Role
from falaj.records.governance.objects import StoredObject
from falaj.records.names import ROOT

BATCH = 500
OVERSEERS = frozenset({Role.OPERATOR, Role.AUDITOR, Role.ADMIN})
"""Who sees the figures of the whole platform, if they hold the role there."""


def visible_workspaces(gate: Gate, tx: Transaction, caller: Caller) -> list[StoredObject]:
    """The workspaces that the caller may see; the platform itself is none."""
    found: list[StoredObject] = []
    after = ""
    while True:
        batch = objects.listed(tx, kinds=["workspace"], workspace=None, after=after, limit=BATCH)
        found += [each for each in batch if each.id != ROOT and gate.authorizer.sees(tx, caller, each)]
        if len(batch) < BATCH:
            return found
        after = batch[-1].id


def oversees(gate: Gate, tx: Transaction, caller: Caller) -> bool:
    """Whether the caller may see the figures of everything, of workspaces that are gone too."""
    if caller.workspace is not None:
        return False
    person = objects.by_id(tx, caller.id)
    if person is None:
        return False
    held = gate.authorizer.roles(tx, person).roles
    return any(workspace == ROOT and role in OVERSEERS for workspace, role in held)
