"""Checks of the entries that no head covers yet: they are the platform's own, in order, and unaltered."""

from __future__ import annotations

import hmac
import json
from collections.abc import Callable

from sqlalchemy import select

from falaj.errors import Fault, Tampered
from falaj.governance.audit.merkle import Frontier
from falaj.governance.audit.verify import MAX_PROBLEMS, leaf_hash
from falaj.governance.tables import audit_entries
from falaj.ports.metadata import Transaction

BATCH = 5000
ACCEPTING = '"action":"audit.accept"'
ACCEPT = "falaj audit accept --reason TEXT records in the log that these entries are not Falaj's"

_columns = select(audit_entries.c.seq, audit_entries.c.leaf, audit_entries.c.entry, audit_entries.c.mac)


class EntryCheck:
    """Tells which entries are not the platform's own: those without the right MAC."""

    def __init__(self, mac: Callable[[bytes], bytes]) -> None:
        self._mac = mac
        self.forged: dict[int, str] = {}
        self._accepted: set[int] = set()

    def take(self, seq: int, entry: str, leaf: bytes, mac: bytes) -> bytes:
        """Check one entry; return the leaf hash of its contents."""
        found = leaf_hash(entry.encode())
        if bytes(leaf) != found:
            self._forge(seq, "its contents do not give its stored leaf hash")
        elif not hmac.compare_digest(bytes(mac), self._mac(found)):
            self._forge(seq, "its MAC is false")
        elif ACCEPTING in entry:
            accepted = json.loads(entry).get("accepted")  # none if it was denied or has failed
            self._accepted.update(accepted["entries"] if accepted else ())
        return found

    def unaccepted(self) -> dict[int, str]:
        """Return the entries that are not the platform's and that no later entry of the platform accepts, and why."""
        return {seq: why for seq, why in self.forged.items() if seq not in self._accepted}

    def raise_if_forged(self) -> None:
        forged = self.unaccepted()
        if forged:
            raise Tampered(
                f"the audit log is not signed: {_listed(list(forged))} not written by Falaj",
                faults=[Fault(where=f"entry {seq}", given=why, fix=ACCEPT) for seq, why in forged.items()],
                details={"entries": list(forged)},
            )

    def _forge(self, seq: int, why: str) -> None:
        if len(self.forged) < MAX_PROBLEMS:
            self.forged[seq] = why


def check_unsigned(tx: Transaction, base: Frontier, size: int, check: EntryCheck) -> Frontier:
    """Return the tree of `size` entries that grows out of `base`, each of its new entries checked."""
    frontier = base
    while frontier.size < size:
        first, end = frontier.size, min(size, frontier.size + BATCH)
        rows = tx.execute(
            _columns.where(audit_entries.c.seq >= first, audit_entries.c.seq < end).order_by(
                audit_entries.c.seq
            )
        ).all()
        missing = set(range(first, end)) - {row.seq for row in rows}
        if missing:
            raise Tampered(f"entry {min(missing)} of the audit log is missing: it was deleted")
        frontier = frontier.extend(check.take(*_parts(row)) for row in rows)
    return frontier


def frontier_at(tx: Transaction, size: int) -> Frontier:
    """Return the tree of the first `size` entries, by their stored leaf hashes."""
    leaves = select(audit_entries.c.leaf).where(audit_entries.c.seq < size).order_by(audit_entries.c.seq)
    return Frontier().extend(bytes(leaf) for leaf in tx.execute(leaves).scalars())


def _parts(row: object) -> tuple[int, str, bytes, bytes]:
    return row.seq, row.entry, row.leaf, row.mac  # type: ignore[attr-defined]


def _listed(seqs: list[int]) -> str:
    words = ", ".join(str(seq) for seq in seqs[:5]) + ("…" if len(seqs) > 5 else "")
    return f"entry {words} was" if len(seqs) == 1 else f"entries {words} were"
