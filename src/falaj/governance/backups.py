"""Backups as the platform knows them: the hold on stored bytes while one is made, and the audit entry of a restore."""

from __future__ import annotations

from datetime import datetime, timedelta

from sqlalchemy import delete, func, insert, select, update

from falaj.errors import Conflict
from falaj.governance.audit.log import AuditLog, read_log_id
from falaj.governance.audit.merkle import Frontier
from falaj.governance.policy.epochs import advance_epoch
from falaj.governance.tables import audit_state, backups, sign_in_codes, tokens
from falaj.ports.metadata import Transaction
from falaj.records.backups import AuditTip, BackupHold
from falaj.records.governance.audit import RestoredFrom
from falaj.records.names import ROOT, new_id

HOLD = timedelta(minutes=10)
"""How long bytes are kept after the last sign of life of a backup."""


def begin(tx: Transaction, *, caller: str, public_key: bytes, now: datetime) -> BackupHold:
    """Hold all stored bytes: from the commit on none is deleted while the backup is extended."""
    ident = new_id("backup")
    tx.execute(insert(backups), {"id": ident, "caller": caller, "began_at": now, "held_until": now + HOLD})
    return _load(tx, ident, public_key)


def extend(tx: Transaction, ident: str, *, public_key: bytes, now: datetime) -> BackupHold:
    """Hold the bytes for longer. Raise Conflict if the hold has ended: bytes may have been deleted since."""
    _change(tx, ident, now=now, held_until=now + HOLD)
    return _load(tx, ident, public_key)


def finish(tx: Transaction, ident: str, *, manifest: str, now: datetime) -> None:
    """End the hold and keep the digest of the manifest. Raise Conflict if the hold had ended before."""
    _change(tx, ident, now=now, held_until=now, manifest=manifest)


def is_held(tx: Transaction, *, now: datetime) -> bool:
    """Tell whether a backup is being made. Whoever deletes bytes that were referred to asks first, and waits."""
    return int(tx.execute(select(func.count()).where(backups.c.held_until > now)).scalar_one()) > 0


def audit_tip(tx: Transaction) -> AuditTip:
    """Return the size and root of the audit log."""
    text = tx.execute(select(audit_state.c.frontier)).scalar_one()
    tree = Frontier.from_text(text)
    return AuditTip(size=tree.size, root=tree.root().hex())


def end_credentials(tx: Transaction, *, now: datetime) -> None:
    """End all tokens and sign-in links: some of them were revoked after the backup was made."""
    living = tokens.c.revoked_at.is_(None), tokens.c.expires_at > now
    tx.execute(update(tokens).where(*living).values(expires_at=now))
    tx.execute(delete(sign_in_codes))
    advance_epoch(tx)


def record_restore(
    tx: Transaction, log: AuditLog, restored: RestoredFrom, *, caller: str, at: datetime
) -> int:
    """Append the audit entry of a restore as the first entry after those of the backup."""
    entry = {
        "at": at,
        "caller": caller,
        "action": "platform.restore",
        "outcome": "done",
        "objects": [ROOT],
        "workspace": ROOT,
        "origin": "local",
        "rule": "owner of the home",
        "input": log.digest(restored.model_dump_json().encode()),
        "restored": restored.model_dump(mode="json"),
    }
    return log.append(tx, [entry])


def _change(tx: Transaction, ident: str, *, now: datetime, **values: object) -> None:
    living = backups.c.id == ident, backups.c.held_until > now, backups.c.manifest.is_(None)
    if tx.execute(update(backups).where(*living).values(**values)).rowcount != 1:
        raise Conflict(
            f"backup {ident} is finished, or paused for more than {HOLD.seconds // 60} minutes, so that bytes may have "
            "been deleted; run falaj backup again: what was copied is kept"
        )


def _load(tx: Transaction, ident: str, public_key: bytes) -> BackupHold:
    row = tx.execute(select(backups).where(backups.c.id == ident)).mappings().one()
    return BackupHold(
        id=row["id"],
        log_id=read_log_id(tx),
        public_key=public_key.hex(),
        began_at=row["began_at"],
        held_until=row["held_until"],
    )
