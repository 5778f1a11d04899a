"""Tokens: 256 random bits, kept as a hash, limited in scope and time, revocable at once."""

from __future__ import annotations

import hashlib
import hmac
import os
from base64 import urlsafe_b64encode
from datetime import datetime, timedelta
from typing import Annotated

from pydantic import Field
from sqlalchemy import bindparam, delete, insert, select, update

from falaj.errors import Conflict, Denied, Unauthenticated
from falaj.governance import objects
from falaj.governance.identity.principals import is_disabled
from falaj.governance.operations.call import current_call
from falaj.governance.operations.caller import Caller
from falaj.governance.operations.gate import Gate
from falaj.governance.operations.operation import Mode, operation
from falaj.governance.operations.pagination import list_page
from falaj.governance.policy.epochs import advance_epoch
from falaj.governance.tables import objects as objects_table
from falaj.governance.tables import sign_in_codes, tokens
from falaj.ports.directory import VerifiedPrincipal
from falaj.ports.metadata import Transaction
from falaj.records.governance.identity import IssuedToken, PrincipalKind, Role, SignInLink, Token
from falaj.records.governance.objects import Cursor, Page, PageSize, StoredObject
from falaj.records.names import (
    ROOT,
    ActionPattern,
    ObjectId,
    PrincipalId,
    TextRule,
    TokenRef,
    UserRef,
    WorkspaceRef,
    new_id,
)

PREFIX = "fj_"
SECRET_BYTES = 32
LINK_LIFETIME = timedelta(minutes=5)

Purpose = Annotated[str, TextRule(r"[^\x00-\x1f\x7f]+", "a purpose is a few printable words", limit=200)]
Lifetime = Annotated[timedelta, Field(gt=timedelta(0), le=timedelta(days=366))]

_by_id = (
    select(tokens, objects_table.c.name, objects_table.c.kind)
    .join(objects_table, objects_table.c.id == tokens.c.principal)
    .where(tokens.c.id == bindparam("id"))
)


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
        _within(call.caller, scope, actions)
        until = _capped(call.tx, call.caller, call.now + expires_in)
        ident, secret = new_id("token"), os.urandom(SECRET_BYTES)
        root = objects.resolve(call.tx, ROOT, kind="workspace", workspace=ROOT)
        call.create("token", ident, workspace=root, ident=ident, owner=call.target.id)
        values = {
            "id": ident,
            "principal": call.target.id,
            "secret_hash": _hash(_text(secret)),
            "scope": scope,
            "actions": list(actions) if actions is not None else call.caller.actions,
            "purpose": purpose,
            "issuer": call.caller.token if _is_limited(call.caller) else None,
            "expires_at": until,
        }
        call.tx.execute(insert(tokens), values)
        return IssuedToken(token=token_record(call.tx, ident), secret=spell(ident, secret))

    @operation("tokens.list", resource="platform", mode=Mode.READ, allow="anyone")
    def list(self, *, after: Cursor = "", limit: PageSize = 100) -> Page[Token]:
        """The tokens that you may see: your own, and all of them for administrators."""
        tx = current_call().tx
        return list_page(
            self.gate,
            ["token"],
            lambda found: token_record(tx, found.id),
            after=after,
            limit=limit,
            action="tokens.revoke",
        )

    @operation("tokens.revoke", resource="token", allow={"owner", Role.ADMIN})
    def revoke(self, token: TokenRef, *, keep_work: bool = False) -> Token:
        """End a token now, everywhere, with those that it issued if it was a limited one.

        keep_work: jobs and other work that were asked for with it go on, as when a token expires.
        """
        call = current_call()
        if token_record(call.tx, call.target.id).revoked_at is not None:
            raise Conflict(f"token {token} is revoked already")
        family = _descendants(call.tx, call.target.id)
        living = tokens.c.id.in_(family), tokens.c.revoked_at.is_(None)
        if keep_work:
            late = tokens.c.expires_at > call.now
            call.tx.execute(update(tokens).where(*living, late).values(expires_at=call.now))
        else:
            call.tx.execute(update(tokens).where(*living).values(revoked_at=call.now))
        advance_epoch(call.tx)
        return token_record(call.tx, call.target.id)

    @operation("tokens.sign_in_link", resource="user", allow={"owner", Role.ADMIN})
    def sign_in_link(self, *, user: UserRef | None = None) -> SignInLink:
        """A code that signs a user in once, within five minutes."""
        call = current_call()
        if (call.caller.workspace, call.caller.actions) != (None, None):
            raise Denied("this token is limited, and signing in would give more than it has")
        return make_link(call.tx, call.target.id, now=call.now)


def make_link(tx: Transaction, principal: str, *, now: datetime) -> SignInLink:
    code = _text(os.urandom(SECRET_BYTES))
    link = SignInLink(code=code, expires_at=now + LINK_LIFETIME)
    row = {"code_hash": _hash(code), "principal": principal, "expires_at": link.expires_at}
    tx.execute(insert(sign_in_codes), row)
    return link


