"""The operations on users, groups, tokens and workspaces."""

from __future__ import annotations

import os
from datetime import datetime, timedelta
from typing import Annotated

from pydantic import Field
from sqlalchemy import delete, insert, update

from falaj.errors import Conflict, Denied
from falaj.governance import objects
from falaj.governance.encryption.keyring import Keyring
from falaj.governance.identity import tokens as token_store
from falaj.governance.identity.appointments import actors
from falaj.governance.identity.principals import (
    add_principal,
    grant_role,
    grants_in,
    group_record,
    group_records,
    member_ids,
    principal_record,
    principal_records,
    require_administrator,
    revoke_role,
    roles_held,
    workspace_record,
)
from falaj.governance.operations.call import current_call
from falaj.governance.operations.gate import Gate
from falaj.governance.operations.operation import Mode, operation
from falaj.governance.operations.pagination import list_page
from falaj.governance.policy.epochs import advance_epoch
from falaj.governance.tables import group_members, principals, tokens
from falaj.records.governance.identity import (
    Grant,
    Group,
    Identity,
    IssuedToken,
    Principal,
    PrincipalKind,
    Role,
    SignInLink,
    Token,
    Workspace,
)
from falaj.records.governance.objects import Cursor, Page, PageSize
from falaj.records.names import (
    ROOT,
    ActionPattern,
    GroupRef,
    Name,
    SubjectRef,
    TextRule,
    TokenRef,
    UserRef,
    WorkspaceRef,
    new_id,
)

Purpose = Annotated[str, TextRule(r"[^\x00-\x1f\x7f]+", "a purpose is a few printable words", limit=200)]
Lifetime = Annotated[timedelta, Field(gt=timedelta(0), le=timedelta(days=366))]


class Users:
    """People and service accounts."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    @operation("users.create", resource="platform", allow=Role.ADMIN)
    def create(self, name: Name, *, kind: PrincipalKind = "user") -> Principal:
        """Make a user or a service account; it can do nothing until it is granted a role."""
        call = current_call()
        taken = objects.by_name(
            call.tx, workspace=ROOT, kind="service" if kind == "user" else "user", name=name
        )
        if taken is not None:
            raise Conflict(f"{name!r} is the name of a {taken.kind} already")
        return principal_record(
            call.tx, add_principal(call.tx, name, kind=kind, now=call.now, by=actors(call.tx, call.caller))
        )

    @operation("users.list", resource="platform", mode=Mode.READ, allow="anyone")
    def list(self, *, after: Cursor = "", limit: PageSize = 100) -> Page[Principal]:
        """Users and service accounts."""
        tx = current_call().tx
        kinds = ["user", "service"]
        return list_page(
            self.gate,
            kinds,
            lambda page: principal_records(tx, page),
            after=after,
            limit=limit,
            workspace=ROOT,
        )

    @operation("users.show", resource="user", mode=Mode.READ, allow="anyone")
    def show(self, user: UserRef) -> Principal:
        """One user or service account."""
        return principal_record(current_call().tx, current_call().target)

    @operation("users.whoami", resource="user", mode=Mode.READ, allow={"owner"})
    def whoami(self, *, user: UserRef | None = None) -> Identity:
        """Show your identity, the roles that you hold and the scope of your token."""
        call = current_call()
        scope = call.caller.workspace and objects.by_id(call.tx, call.caller.workspace)
        return Identity(
            principal=principal_record(call.tx, call.target),
            grants=tuple(roles_held(call.tx, call.target.id)),
            workspace=scope.name if scope else None,
            actions=call.caller.actions,
        )

    @operation("users.disable", resource="user", allow=Role.ADMIN)
    def disable(self, user: UserRef) -> Principal:
        """Refuse a user from now on, with every token that it has. Undo: users.enable."""
        call = current_call()
        if str(call.target.id) == call.caller.id:
            raise Conflict("you cannot disable yourself; another administrator can")
        return self._set_disabled(call.now)

    @operation("users.enable", resource="user", allow=Role.ADMIN)
    def enable(self, user: UserRef) -> Principal:
        """Let a disabled user in again."""
        return self._set_disabled(None)

    def _set_disabled(self, at: datetime | None) -> Principal:
        call = current_call()
        advance_epoch(call.tx)
        call.tx.execute(update(principals).where(principals.c.id == call.target.id).values(disabled_at=at))
        require_administrator(call.tx)
        return principal_record(call.tx, call.target)


class Groups:
    """Groups of users: a role granted to a group is held by its members."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    @operation("groups.create", resource="platform", allow=Role.ADMIN)
    def create(self, name: Name) -> Group:
        """Make an empty group."""
        call = current_call()
        root = objects.resolve(call.tx, ROOT, kind="workspace", workspace=ROOT)
        return Group(id=call.create("group", name, workspace=root).id, name=name)

    @operation("groups.list", resource="platform", mode=Mode.READ, allow="anyone")
    def list(self, *, after: Cursor = "", limit: PageSize = 100) -> Page[Group]:
        """The groups and their members."""
        tx = current_call().tx
        return list_page(
            self.gate,
            ["group"],
            lambda page: group_records(tx, page),
            after=after,
            limit=limit,
            workspace=ROOT,
        )

    @operation("groups.add", resource="group", allow=Role.ADMIN)
    def add(self, group: GroupRef, user: UserRef) -> Group:
        """Put a user or service account into a group."""
        call = current_call()
        member = call.object("user").id
        if member not in member_ids(call.tx, call.target.id):
            row = {"group_id": call.target.id, "member": member}
            when = {"added_by": actors(call.tx, call.caller), "added_at": call.now}
            call.tx.execute(insert(group_members), {**row, **when})
            advance_epoch(call.tx)
        return group_record(call.tx, call.target)

    @operation("groups.remove", resource="group", allow=Role.ADMIN)
    def remove(self, group: GroupRef, user: UserRef) -> Group:
        """Take a user or service account out of a group."""
        call = current_call()
        advance_epoch(call.tx)
        call.tx.execute(
            delete(group_members).where(
                group_members.c.group_id == call.target.id, group_members.c.member == call.object("user").id
            )
        )
        require_administrator(call.tx)
        return group_record(call.tx, call.target)


