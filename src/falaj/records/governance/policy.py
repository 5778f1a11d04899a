"""Policies, decisions, and examples of decisions."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from falaj.records.governance.identity import Role
from falaj.records.names import ObjectId
from falaj.records.record import Record


class Policy(Record):
    """A published policy text; it holds in its workspace only."""

    id: ObjectId
    workspace: str
    name: str
    version: int
    text: str
    published_at: datetime


class Decision(Record):
    """An authorization decision, the rule that made it, and the roles that would be allowed."""

    allowed: bool
    rule: str
    reason: str
    roles: tuple[Role, ...] = ()


class AllowedPrincipal(Record):
    """Someone who may do it, and by which rule."""

    principal: str
    kind: str
    rule: str


class ExampleOutcome(Record):
    """One example decision of a policy test file, and what came out."""

    number: int
    what: str
    expected: Literal["allow", "deny"]
    got: Literal["allow", "deny"]
    rule: str
    passed: bool