def redeem_link(tx: Transaction, code: str, *, now: datetime, origin: str) -> Caller:
    """The caller whom a sign-in code belongs to; the code is spent by this."""
    found = tx.execute(
        delete(sign_in_codes)
        .where(sign_in_codes.c.code_hash == _hash(code))
        .returning(sign_in_codes.c.principal, sign_in_codes.c.expires_at)
    ).first()
    person = found and objects.by_id(tx, found.principal)
    if not found or not person or found.expires_at < now or is_disabled(tx, person.id):
        raise Unauthenticated(
            "this sign-in link was used or has expired; 'falaj tokens sign-in-link' makes a new one"
        )
    return caller_for(person, origin=origin)


def forget_links(tx: Transaction, *, before: datetime) -> int:
    """Drop sign-in codes that expired before `before`; how many."""
    return tx.execute(delete(sign_in_codes).where(sign_in_codes.c.expires_at < before)).rowcount


def caller_for(person: StoredObject, *, origin: str) -> Caller:
    """A principal as a caller without limits of its own."""
    kind: PrincipalKind = "service" if person.kind == "service" else "user"
    return Caller(PrincipalId(person.id), person.name, kind, origin)


def recognize(tx: Transaction, credential: str, *, now: datetime) -> VerifiedPrincipal | None:
    """Whom a token belongs to; none if it does not hold. Takes as long whether its id or its secret is wrong."""
    ident, _, text = credential.removeprefix(PREFIX).rpartition(".")
    row = tx.execute(_by_id, {"id": ident}).mappings().first()
    expected = bytes(row["secret_hash"]) if row else bytes(32)
    holds = hmac.compare_digest(_hash(text), expected)
    if not row or not holds or row["revoked_at"] or row["expires_at"] <= now:
        return None
    return VerifiedPrincipal(
        name=row["name"],
        kind=row["kind"],
        until=row["expires_at"],
        workspace=row["scope"],
        actions=None if row["actions"] is None else tuple(row["actions"]),
        token=ident,
    )


def in_use(tx: Transaction, principal: str, *, purpose: str, now: datetime) -> list[str]:
    """The tokens of a principal for one purpose that are neither revoked nor expired."""
    query = select(tokens.c.id).where(
        tokens.c.principal == principal,
        tokens.c.purpose == purpose,
        tokens.c.revoked_at.is_(None),
        tokens.c.expires_at > now,
    )
    return list(tx.execute(query).scalars())


def is_over(tx: Transaction, ident: str, *, now: datetime | None) -> bool:
    """Whether a token was revoked or, if `now` is given, has expired."""
    row = tx.execute(select(tokens.c.revoked_at, tokens.c.expires_at).where(tokens.c.id == ident)).first()
    return row is None or row.revoked_at is not None or (now is not None and row.expires_at <= now)


def spell(ident: str, secret: bytes) -> str:
    return f"{PREFIX}{ident}.{_text(secret)}"


def token_record(tx: Transaction, ident: str) -> Token:
    row = tx.execute(_by_id, {"id": ident}).mappings().one()
    made = objects.by_id(tx, ident)
    scope = row["scope"] and objects.by_id(tx, row["scope"])
    return Token(
        id=ObjectId(ident),
        principal=row["name"],
        purpose=row["purpose"],
        workspace=scope.name if scope else None,
        actions=None if row["actions"] is None else tuple(row["actions"]),
        created_at=made.created_at if made else row["expires_at"],
        expires_at=row["expires_at"],
        revoked_at=row["revoked_at"],
    )


def _within(caller: Caller, scope: str | None, actions: tuple[str, ...] | None) -> None:
    """A token cannot make one that reaches further than itself."""
    if caller.workspace is not None and scope != caller.workspace:
        raise Denied("this token is limited to its workspace and cannot issue one for another")
    for pattern in actions or ():
        if not caller.may_name(pattern):
            raise Denied(f"this token does not reach {pattern} and cannot issue one that does")


def _is_limited(caller: Caller) -> bool:
    return caller.workspace is not None or caller.actions is not None


def _descendants(tx: Transaction, ident: str) -> list[str]:
    """A token and all that came from it."""
    family, found = [ident], [ident]
    while found:
        found = list(tx.execute(select(tokens.c.id).where(tokens.c.issuer.in_(found))).scalars())
        family += found
    return family


def _capped(tx: Transaction, caller: Caller, until: datetime) -> datetime:
    """What a limited token issues ends with it at the latest."""
    if caller.token is None or not _is_limited(caller):
        return until
    own: datetime = tx.execute(select(tokens.c.expires_at).where(tokens.c.id == caller.token)).scalar_one()
    return min(own, until)


def _text(secret: bytes) -> str:
    return urlsafe_b64encode(secret).rstrip(b"=").decode()


def _hash(code: str) -> bytes:
    return hashlib.sha256(code.encode()).digest()
