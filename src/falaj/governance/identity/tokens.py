"""Tokens: 256 random bits, kept as a hash, limited in scope and time, revocable at once."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import bindparam, delete, insert, select

from falaj.errors import Denied, Unauthenticated
from falaj.governance import objects
from falaj.governance.identity.principals import is_disabled
from falaj.governance.operations.caller import Caller
from falaj.governance.tables import objects as objects_table
from falaj.governance.tables import sign_in_codes, tokens
from falaj.ports.directory import VerifiedPrincipal
from falaj.ports.metadata import Transaction, to_micros
from falaj.records.governance.identity import PrincipalKind, SignInLink, Token
from falaj.records.governance.objects import StoredObject
from falaj.records.names import (
    ObjectId,
    PrincipalId,
)

PREFIX = "fj_"
SECRET_BYTES = 32
LINK_LIFETIME = timedelta(minutes=5)
LINK_MAC_BYTES = 16
LINK_REFUSED = "this sign-in link was used or has expired; 'falaj tokens sign-in-link' makes a new one"


_all = select(tokens, objects_table.c.name, objects_table.c.kind).join(
    objects_table, objects_table.c.id == tokens.c.principal
)
_by_id = _all.where(tokens.c.id == bindparam("id"))
_by_ids = objects.RowsByIds(_all, tokens.c.id)


Digest = Callable[[bytes], str]
"""The platform's keyed digest."""


def create_link(
    tx: Transaction, principal: str, *, now: datetime, vouched_by: Sequence[str], digest: Digest
) -> SignInLink:
    """Store a sign-in code. It contains a MAC of what is stored: who can write to the database makes no other of it."""
    secret, until = os.urandom(SECRET_BYTES), now + LINK_LIFETIME
    code = _text(secret + _link_mac(secret, principal, until, vouched_by, digest))
    row = {"code_hash": _hash(code), "principal": principal, "expires_at": until}
    tx.execute(insert(sign_in_codes), row | {"vouched_by": list(vouched_by)})
    return SignInLink(code=code, expires_at=until)


def redeem_link(tx: Transaction, code: str, *, now: datetime, origin: str, digest: Digest) -> Caller:
    """Return the caller to whom a sign-in code belongs, and use the code up."""
    found = tx.execute(
        delete(sign_in_codes)
        .where(sign_in_codes.c.code_hash == _hash(code))
        .returning(sign_in_codes.c.principal, sign_in_codes.c.expires_at, sign_in_codes.c.vouched_by)
    ).first()
    person = found and objects.by_id(tx, found.principal)
    if not found or not person or found.expires_at < now or is_disabled(tx, person.id):
        raise Unauthenticated(LINK_REFUSED)
    _require_own_link(code, found, digest)
    return replace(caller_for(person, origin=origin), vouchers=tuple(found.vouched_by or ()))


def _require_own_link(code: str, found: Any, digest: Digest) -> None:
    """Raise Unauthenticated unless the platform made `code` for what is stored under it."""
    try:
        raw = urlsafe_b64decode(code + "=" * (-len(code) % 4))
    except ValueError:
        raise Unauthenticated(LINK_REFUSED) from None
    secret, mac = raw[:SECRET_BYTES], raw[SECRET_BYTES:]
    expected = _link_mac(secret, found.principal, found.expires_at, found.vouched_by or (), digest)
    if not hmac.compare_digest(mac, expected):
        raise Unauthenticated(LINK_REFUSED)


def _link_mac(
    secret: bytes, principal: str, until: datetime, vouched_by: Sequence[str], digest: Digest
) -> bytes:
    bound = json.dumps(["sign-in link", secret.hex(), principal, to_micros(until), [*vouched_by]])
    return bytes.fromhex(digest(bound.encode()))[:LINK_MAC_BYTES]


def require_link(tx: Transaction, code: str) -> None:
    """Raise Unauthenticated unless there is a link with this code, which may have expired."""
    query = select(sign_in_codes.c.principal).where(sign_in_codes.c.code_hash == _hash(code))
    if tx.execute(query).first() is None:
        raise Unauthenticated(LINK_REFUSED)


