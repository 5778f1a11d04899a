"""The append-only log: entries join the transaction of what they record; heads are signed about once a second."""

from __future__ import annotations

import contextvars
import hmac
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from hashlib import blake2b
from typing import Any

from sqlalchemy import insert, select, update

from falaj.errors import Conflict, Fault, Tampered, Unavailable
from falaj.governance.audit.merkle import Frontier
from falaj.governance.audit.rows import (
    Digest,
    RecordedTransaction,
    RowChange,
    recorded_shapes,
    row_digest,
    stored_rows,
)
from falaj.governance.audit.unsigned import EntryCheck, check_unsigned, frontier_at
from falaj.governance.audit.verify import canonical, head_message, key_id, leaf_hash, signed_by
from falaj.governance.audit.witness import Witness
from falaj.governance.tables import audit_heads, audit_state
from falaj.ports.keys import KeyService
from falaj.ports.metadata import Database, Transaction, to_micros
from falaj.records.governance.audit import SignedHead
from falaj.records.names import ROOT
from falaj.records.record import utc_now

Draft = dict[str, Any]
"""An entry that has no sequence number yet."""

_read_state = select(audit_state.c.size, audit_state.c.frontier).where(audit_state.c.id == 1)
_lock_state = _read_state.with_for_update()
_lock_statements = select(audit_state.c.size, audit_state.c.statements).with_for_update()
_OF_EVERY_PART = ("at", "caller", "action", "outcome", "objects", "workspace", "origin", "rule", "input")
ROWS_PER_ENTRY = 2000
HEAD_COLUMNS = ("size", "root", "at", "key", "signature")
RESTORED = "restore the newest copy; if there is none, record the loss: falaj audit accept --reason TEXT"
_INSERT = (
    "INSERT INTO governance_audit_entries (seq, at, caller, action, outcome, workspace, leaf, entry, mac) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING RETURNING seq"
)
_SWAP = (
    "UPDATE governance_audit_state SET size = ?, frontier = ? "
    "WHERE id = 1 AND size = ? AND frontier = ? RETURNING size"
)


