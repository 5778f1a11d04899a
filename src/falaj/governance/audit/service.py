"""The operations on the audit log: list, export, prove, verify."""

from __future__ import annotations

import builtins
from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from sqlalchemy import func, select

from falaj.errors import FalajError, KeyUnavailable, NotFound, Tampered
from falaj.governance.audit.deep import (
    AuditedStores,
    Replay,
    blob_bytes,
    blob_pages,
    blob_problem,
    check_blob,
    differences,
    differing_rows,
    entries_from,
    row_problem,
    table_problems,
)
from falaj.governance.audit.log import HEAD_COLUMNS, AuditLog, entry_of
from falaj.governance.audit.merkle import Frontier, consistency_proof, inclusion_proof
from falaj.governance.audit.verify import MAX_PROBLEMS, Verification, key_id
from falaj.governance.encryption.keyring import has_living_key
from falaj.governance.operations.call import current_call
from falaj.governance.operations.gate import Gate
from falaj.governance.operations.operation import ArrowStream, Mode, operation
from falaj.governance.tables import audit_entries, audit_heads, audit_state
from falaj.ports.keys import KeyService
from falaj.ports.metadata import Transaction
from falaj.records.governance.audit import (
    AuditAcceptance,
    AuditEntry,
    ConsistencyProof,
    ExportLine,
    InclusionProof,
    LogCheck,
    Outcome,
    PublicKey,
    SignedHead,
)
from falaj.records.governance.identity import Role
from falaj.records.governance.objects import Page, PageSize
from falaj.records.names import ROOT, TextRule, WorkspaceRef

BATCH = 2000
REPORT_BYTES = 64 << 20
"""Bytes between two reports on the blobs."""
STATEMENTS = ("platform.bootstrap", "platform.witness", "audit.accept")
"""The actions whose entries state which witness a home has, or accept a loss."""

_last_seq = select(func.max(audit_entries.c.seq)).scalar_subquery()

Position = Annotated[int, Field(ge=0, le=2**62)]
Reason = Annotated[str, TextRule(r"[^\x00-\x1f\x7f]+", "printable characters", limit=500)]
Text = Annotated[str, TextRule(r"[^\x00-\x1f\x7f]*", "printable characters", limit=200)]


