"""Actions that operations imply: nobody calls them, and policies can forbid them.

An operation is decided before its body runs, on what its caller names. Some rules are about what it brings about:
whichever operation lets a version answer the requests of an endpoint implies `endpoints.serve` on that endpoint, with
the approvals of the version in the context. The body asks, in the transaction that has the effect. Everyone may, unless
a policy forbids it: the operation itself was permitted already. An action that allows nobody takes a policy that
permits it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from falaj.governance.operations.operation import Grantee

ContextValue = str | bool | tuple[str, ...]
Context = Mapping[str, ContextValue]
"""The attributes of `context` beside `origin`."""


@dataclass(frozen=True)
class ImpliedAction:
    """The declaration of an action that operations imply; `context` has its further attributes, with their defaults."""

    name: str
    resource: str
    context: Context
    allow: frozenset[Grantee] = frozenset({"anyone"})
    references: Mapping[str, Any] = field(default_factory=dict)


UNAPPROVED: Context = {"approved": False, "approvals": (), "independent": ()}

SERVE = ImpliedAction("endpoints.serve", "endpoint", UNAPPROVED)
"""Let a version answer requests of an endpoint, whatever its share."""

ASSIGN = ImpliedAction("models.assign", "model_version", {**UNAPPROVED, "alias": "", "move": "promote"})
"""Point an alias at a version. `approved` is about that alias."""

STORE_PICKLE = ImpliedAction("models.store_pickle", "workspace", {}, allow=frozenset())
"""Register a version that has pickles among its files, or other files that run code once they are loaded. No role
includes it: a policy has to permit it."""

IMPLIED: Mapping[str, ImpliedAction] = {action.name: action for action in (SERVE, ASSIGN, STORE_PICKLE)}