def forget_links(tx: Transaction, *, before: datetime) -> int:
    """Delete sign-in codes that expired before `before`; return how many."""
    return tx.execute(delete(sign_in_codes).where(sign_in_codes.c.expires_at < before)).rowcount


def caller_for(person: StoredObject, *, origin: str) -> Caller:
    """Return a principal as a caller with unlimited scope."""
    kind: PrincipalKind = "service" if person.kind == "service" else "user"
    return Caller(PrincipalId(person.id), person.name, kind, origin)


def recognize(tx: Transaction, credential: str, *, now: datetime) -> VerifiedPrincipal | None:
    """Return the owner of a valid token, or none. It takes as long whether the id or the secret is wrong."""
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
    """Return the tokens of a principal for one purpose that are neither revoked nor expired."""
    query = select(tokens.c.id).where(
        tokens.c.principal == principal,
        tokens.c.purpose == purpose,
        tokens.c.revoked_at.is_(None),
        tokens.c.expires_at > now,
    )
    return list(tx.execute(query).scalars())


def is_over(tx: Transaction, ident: str, *, now: datetime | None) -> bool:
    """Tell whether a token was revoked or, if `now` is given, has expired."""
    row = tx.execute(select(tokens.c.revoked_at, tokens.c.expires_at).where(tokens.c.id == ident)).first()
    return row is None or row.revoked_at is not None or (now is not None and row.expires_at <= now)


def spell(ident: str, secret: bytes) -> str:
    return f"{PREFIX}{ident}.{_text(secret)}"


def secret_hash(secret: bytes) -> bytes:
    """Return what is stored of a token's secret."""
    return _hash(_text(secret))


def token_record(tx: Transaction, ident: str) -> Token:
    (row,) = _by_ids.fetch(tx, [ident])
    return _token(tx, row, objects.by_id(tx, ident))


def token_records(tx: Transaction, page: Sequence[StoredObject]) -> list[Token]:
    known = {row["id"]: row for row in _by_ids.fetch(tx, [each.id for each in page])}
    return [_token(tx, known[each.id], each) for each in page]


def _token(tx: Transaction, row: Mapping[str, Any], made: StoredObject | None) -> Token:
    scope = row["scope"] and objects.by_id(tx, row["scope"])
    return Token(
        id=ObjectId(row["id"]),
        principal=row["name"],
        purpose=row["purpose"],
        workspace=scope.name if scope else None,
        actions=None if row["actions"] is None else tuple(row["actions"]),
        created_at=made.created_at if made else row["expires_at"],
        expires_at=row["expires_at"],
        revoked_at=row["revoked_at"],
    )


def require_within(caller: Caller, scope: str | None, actions: tuple[str, ...] | None) -> None:
    """Raise Denied if a token would issue one with a wider scope than its own."""
    if caller.workspace is not None and scope != caller.workspace:
        raise Denied("this token is limited to its workspace and cannot issue one for another")
    for pattern in actions or ():
        if not caller.may_name(pattern):
            raise Denied(f"this token does not reach {pattern} and cannot issue one that does")


def is_limited(caller: Caller) -> bool:
    return caller.workspace is not None or caller.actions is not None


def descendants(tx: Transaction, ident: str) -> list[str]:
    """Return a token and all tokens that it issued, directly or not."""
    family, found = [ident], [ident]
    while found:
        found = list(tx.execute(select(tokens.c.id).where(tokens.c.issuer.in_(found))).scalars())
        family += found
    return family


def capped_expiry(tx: Transaction, caller: Caller, until: datetime) -> datetime:
    """Return the expiry of a new token: one issued by a limited token expires with it at the latest."""
    if caller.token is None or not is_limited(caller):
        return until
    own: datetime = tx.execute(select(tokens.c.expires_at).where(tokens.c.id == caller.token)).scalar_one()
    return min(own, until)


def _text(secret: bytes) -> str:
    return urlsafe_b64encode(secret).rstrip(b"=").decode()


def _hash(code: str) -> bytes:
    return hashlib.sha256(code.encode()).digest()
