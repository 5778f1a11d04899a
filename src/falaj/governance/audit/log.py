"""The append-only log: entries join the transaction of what they record; heads are signed about once a second."""

from __future__ import annotations

import hmac
import json
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from sqlalchemy import insert, select

from falaj.errors import Conflict, Tampered, Unavailable
from falaj.governance.audit.merkle import Frontier
from falaj.governance.audit.verify import canonical, head_message, key_id, leaf_hash
from falaj.governance.tables import audit_heads, audit_state
from falaj.ports.keys import KeyService
from falaj.ports.metadata import Database, Transaction, to_micros
from falaj.records.governance.audit import SignedHead
from falaj.records.record import utc_now

Draft = dict[str, Any]
"""An entry that has no sequence number yet."""

_read_state = select(audit_state.c.size, audit_state.c.frontier).where(audit_state.c.id == 1)
_lock_state = _read_state.with_for_update()
_INSERT = (
    "INSERT INTO governance_audit_entries (seq, at, caller, action, outcome, workspace, leaf, entry) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING RETURNING seq"
)
_SWAP = (
    "UPDATE governance_audit_state SET size = ?, frontier = ? "
    "WHERE id = 1 AND size = ? AND frontier = ? RETURNING size"
)


class AuditLog:
    """Appends entries and signs heads. Who has the signing key could rewrite the log; the witness detects it."""

    def __init__(
        self,
        database: Database,
        *,
        keys: KeyService,
        input_key: Callable[[], bytes],
        log_id: str,
        witness: Path | None = None,
    ) -> None:
        self._database = database
        self._keys = keys
        self._input_key = input_key
        self.log_id = log_id
        self._witness = witness
        self._tip = (0, Frontier().to_text())
        self._group = _Group(self._commit_group)
        self._signing = threading.Lock()

    def digest(self, data: bytes) -> str:
        """The HMAC under which an input is kept."""
        return hmac.digest(self._input_key(), data, "sha256").hex()

    def append(self, tx: Transaction, drafts: Sequence[Draft]) -> int:
        """Append within `tx`; the sequence number of the first. The log's tip stays locked until `tx` ends."""
        size, text = self._tip
        if not self._write(tx, drafts, size, text):
            size, text = tx.execute(_lock_state).one()
            if not self._write(tx, drafts, size, text):
                raise RuntimeError("the audit log's tip moved while it was locked")
        return int(size)

    def append_grouped(self, draft: Draft) -> None:
        """Append in a transaction shared with others who are appending now; returns when it is committed."""
        self._group.submit(draft)

    def is_empty(self, tx: Transaction) -> bool:
        return bool(tx.execute(_lock_state).one().size == 0)

    def sign_head(self) -> SignedHead | None:
        """Sign the log as it is now and hand the head to the witness; none if that head is signed already."""
        with self._signing:
            with self._database.read() as tx:
                size, text = tx.execute(_read_state).one()
                newest = tx.execute(
                    select(audit_heads.c.size).order_by(audit_heads.c.size.desc()).limit(1)
                ).scalar()
            if size == 0 or size == newest:
                return None
            head = self._sign(size, Frontier.from_text(text).root().hex())
            try:
                with self._database.write() as tx:
                    tx.execute(insert(audit_heads), head.model_dump(exclude={"log_id"}))
            except Conflict:
                return None
            if self._witness is not None:
                _append_line(self._witness, head.model_dump_json())
            return head

    def _sign(self, size: int, root: str) -> SignedHead:
        at = utc_now().isoformat()
        signature = self._keys.sign(head_message(self.log_id, size, root, at)).hex()
        key = key_id(self._keys.public_key())
        return SignedHead(log_id=self.log_id, size=size, root=root, at=at, key=key, signature=signature)

    def _write(self, tx: Transaction, drafts: Sequence[Draft], size: int, text: str) -> bool:
        """Append behind the tip (`size`, `text`); false, and nothing written, if the tip is elsewhere."""
        rows = [_row(size + number, draft) for number, draft in enumerate(drafts)]
        frontier = Frontier.from_text(text).extend(row[LEAF] for row in rows)
        new_size, new_text = size + len(rows), frontier.to_text()
        if not tx.execute_sql(_SWAP, (new_size, new_text, size, text)):
            return False
        for row in rows:
            if not tx.execute_sql(_INSERT, row):
                raise Tampered(f"an entry {row[0]} was put behind the end of the audit log, not by Falaj")
        self._tip = (new_size, new_text)
        return True

    def _commit_group(self, drafts: Sequence[Draft]) -> None:
        with self._database.write() as tx:
            self.append(tx, drafts)


