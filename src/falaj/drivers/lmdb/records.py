"""Checked records in an LMDB file: a changed value is noticed, and so is a key that is lost.

LMDB checks nothing. Each record has a checksum over its key, its time, the key that follows it and its value, so that
the records form a chain in the order of their keys, from HEAD to the last. A key is known to be missing if the record
before it names the one behind it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from falaj.errors import Damaged, Fault

HEAD = b"\0"
"""The key of the first record, which sorts before every other."""
FORMAT = b"1"
"""The value of HEAD: the version of this format."""

_HEADER = struct.Struct("<q16s16s")
_NOTHING = bytes(16)
MAX_BYTES = 1 << 20
"""More than a value has: a length beyond it is not followed, because the memory behind it may not be there."""


class StoredRecord(NamedTuple):
    """A record: the event time of its value, a fingerprint of the next key in the file, and the value."""

    time: int
    next: bytes
    value: bytes


def damaged(given: str) -> Damaged:
    """Return the error for a file that is not what was written."""
    fix = "stop the platform and run falaj doctor --repair: it rebuilds online values from the tables"
    fault = Fault(where="online store", given=given, allowed="what was written", fix=fix)
    return Damaged("the online store is damaged", faults=[fault])


def get(transaction: Any, key: bytes) -> StoredRecord | None:
    """Return the record of `key`; none if it is known to be missing. Raise Damaged if neither is certain."""
    stored = transaction.get(key)
    if stored is None:
        _require_missing(transaction, key)
        return None
    return _decode(key, stored)


def put(transaction: Any, rows: Sequence[tuple[bytes, int, bytes]]) -> int:
    """Store rows of key, time and value, sorted by key, unless a newer one is there; return how many were stored.

    A new record is held back until the next new key is known: most follow each other, and each is written once.
    """
    writer = _ChainWriter(transaction)
    written = sum(writer.put(*row) for row in rows)
    writer.flush()
    return written


def begin(transaction: Any) -> None:
    """Begin the chain of a new file; do nothing if it has begun."""
    if transaction.get(HEAD) is None:
        transaction.put(HEAD, _encode(HEAD, StoredRecord(0, _NOTHING, FORMAT)))


def check(transaction: Any) -> int:
    """Check every record and the whole chain; return how many there are besides HEAD."""
    expected, count = _fingerprint(HEAD), -1
    for key, stored in transaction.cursor():
        if _fingerprint(bytes(key)) != expected:
            raise damaged("a key that was not written there")
        expected = _decode(bytes(key), stored).next
        count += 1
    if count < 0 or expected != _NOTHING:
        raise damaged("records are missing")
    return count


class _ChainWriter:
    """Writes records in the order of their keys; `_held` is a new one that is not written yet."""

    def __init__(self, transaction: Any) -> None:
        self._transaction = transaction
        self._cursor = transaction.cursor()
        self._held: tuple[bytes, StoredRecord] | None = None

    def put(self, key: bytes, time: int, value: bytes) -> bool:
        if self._held is not None and self._held[0] == key:  # the same key twice
            if is_newer := self._held[1].time <= time:
                self._held = key, StoredRecord(time, self._held[1].next, value)
            return is_newer
        following = bytes(self._cursor.key()) if self._cursor.set_range(key) else None
        if following != key:
            self._held = key, StoredRecord(time, self._link(key, following), value)
            return True
        before = _decode(key, self._cursor.value())
        if is_newer := before.time <= time:
            self._transaction.put(key, _encode(key, StoredRecord(time, before.next, value)))
        return is_newer

    def flush(self) -> None:
        if self._held is not None:
            self._transaction.put(self._held[0], _encode(*self._held))
            self._held = None

    def _link(self, key: bytes, following: bytes | None) -> bytes:
        """Let the record before `key`, which may be the held one, name it; return what it named before."""
        previous = _previous(self._cursor, following)
        if self._held is not None and self._held[0] > previous:
            previous, record = self._held
        else:
            self.flush()
            record = _decode(previous, self._transaction.get(previous))
        _require_gap(previous, record, key, following)
        linked = StoredRecord(record.time, _fingerprint(key), record.value)
        self._transaction.put(previous, _encode(previous, linked))
        return record.next


def _require_missing(transaction: Any, key: bytes) -> None:
    """Raise Damaged unless the record before `key` names the one behind it."""
    cursor = transaction.cursor()
    following = bytes(cursor.key()) if cursor.set_range(key) else None
    previous = _previous(cursor, following)
    _require_gap(previous, _decode(previous, cursor.value()), key, following)


def _previous(cursor: Any, following: bytes | None) -> bytes:
    """Return the key before that of the cursor, which stands at `following` or behind the last record."""
    if not (cursor.last() if following is None else cursor.prev()):
        raise damaged("the first record is missing")
    return bytes(cursor.key())


def _require_gap(previous: bytes, record: StoredRecord, key: bytes, following: bytes | None) -> None:
    expected = _NOTHING if following is None else _fingerprint(following)
    if record.next != expected or not previous < key or (following is not None and following <= key):
        raise damaged("a record is missing")


def _encode(key: bytes, record: StoredRecord) -> bytes:
    checksum = _checksum(key, record.time, record.next, record.value)
    return _HEADER.pack(record.time, record.next, checksum) + record.value


def _decode(key: bytes, stored: Any) -> StoredRecord:
    if not _HEADER.size <= len(stored) <= MAX_BYTES:
        raise damaged(f"a record of {len(stored)} bytes")
    time, following, checksum = _HEADER.unpack_from(stored)
    value = bytes(stored[_HEADER.size :])
    if _checksum(key, time, following, value) != checksum:
        raise damaged("a record with another checksum")
    return StoredRecord(time, following, value)


def _checksum(key: bytes, time: int, following: bytes, value: bytes) -> bytes:
    return blake2b(b"%d %d " % (time, len(key)) + key + following + value, digest_size=16).digest()


def _fingerprint(key: bytes) -> bytes:
    return blake2b(key, digest_size=16).digest()
