"""Workspaces, principals, groups, roles and tokens."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Literal

from falaj.records.names import ObjectId, PrincipalId
from falaj.records.record import Record


class Role(StrEnum):
    """A role of a principal in a workspace; granted on the platform, it holds in every workspace."""

    VIEWER = "viewer"
    DEVELOPER = "developer"
    APPROVER = "approver"
    OPERATOR = "operator"
    AUDITOR = "auditor"
    ADMIN = "admin"


PrincipalKind = Literal["user", "service"]

FailureReason = Literal["no_token", "two_tokens", "refused_token", "refused_code"]
"""Why an authentication failed, as the audit log has it; `refused_code` is that of a sign-in link."""


class Workspace(Record):
    id: ObjectId
    name: str
    created_at: datetime


class Principal(Record):
    """A person or a service account."""

    id: PrincipalId
    name: str
    kind: PrincipalKind
    disabled: bool = False
    created_at: datetime


class Group(Record):
    id: ObjectId
    name: str
    members: tuple[str, ...] = ()


class Grant(Record):
    """`subject`, a user, service account or group, holds `role` in `workspace`."""

    workspace: str
    subject: str
    role: Role


class Appointment(Record):
    """How a principal came to hold `role` in `workspace`: who granted it and when, through which group, who made the
    principal, and who could hold the credential that it used. None: it was not recorded then."""

    role: Role
    workspace: str
    granted_by: tuple[str, ...] | None
    granted_at: datetime | None
    group: str | None = None
    added_by: tuple[str, ...] | None = None
    added_at: datetime | None = None
    created_by: tuple[str, ...] | None
    created_at: datetime
    credential_by: tuple[str, ...] | None = ()


class Identity(Record):
    """The identity of the caller."""

    principal: Principal
    grants: tuple[Grant, ...]
    workspace: str | None = None
    actions: tuple[str, ...] | None = None


class Token(Record):
    """A token; its secret is shown once, when it is issued."""

    id: ObjectId
    principal: str
    purpose: str
    workspace: str | None
    actions: tuple[str, ...] | None
    created_at: datetime
    expires_at: datetime
    revoked_at: datetime | None = None


class IssuedToken(Record):
    token: Token
    secret: str


class SignInLink(Record):
    """A code that signs its user in once, until `expires_at`."""

    code: str
    expires_at: datetime