class AuditLog:
    """Appends entries and signs heads. Who has the signing key could rewrite the log; the witness detects it.

    Each entry gets a MAC that only the platform can make, and a head is signed only over entries whose MAC is right:
    who can write to the database alone gets nothing signed. `derive` returns the platform's key for a purpose.
    """

    def __init__(
        self,
        database: Database,
        *,
        keys: KeyService,
        derive: Callable[[str], bytes],
        log_id: str,
        witness: Witness,
    ) -> None:
        self._database = database
        self._keys = keys
        self._input_hmac = hmac.new(derive("audit input"), digestmod="sha256")
        self._mac_key = derive(f"audit entry {log_id}")
        self.row_digest: Digest = row_digest(derive("audit row"))
        self.log_id = log_id
        self.witness = witness
        self._tip = _Tip(Frontier())
        self._group = _Group(self.append_all)
        self._signing = threading.Lock()

    def digest(self, data: bytes) -> str:
        """The HMAC under which an input is kept."""
        state = self._input_hmac.copy()
        state.update(data)
        return state.hexdigest()

    def mac(self, leaf: bytes) -> bytes:
        """Return the MAC of the entry with this leaf hash, which covers its sequence number."""
        return blake2b(
            leaf, key=self._mac_key, digest_size=32
        ).digest()  # a keyed hash, and quicker than HMAC

    def recording(self, tx: Transaction) -> RecordedTransaction:
        """Return `tx` as one whose changed rows go into the entry that is appended within it."""
        return RecordedTransaction(tx, self.row_digest)

    def lock(self, tx: Transaction) -> None:
        """Let nobody else append until `tx` ends."""
        tx.execute(_lock_state)

    def take_rows(self, tx: Transaction, changes: Sequence[RowChange]) -> None:
        """Put rows that were changed outside the platform into the entry that is appended within `tx`."""
        if not isinstance(tx, RecordedTransaction):
            raise RuntimeError("only a transaction of the gate takes rows")
        tx.take(changes)

    def append(self, tx: Transaction, drafts: Sequence[Draft]) -> int:
        """Append within `tx`; the sequence number of the first. The log's tip stays locked until `tx` ends."""
        if isinstance(tx, RecordedTransaction) and (changes := tx.changes()):
            drafts = [*drafts[:-1], *_with_rows(drafts[-1], changes)]
        tip = self._tip
        if not self._write(tx, drafts, tip):
            tip = _Tip(Frontier.from_text(tx.execute(_lock_state).one().frontier))
            if not self._write(tx, drafts, tip):
                raise RuntimeError("the audit log's tip moved while it was locked")
        return tip.frontier.size

    def append_grouped(self, draft: Draft) -> None:
        """Append in a transaction shared with others who are appending now; returns when it is committed."""
        self._group.submit(draft)

    def append_or_hold(self, draft: Draft) -> None:
        """Append in a shared transaction; inside `held_back` leave that to whoever answers, who does it first."""
        held = _held_back.get()
        if held is None:
            self._group.submit(draft)
        else:
            held.append(draft)

    def append_all(self, drafts: Sequence[Draft]) -> None:
        """Append entries that were held back, in one transaction."""
        with self._database.write() as tx:
            self.append(tx, drafts)

    def begin(self, tx: Transaction, *, caller: str, now: datetime) -> None:
        """State in the log, once, which witness this home has. The first entry of a log also has all rows."""
        state = tx.execute(_lock_statements).one()
        known: dict[str, str] = (state.statements or {}).get("witnesses", {})
        home, path = self.witness.home, str(self.witness.path)
        if state.size and known.get(home) == path:
            return
        self.witness.begin()
        entry = {"at": now, "caller": caller, "outcome": "done", "objects": [ROOT], "workspace": ROOT}
        entry |= {"action": "platform.witness" if state.size else "platform.bootstrap", "origin": "local"}
        entry |= {"rule": "start", "input": self.digest(b""), "witness": {"home": home, "path": path}}
        self.append(tx, [entry] if state.size else _with_rows(entry, self._all_rows(tx)))
        tx.execute(update(audit_state).values(statements={"witnesses": {**known, home: path}}))

    def _all_rows(self, tx: Transaction) -> list[RowChange]:
        """Return every recorded row as one that is new to the log."""
        return [
            RowChange(shape.name, key, None, digest)
            for shape in recorded_shapes()
            for key, digest in stored_rows(tx, shape, self.row_digest)
        ]

    def sign_head(self) -> SignedHead | None:
        """Check what is not signed yet, sign the log as it is now and hand the head to the witness.

        None if that head is signed already. Tampered, and nothing signed, if an entry is not the platform's, or if the
        log is older than the head that the key's store remembers.
        """
        with self._signing:
            with self._database.read() as tx:
                size, text = tx.execute(_read_state).one()
                if size == 0:
                    return None
                self._require_remembered(tx, size)
                newest = self._newest_head(tx)
                if newest is not None and newest.size == size:
                    self.witness.add(newest)
                    return None
                root = self._check_unsigned(tx, newest, size, text).root().hex()
            head = self._sign(size, root)
            try:
                with self._database.write() as tx:
                    row = head.model_dump(exclude={"log_id"}) | {"frontier": text}
                    tx.execute(insert(audit_heads), row)
            except Conflict:
                return None
            self.witness.add(head)
            return head

    def unbound(self) -> list[str]:
        """Say what is wrong between the log and the head that the key's store remembers."""
        try:
            with self._database.read() as tx:
                self._require_remembered(tx, tx.execute(_read_state).one().size)
        except Tampered as error:
            return [_sentence(error)]
        return []

    def entry_check(self) -> EntryCheck:
        """Return a check of entries by their MACs."""
        return EntryCheck(self.mac)

    def damage(self) -> dict[str, Any]:
        """Return what is wrong now: entries that are not the platform's, and sentences. Nothing is changed."""
        entries: list[int] = []
        problems = [*self.unbound(), *self.witness.problems(self.witness.path)]
        try:
            with self._database.read() as tx:
                size, text = tx.execute(_read_state).one()
                self._check_unsigned(tx, self._newest_head(tx), size, text)
        except Tampered as error:
            entries = error.details.get("entries", [])
            problems.append(_sentence(error))
        return {"entries": entries, "problems": list(dict.fromkeys(problems))}

    def sign_anew(self) -> SignedHead:
        """Sign the log as it is now that its damage was accepted, and begin a new witness."""
        head = self._sign_regardless()
        self.witness.begin_again(head)
        return head

    def sign_restored(self) -> SignedHead:
        """Sign the log of a restored database, which states the restore; the witness keeps what it has."""
        head = self._sign_regardless()
        self.witness.adopt(head)
        return head

    def _sign_regardless(self) -> SignedHead:
        """Sign the log as it is, whatever head the key's store remembers; its entries are checked all the same."""
        with self._signing:
            with self._database.read() as tx:
                size, text = tx.execute(_read_state).one()
                root = self._check_unsigned(tx, self._newest_head(tx), size, text).root().hex()
            head = self._sign(size, root)
            with suppress(Conflict), self._database.write() as tx:
                tx.execute(insert(audit_heads), head.model_dump(exclude={"log_id"}) | {"frontier": text})
            return head

    def _newest_head(self, tx: Transaction) -> SignedHead | None:
        """Return the newest head; Tampered if it was altered."""
        query = select(audit_heads).order_by(audit_heads.c.size.desc()).limit(1)
        row = tx.execute(query).mappings().first()
        if row is None:
            return None
        head = SignedHead(log_id=self.log_id, **{name: row[name] for name in HEAD_COLUMNS})
        message = head_message(head.log_id, head.size, head.root, head.at)
        if not signed_by(self._keys.public_key(), bytes.fromhex(head.signature), message):
            raise Tampered(f"the signed head of size {head.size} was altered in the database")
        return head

    def _require_remembered(self, tx: Transaction, size: int) -> None:
        """Raise Tampered unless the log extends the head that the key's store remembers."""
        known = self.witness.memory()
        if known is None or known.size == 0:
            return
        if size < known.size:
            raise Tampered(
                f"the audit log has {size} entries, but its head of {known.size} entries was signed at {known.at}: "
                "the database was rolled back or cut",
                faults=[Fault(where="metadata database", fix=RESTORED)],
            )
        stored = tx.execute(select(audit_heads.c.root).where(audit_heads.c.size == known.size)).scalar()
        if (stored or frontier_at(tx, known.size).root().hex()) != known.root:
            raise Tampered(
                f"the first {known.size} entries of the audit log are not those that were signed at {known.at}",
                faults=[Fault(where="metadata database", fix=RESTORED)],
            )

    def _check_unsigned(self, tx: Transaction, newest: SignedHead | None, size: int, text: str) -> Frontier:
        """Return the tree of the whole log, whose entries since the newest head were checked."""
        check = self.entry_check()
        base = Frontier() if newest is None else _tree_of(tx, newest)
        frontier = check_unsigned(tx, base, size, check)
        check.raise_if_forged()
        if frontier.to_text() != text:
            raise Tampered("the size or the tree of the audit log was altered: they do not fit its entries")
        return frontier

    def _sign(self, size: int, root: str) -> SignedHead:
        at = utc_now().isoformat()
        signature = self._keys.sign(head_message(self.log_id, size, root, at)).hex()
        key = key_id(self._keys.public_key())
        return SignedHead(log_id=self.log_id, size=size, root=root, at=at, key=key, signature=signature)

    def _write(self, tx: Transaction, drafts: Sequence[Draft], tip: _Tip) -> bool:
        """Append behind `tip`; false, and nothing written, if the tip is elsewhere."""
        size = tip.frontier.size
        rows = [self._row(size + number, draft) for number, draft in enumerate(drafts)]
        new = _Tip(tip.frontier.extend(row[LEAF] for row in rows))
        if not tx.execute_sql(_SWAP, (new.frontier.size, new.text, size, tip.text)):
            return False
        for row in rows:
            if not tx.execute_sql(_INSERT, row):
                raise Tampered(f"an entry {row[0]} was put behind the end of the audit log, not by Falaj")
        self._tip = new
        return True

    def _row(self, seq: int, draft: Draft) -> tuple[Any, ...]:
        entry = {"seq": seq, **draft, "at": _iso(draft["at"])}
        if "until" in draft:
            entry["until"] = _iso(draft["until"])
        data = canonical(entry)
        leaf = leaf_hash(data)
        return (
            seq,
            to_micros(draft["at"]),
            draft["caller"],
            draft["action"],
            draft["outcome"],
            draft["workspace"],
            leaf,
            data.decode(),
            self.mac(leaf),
        )