LEAF = 6
"""The position of the leaf hash in a row."""


def _row(seq: int, draft: Draft) -> tuple[Any, ...]:
    entry = {"seq": seq, **draft, "at": _iso(draft["at"])}
    if "until" in draft:
        entry["until"] = _iso(draft["until"])
    data = canonical(entry)
    return (
        seq,
        to_micros(draft["at"]),
        draft["caller"],
        draft["action"],
        draft["outcome"],
        draft["workspace"],
        leaf_hash(data),
        data.decode(),
    )


def _iso(moment: datetime) -> str:
    return moment.isoformat()


TAIL_BYTES = 4096
"""More than a line of the witness has."""


def read_log_id(tx: Transaction) -> str:
    return str(tx.execute(select(audit_state.c.log_id)).scalar_one())


def _append_line(path: Path, line: str) -> None:
    """Append one line and make it durable; what a crash left of an unfinished one is cut off first."""
    with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TAIL_BYTES))
        tail = file.read()
        end = size - len(tail) + tail.rfind(b"\n") + 1
        file.truncate(end)
        file.seek(end)
        file.write(line.encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def entry_of(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text)
    return found


class _Group:
    """Group commit: the first thread to arrive leads, and commits for all threads that wait by then.

    KeyboardInterrupt may be raised in the main thread at any moment; no other thread waits for that thread then.
    """

    def __init__(self, commit: Callable[[Sequence[Draft]], None]) -> None:
        self._commit = commit
        self._lock = threading.Lock()
        self._waiting: list[_Ticket] = []
        self._leader: _Ticket | None = None

    def submit(self, draft: Draft) -> None:
        ticket = _Ticket(draft)
        try:
            with self._lock:
                self._waiting.append(ticket)
                self._leader = self._leader or ticket
            if self._leader is not ticket:
                ticket.turn.acquire()
            if not ticket.done:
                self._lead(ticket)
        except BaseException:
            self._abandon(ticket)
            raise
        if ticket.error is not None:
            raise ticket.error

    def _lead(self, ticket: _Ticket) -> None:
        """Commit for all waiting threads, wake them, and hand the lead to one that arrived in the meantime."""
        group: list[_Ticket] = []
        error: Exception | None = Unavailable(
            "the audit log was interrupted while it recorded this; try again"
        )
        try:
            with self._lock:
                group, self._waiting = self._waiting, []
            self._commit([each.draft for each in group])
            error = None
        except Exception as failure:
            error = failure
        finally:
            try:
                self._hand_on(ticket, group, error)
            except BaseException:  # Ctrl-C: once more, what was done stays done
                self._hand_on(ticket, group, error)
                raise

    def _hand_on(self, ticket: _Ticket, group: Sequence[_Ticket], error: Exception | None) -> None:
        for each in group:
            each.done, each.error = True, error
        with self._lock:
            if self._leader is ticket:
                self._leader = self._waiting[0] if self._waiting else None
            following = self._leader
        for each in group:
            each.wake()
        if following is not None:
            following.wake()

    def _abandon(self, ticket: _Ticket) -> None:
        """Remove a ticket whose thread was interrupted; if it leads, commit for those who wait."""
        with self._lock:
            leads = self._leader is ticket
            if ticket in self._waiting and not leads:
                self._waiting.remove(ticket)
        if leads:
            self._lead(ticket)


class _Ticket:
    """A thread that waits for a commit; `turn` opens when it is done, or when this thread has to lead."""

    __slots__ = ("done", "draft", "error", "turn")

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self.done = False
        self.error: Exception | None = None
        self.turn = threading.Lock()
        self.turn.acquire()

    def wake(self) -> None:
        with suppress(RuntimeError):  # it was woken already
            self.turn.release()