class Tokens:
    """Issue, list and revoke tokens."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    @operation("tokens.issue", resource="user", allow={"owner", Role.ADMIN})
    def issue(
        self,
        *,
        purpose: Purpose,
        user: UserRef | None = None,
        workspace: WorkspaceRef | None = None,
        actions: tuple[ActionPattern, ...] | None = None,
        expires_in: Lifetime = timedelta(days=30),
    ) -> IssuedToken:
        """Issue a token for yourself or, as an administrator, for a user. Its secret is shown this once."""
        call = current_call()
        scope = call.object("workspace").id if workspace else call.caller.workspace
        token_store.require_within(call.caller, scope, actions)
        until = token_store.capped_expiry(call.tx, call.caller, call.now + expires_in)
        ident, secret = new_id("token"), os.urandom(token_store.SECRET_BYTES)
        root = objects.resolve(call.tx, ROOT, kind="workspace", workspace=ROOT)
        call.create("token", ident, workspace=root, ident=ident, owner=call.target.id)
        values = {
            "id": ident,
            "principal": call.target.id,
            "secret_hash": token_store.secret_hash(secret),
            "scope": scope,
            "actions": list(actions) if actions is not None else call.caller.actions,
            "purpose": purpose,
            "issuer": call.caller.token if token_store.is_limited(call.caller) else None,
            "expires_at": until,
            "vouched_by": [each for each in actors(call.tx, call.caller) if each != call.target.id],
        }
        call.tx.execute(insert(tokens), values)
        return IssuedToken(
            token=token_store.token_record(call.tx, ident), secret=token_store.spell(ident, secret)
        )

    @operation("tokens.list", resource="platform", mode=Mode.READ, allow="anyone")
    def list(self, *, after: Cursor = "", limit: PageSize = 100) -> Page[Token]:
        """The tokens that you may see: your own, and all of them for administrators."""
        tx = current_call().tx
        return list_page(
            self.gate,
            ["token"],
            lambda page: token_store.token_records(tx, page),
            after=after,
            limit=limit,
            workspace=ROOT,
            action="tokens.revoke",
        )

    @operation("tokens.revoke", resource="token", allow={"owner", Role.ADMIN})
    def revoke(self, token: TokenRef, *, keep_work: bool = False) -> Token:
        """End a token now, everywhere, with those that it issued if it was a limited one.

        keep_work: jobs and other work that were asked for with it go on, as when a token expires.
        """
        call = current_call()
        if token_store.token_record(call.tx, call.target.id).revoked_at is not None:
            raise Conflict(f"token {token} is revoked already")
        family = token_store.descendants(call.tx, call.target.id)
        living = tokens.c.id.in_(family), tokens.c.revoked_at.is_(None)
        if keep_work:
            late = tokens.c.expires_at > call.now
            call.tx.execute(update(tokens).where(*living, late).values(expires_at=call.now))
        else:
            call.tx.execute(update(tokens).where(*living).values(revoked_at=call.now))
        advance_epoch(call.tx)
        return token_store.token_record(call.tx, call.target.id)

    @operation("tokens.sign_in_link", resource="user", allow={"owner", Role.ADMIN})
    def sign_in_link(self, *, user: UserRef | None = None) -> SignInLink:
        """A code that signs a user in once, within five minutes."""
        call = current_call()
        if (call.caller.workspace, call.caller.actions) != (None, None):
            raise Denied("this token is limited, and signing in would give more than it has")
        others = [each for each in actors(call.tx, call.caller) if each != call.target.id]
        return token_store.create_link(
            call.tx, call.target.id, now=call.now, vouched_by=others, digest=self.gate.audit.digest
        )


class Workspaces:
    """Create workspaces and grant roles in them."""

    def __init__(self, gate: Gate, keyring: Keyring) -> None:
        self.gate = gate
        self._keyring = keyring

    @operation("workspaces.create", resource="platform", allow=Role.ADMIN)
    def create(self, name: Name) -> Workspace:
        """Make a workspace with a data key of its own; you become its administrator."""
        call = current_call()
        root = objects.resolve(call.tx, ROOT, kind="workspace", workspace=ROOT)
        new = call.create("workspace", name, workspace=root)
        self._keyring.create(call.tx, new.id, now=call.now)
        grant_role(call.tx, new.id, call.caller.id, Role.ADMIN, now=call.now, by=actors(call.tx, call.caller))
        return workspace_record(new)

    @operation("workspaces.list", resource="platform", mode=Mode.READ, allow="anyone")
    def list(self, *, after: Cursor = "", limit: PageSize = 100) -> Page[Workspace]:
        """The workspaces that you may see."""
        return list_page(
            self.gate, ["workspace"], lambda page: map(workspace_record, page), after=after, limit=limit
        )

    @operation("workspaces.show", resource="workspace", mode=Mode.READ)
    def show(self, workspace: WorkspaceRef) -> Workspace:
        """One workspace."""
        return workspace_record(current_call().target)

    @operation("workspaces.grant", resource="workspace", allow=Role.ADMIN)
    def grant(self, workspace: WorkspaceRef, subject: SubjectRef, *, role: Role) -> Grant:
        """Give a user, service account or group a role in a workspace (`platform`: in every workspace)."""
        call = current_call()
        by = actors(call.tx, call.caller)
        grant_role(call.tx, call.target.id, call.object("subject").id, role, now=call.now, by=by)
        return Grant(workspace=call.target.name, subject=call.object("subject").name, role=role)

    @operation("workspaces.revoke", resource="workspace", allow=Role.ADMIN)
    def revoke(self, workspace: WorkspaceRef, subject: SubjectRef, *, role: Role) -> Grant:
        """Take a role away again; the last administrator of the platform stays."""
        call = current_call()
        taken = Grant(workspace=call.target.name, subject=call.object("subject").name, role=role)
        if not revoke_role(call.tx, call.target.id, call.object("subject").id, role):
            raise Conflict(f"{taken.subject} does not hold the role {role} in {taken.workspace}")
        require_administrator(call.tx)
        return taken

    @operation("workspaces.roles", resource="workspace", mode=Mode.READ)
    def roles(self, workspace: WorkspaceRef) -> tuple[Grant, ...]:
        """List who holds which role in a workspace."""
        call = current_call()
        return tuple(grants_in(call.tx, call.target))