_held_back: contextvars.ContextVar[list[Draft] | None] = contextvars.ContextVar("falaj_audit", default=None)


@contextmanager
def held_back() -> Iterator[list[Draft]]:
    """Yield the entries of the reads and failures inside; append them before anything of those is answered."""
    drafts: list[Draft] = []
    token = _held_back.set(drafts)
    try:
        yield drafts
    finally:
        _held_back.reset(token)


class _Tip:
    """The end of the log, and its text as the database has it."""

    __slots__ = ("frontier", "text")

    def __init__(self, frontier: Frontier) -> None:
        self.frontier = frontier
        self.text = frontier.to_text()


LEAF = 6
"""The position of the leaf hash in a row."""


def _iso(moment: datetime) -> str:
    return moment.isoformat()


def read_log_id(tx: Transaction) -> str:
    return str(tx.execute(select(audit_state.c.log_id)).scalar_one())


def _sentence(error: Tampered) -> str:
    return f"{error.message[0].upper()}{error.message[1:]}."


def _with_rows(draft: Draft, changes: Sequence[RowChange]) -> list[Draft]:
    """Return an entry with the rows that it changed; further ones where they are too many for one entry."""
    parts = [changes[start : start + ROWS_PER_ENTRY] for start in range(0, len(changes), ROWS_PER_ENTRY)]
    following = [
        {**{name: draft[name] for name in _OF_EVERY_PART}, "part": number, "rows": rows}
        for number, rows in enumerate(parts[1:], 2)
    ]
    return [{**draft, "rows": parts[0]} if parts else draft, *following]


def _tree_of(tx: Transaction, head: SignedHead) -> Frontier:
    """Return the tree under a signed head: as stored beside it, or from the leaves; Tampered if it does not fit."""
    stored = tx.execute(select(audit_heads.c.frontier).where(audit_heads.c.size == head.size)).scalar()
    with suppress(ValueError):
        found = Frontier.from_text(stored or "")
        if (found.size, found.root().hex()) == (head.size, head.root):
            return found
    found = frontier_at(tx, head.size)
    if (found.size, found.root().hex()) != (head.size, head.root):
        raise Tampered(f"the first {head.size} entries of the audit log are not those that were signed")
    return found


def entry_of(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text)
    return found


class _Group:
    """Group commit: the first thread to arrive leads, and commits for all threads that wait by then.

    KeyboardInterrupt may be raised in the main thread at any moment; no other thread waits for that thread then.
    """

    def __init__(self, commit: Callable[[Sequence[Draft]], None]) -> None:
        self._commit = commit
        self._lock = threading.RLock()  # `_abandon` releases it, if this thread still has it
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
        with suppress(RuntimeError):  # until it is not held
            while True:  # in Python 3.14 Ctrl-C can come between `with` and its block (CPython issue 148874)
                self._lock.release()
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