class Audit:
    """Read the log and prove it."""

    def __init__(self, gate: Gate, log: AuditLog, keys: KeyService, *, stores: AuditedStores) -> None:
        self.gate = gate
        self._log = log
        self._keys = keys
        self._stores = stores

    @operation("audit.list", resource="workspace", mode=Mode.READ, allow=Role.AUDITOR)
    def list(
        self,
        *,
        workspace: WorkspaceRef = ROOT,
        caller: Text | None = None,
        action: Text | None = None,
        outcome: Outcome | None = None,
        before: Position | None = None,
        limit: PageSize = 50,
    ) -> Page[AuditEntry]:
        """Entries of all workspaces, or of one, newest first."""
        call = current_call()
        query = select(audit_entries.c.seq, audit_entries.c.entry).order_by(audit_entries.c.seq.desc())
        wanted = {"caller": caller, "action": action, "outcome": outcome}
        if call.target.id != ROOT:
            wanted["workspace"] = call.target.id
        for column, value in wanted.items():
            query = query if value is None else query.where(audit_entries.c[column] == value)
        if before is not None:
            query = query.where(audit_entries.c.seq < before)
        rows = call.tx.execute(query.limit(limit + 1)).all()
        items = tuple(AuditEntry.model_validate(entry_of(row.entry)) for row in rows[:limit])
        return Page(items=items, next=str(items[-1].seq) if len(rows) > limit else None)

    @operation("audit.export", resource="platform", mode=Mode.FREE, allow=Role.AUDITOR)
    def export(self, *, first: Position = 0) -> Iterator[ExportLine]:
        """The log from entry `first` on, with its signed heads, as lines for the offline verifier."""
        for line, _row in self._lines(first):
            yield line

    @operation("audit.inclusion_proof", resource="platform", mode=Mode.FREE, allow=Role.AUDITOR)
    def inclusion_proof(self, seq: Position) -> InclusionProof:
        """The proof that an entry is in the log, against the newest signed head."""
        self._log.sign_head()
        with self.gate.database.read() as tx:
            head = _heads(tx)[-1:]
            if not head or seq >= head[0].size:
                raise NotFound(f"there is no signed entry {seq}; the log has {head[0].size if head else 0}")
            leaves = [bytes(leaf) for leaf in tx.execute(_leaves(head[0].size)).scalars()]
            text = tx.execute(select(audit_entries.c.entry).where(audit_entries.c.seq == seq)).scalar_one()
        path = inclusion_proof(leaves, seq, head[0].size)
        return InclusionProof(
            entry=entry_of(text),
            index=seq,
            size=head[0].size,
            path=tuple(p.hex() for p in path),
            head=head[0],
        )

    @operation("audit.consistency_proof", resource="platform", mode=Mode.FREE, allow=Role.AUDITOR)
    def consistency_proof(self, since: Position) -> ConsistencyProof:
        """The proof that the log only grew since it had `since` entries, against the newest signed head."""
        self._log.sign_head()
        with self.gate.database.read() as tx:
            head = _heads(tx)[-1:]
            if not head or not 0 < since <= head[0].size:
                raise NotFound(
                    f"there is no signed log of {since} entries; it has {head[0].size if head else 0}"
                )
            leaves = [bytes(leaf) for leaf in tx.execute(_leaves(head[0].size)).scalars()]
        path = consistency_proof(leaves, since, head[0].size)
        return ConsistencyProof(
            since=since,
            root=Frontier().extend(leaves[:since]).root().hex(),
            path=tuple(p.hex() for p in path),
            head=head[0],
        )

    @operation("audit.verify", resource="platform", mode=Mode.FREE, allow=Role.AUDITOR)
    def verify(self, *, deep: bool = False) -> Iterator[LogCheck]:
        """Check the log in the database against its heads, MACs and witness: how far it is, and at last the verdict.

        `deep`: check the stores against the log, too: rows of the database, files of tables, contents of blobs.
        """
        found = [*self._refusal(), *self._log.unbound()]
        stated, notes = self._witnesses()
        found += [problem for path in stated for problem in self._log.witness.problems(path)]
        lines = self._lines(0)
        header, _row = next(lines)
        walk, edited = Verification(_text(header), self._keys.public_key()), list[str]()
        for path in stated:
            for number, text in enumerate(_read_lines(path), 1):
                walk.read("witness", number, text)
        check, replay = self._log.entry_check(), Replay()
        for number, (line, row) in enumerate(lines, 2):
            walk.read("export", number, _text(line))
            if row is not None and line.entry is not None:
                check.take(row["seq"], row["entry"], row["leaf"], row["mac"])
                edited += _edited_columns(line, row)
                if deep and row["seq"] not in check.forged:
                    replay.take(line.entry)
            if number % BATCH == 0:
                yield LogCheck(finished=False, entries=number, of=header.size or 0)
        report = walk.report()
        forged = [f"Entry {seq} was not written by Falaj: {why}." for seq, why in check.unaccepted().items()]
        stores = list(islice(self._store_problems(replay), MAX_PROBLEMS)) if deep else []
        if deep:
            for checked, size in self._check_blobs(stores, notes):
                yield LogCheck(
                    finished=False,
                    entries=report.entries,
                    of=header.size or 0,
                    checked_bytes=checked,
                    size_bytes=size,
                )
        problems = (*found, *report.problems, *forged, *edited[:MAX_PROBLEMS], *stores)
        yield LogCheck(
            finished=True,
            ok=not problems,
            entries=report.entries,
            of=header.size or 0,
            heads=report.heads,
            unsigned_tail=report.unsigned_tail,
            problems=tuple(dict.fromkeys(problems)),
            notes=(*notes, *walk.restore_notes()),
        )

    def _store_problems(self, replay: Replay) -> Iterator[str]:
        rows = differing_rows(self.gate.database, replay, self._log.row_digest)
        yield from replay.problems
        yield from (row_problem(change) for change in rows)
        yield from table_problems(self.gate.database, replay, self._stores.table_digests)

    def _check_blobs(
        self, problems: builtins.list[str], notes: builtins.list[str]
    ) -> Iterator[tuple[int, int]]:
        """Hash all blobs; add what is wrong to `problems`, and yield how many bytes are done, and of how many."""
        database, default_zone = self.gate.database, self.gate.zones.default.name
        checked, reported, size, erased = 0, 0, blob_bytes(database), 0
        for blob in (each for page in blob_pages(database) for each in page):
            try:
                for amount in check_blob(blob, self._stores.read_blob, default_zone=default_zone):
                    checked += amount
                    if checked - reported >= REPORT_BYTES:
                        reported = checked
                        yield checked, size
            except KeyUnavailable as error:
                with database.read() as tx:
                    destroyed = not has_living_key(tx, blob.workspace)
                erased += destroyed
                problem = None if destroyed else blob_problem(database, blob, error)
            except FalajError as error:
                problem = blob_problem(database, blob, error)
            else:
                problem = None
            if problem is not None and len(problems) < MAX_PROBLEMS:
                problems.append(problem)
        if erased:
            notes.append(f"The bytes of {erased} blobs were not checked: their keys were destroyed.")

    @operation("audit.accept", resource="platform", mode=Mode.LATE, allow=Role.ADMIN, confirm=True)
    def accept(self, *, reason: Reason) -> AuditAcceptance:
        """Record that the log was damaged, and go on from here: forged entries, a lost witness, a restored database.

        What is accepted stays in the log with the reason, and every verification names it. An old witness is set aside.
        """
        call = current_call()
        accepted = self._log.damage() | {"reason": reason}
        call.details["accepted"] = accepted
        self.gate.commit(call, lambda: self._accept_rows(accepted))
        head = self._log.sign_anew()
        return AuditAcceptance(
            size=head.size, entries=tuple(accepted["entries"]), problems=tuple(accepted["problems"])
        )

    def _accept_rows(self, accepted: dict[str, Any]) -> None:
        """Take the rows as they are stored into the entry of the running call."""
        call, replay = current_call(), Replay()
        self._log.lock(call.tx)
        for entry in entries_from(call.tx, 0):
            if entry["seq"] not in accepted["entries"]:
                replay.take(entry)
        changed = differences(call.tx, replay, self._log.row_digest)
        self._log.take_rows(call.tx, changed)
        accepted["problems"] += [*replay.problems, *map(row_problem, changed)][:MAX_PROBLEMS]

    @operation("audit.key", resource="platform", mode=Mode.READ, allow="anyone")
    def key(self) -> PublicKey:
        """The public key that checks the log's heads."""
        public = self._keys.public_key()
        return PublicKey(log_id=self._log.log_id, key=key_id(public), ed25519=public.hex())

    @operation("audit.table", resource="platform", mode=Mode.FREE, allow=Role.AUDITOR)
    def table(self, *, first: Position = 0) -> ArrowStream:
        """The log from entry `first` on as an Arrow table, for analysis."""
        import pyarrow as pa

        schema = pa.schema(
            [
                ("seq", pa.int64()),
                ("at", pa.timestamp("us", "UTC")),
                *((name, pa.string()) for name in ("caller", "action", "outcome", "workspace", "entry")),
            ]
        )
        columns = [audit_entries.c[name] for name in schema.names]
        batches = (
            pa.RecordBatch.from_pylist([dict(row) for row in rows], schema=schema)
            for rows in self._batches(columns, first, self._extent()[0])
        )
        reader: ArrowStream = pa.RecordBatchReader.from_batches(schema, batches)
        return reader

    def _refusal(self) -> Iterator[str]:
        """Sign the log, and yield why not if it is refused."""
        try:
            self._log.sign_head()
        except Tampered as error:
            yield f"{error.message[0].upper()}{error.message[1:]}."

    def _witnesses(self) -> tuple[Sequence[Path], builtins.list[str]]:
        """The witness files that the log states for this home, and what was accepted so far."""
        query = select(audit_entries.c.seq, audit_entries.c.entry).order_by(audit_entries.c.seq)
        with self.gate.database.read() as tx:
            rows = tx.execute(query.where(audit_entries.c.action.in_(STATEMENTS))).all()
        paths, notes = list[Path](), list[str]()
        for entry in (entry_of(row.entry) for row in rows):
            if (stated := entry.get("witness")) and stated["home"] == self._log.witness.home:
                paths.append(Path(stated["path"]))
            if accepted := entry.get("accepted"):
                paths = paths[-1:]
                what = "; ".join(accepted["problems"]) or "nothing"
                by = f"{entry['caller']} at {entry['at']} (entry {entry['seq']}: {accepted['reason']})"
                notes.append(f"Accepted by {by}: {what}")
        return paths, notes

    def _lines(self, first: int) -> Iterator[tuple[ExportLine, Any]]:
        """An export's lines, entries with their rows; read in short transactions, up to the size at the start."""
        list(self._refusal())  # what cannot be signed is exported all the same: it is evidence
        with self.gate.database.read() as tx:
            every = _heads(tx)  # first: the log may grow meanwhile
        size, end = self._extent()
        first = min(first, size)
        frontier = self._frontier(first)
        yield (
            ExportLine(falaj_audit=1, log_id=self._log.log_id, first=first, size=size, frontier=frontier),
            None,
        )
        yield from ((ExportLine(head=head), None) for head in every if first <= head.size)
        for rows in self._batches(audit_entries.c, first, end):
            for row in rows:
                yield ExportLine(entry=entry_of(row["entry"]), leaf=bytes(row["leaf"]).hex()), row

    def _batches(self, columns: Any, first: int, end: int) -> Iterator[Any]:
        """Rows in order of seq; it does not trust that seqs are contiguous."""
        after = first - 1
        while True:
            query = select(*columns).where(audit_entries.c.seq > after, audit_entries.c.seq < end)
            with self.gate.database.read() as tx:
                rows = tx.execute(query.order_by(audit_entries.c.seq).limit(BATCH)).mappings().all()
            if not rows:
                return
            yield rows
            after = rows[-1]["seq"]

    def _extent(self) -> tuple[int, int]:
        """The log's size as recorded, and the end of what lies in the table: equal, unless it was tampered with."""
        with self.gate.database.read() as tx:
            size, last = tx.execute(select(audit_state.c.size, _last_seq)).one()
        return int(size), max(int(size), 0 if last is None else int(last) + 1)

    def _frontier(self, first: int) -> tuple[str, ...] | None:
        """The tree before `first`, from which a part of the log can be checked."""
        if first == 0:
            return None
        with self.gate.database.read() as tx:
            leaves = tx.execute(_leaves(first)).scalars().all()
        return tuple(root.hex() for root in Frontier().extend(bytes(leaf) for leaf in leaves).roots)


def _edited_columns(line: ExportLine, row: Any) -> Iterator[str]:
    """Yield the columns beside an entry that differ from the entry itself."""
    if line.entry is None:
        return
    stated = line.entry | {"at": datetime.fromisoformat(line.entry["at"])}
    for column in ("seq", "at", "caller", "action", "outcome", "workspace"):
        if row[column] != stated.get(column):
            yield f"Beside entry {row['seq']}, the column {column} was edited."


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="surrogateescape").splitlines()
    except OSError:  # `Witness.problems` says so
        return []


def _text(line: ExportLine) -> str:
    return line.model_dump_json(exclude_none=True)


def _leaves(size: int) -> Any:
    return select(audit_entries.c.leaf).where(audit_entries.c.seq < size).order_by(audit_entries.c.seq)


def _heads(tx: Transaction) -> list[SignedHead]:
    log_id = tx.execute(select(audit_state.c.log_id)).scalar_one()
    columns = [audit_heads.c[name] for name in HEAD_COLUMNS]
    rows = tx.execute(select(*columns).order_by(audit_heads.c.size)).mappings()
    return [SignedHead(log_id=log_id, **row) for row in rows]
