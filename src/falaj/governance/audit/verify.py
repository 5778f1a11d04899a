"""Check an exported Falaj audit log offline: this one file and Python 3.10 are all it takes.

    python verify.py EXPORT.jsonl --public-key KEY [--witness HEADS.jsonl] [--json]

Exit status: 0 sound, 1 damaged, 2 misuse. KEY is the Ed25519 public key as 64 hex digits, or a file that has
them. Get KEY and HEADS from a place that the log's operator cannot write: whoever has the signing key can
sign a rewritten log, and only heads kept elsewhere (the witness) give that away. EXPORT may also be a proof
that one entry is in the log, {"entry", "index", "size", "path": [hex, ...], "head"}, or that the log only grew
since it had `since` entries and this root, {"since", "root", "path": [hex, ...], "head"}.

An export is JSON Lines in UTF-8, and reaches to the end of the log:

    {"falaj_audit": 1, "log_id": "...", "first": 0, "size": 1}   and "frontier": [hex, ...] when first > 0
    {"entry": {"seq": 0, ...}, "leaf": "hex"}                    entries by seq; "leaf" may be left out
    {"head": {"log_id", "size": 1, "root", "at", "key", "signature"}}

A head stands right after the last entry it covers, or anywhere before: one pass is enough. `frontier`: the
roots of the complete subtrees before entry `first`, largest first. `leaf`: the leaf hash as the database has
it; with it, an edited entry can be named. Leaf data is `canonical(entry)`, the tree is that of RFC 6962. In a
head, `root` is hex, `at` ISO 8601 in UTC, `key` the `key_id`, `signature` hex Ed25519 over `head_message`.
The witness's heads may also stand without {"head": ...} around them.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import reduce
from hashlib import sha256, sha512
from typing import Any, NamedTuple

try:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
except ImportError:
    Ed25519PublicKey = None  # type: ignore[assignment,misc]

MAX_LINE = 4 * 2**20  # characters; entries hold digests, not payloads
MAX_PROBLEMS = 50
HASH, KEY, SIGNATURE = (re.compile(f"[0-9a-f]{{{digits}}}") for digits in (64, 16, 128))
UTC_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,9})?(Z|\+00:00)", re.ASCII)
_encode = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode


class UnreadableExport(ValueError):
    """Not what the verifier reads: no header, no key, or a field of the wrong shape."""


class VerificationReport(NamedTuple):
    """The verdict: `problems` are sentences, nearest to the log's start first; `notes` are not damage."""

    entries: int
    heads: int
    witness_heads: int
    unsigned_tail: int
    problems: list[str]
    notes: list[str]

    @property
    def ok(self) -> bool:
        return not self.problems


def verify_export(lines: Iterable[str], public_key: bytes, witness: Iterable[str] = ()) -> VerificationReport:
    """Hold an export against its signed heads and the witness's, in one pass. Unreadable without a header."""
    rest = filter(str.strip, lines)
    walk = Verification(next(rest, ""), public_key)
    for number, line in enumerate(filter(str.strip, witness), 1):
        walk.read("witness", number, line)
    for number, line in enumerate(rest, 2):
        walk.read("export", number, line)
    return walk.report()


def verify_proof(proof: dict[str, Any], public_key: bytes) -> VerificationReport:
    """Check the document that says: this entry is in the log, under this signed head."""
    _need_fields("the proof", proof, {"entry": dict, "index": int, "size": int, "path": list, "head": dict})
    index, size, head = proof["index"], proof["size"], _read_head(proof["head"], public_key)
    seq, leaf = _read_entry(proof["entry"])
    path = [bytes.fromhex(each) for each in proof["path"]]
    problems = [f"The head of size {head.size} {head.fault}."] if head.fault else []
    if (index, size) != (seq, head.size):
        problems.append(f"The proof says {index} of {size}, its parts {seq} of {head.size}: edited.")
    if not verify_inclusion(leaf, index, size, path, bytes.fromhex(head.root)):
        problems.append(f"Entry {index} is not in the tree that was signed at size {head.size}: edited.")
    found = f"Entry {index} is in the log {head.log_id[:80]!a} of {size} entries, signed {head.at}."
    return VerificationReport(1, 1, 0, 0, problems, [] if problems else [found])


def verify_growth(
    proof: dict[str, Any], public_key: bytes, witness: Iterable[str] = ()
) -> VerificationReport:
    """Check the document that says: the log under this signed head begins with the `since` entries of that root."""
    _need_fields("the proof", proof, {"since": int, "root": HASH, "path": list, "head": dict})
    since, root, head = proof["since"], proof["root"], _read_head(proof["head"], public_key)
    path = [bytes.fromhex(each) for each in proof["path"]]
    problems = [f"The head of size {head.size} {head.fault}."] if head.fault else []
    if not verify_consistency(since, head.size, path, bytes.fromhex(root), bytes.fromhex(head.root)):
        problems.append(f"The log of size {head.size} does not extend that of size {since} and root {root}.")
    kept = [_read_kept(line, public_key) for line in filter(str.strip, witness)]
    same = [each for each in kept if each.size == since and each.log_id == head.log_id and not each.fault]
    if any(each.root != root for each in same):
        problems.append(f"The witness has another root at size {since}: the log was rewritten.")
    notes = [
        f"The log {head.log_id[:80]!a} only grew, from {since} entries to {head.size}, signed {head.at}."
    ]
    if not same:
        notes.append(f"Compare the root of size {since} with the one that you kept: {root}")
    return VerificationReport(0, 1, len(kept), 0, problems, [] if problems else notes)


def _read_kept(line: str, public_key: bytes) -> VerifiedHead:
    value = _read_object("a line of the witness", line)
    return _read_head(value.get("head", value), public_key)


def leaf_hash(data: bytes) -> bytes:
    return sha256(b"\x00" + data).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    return sha256(b"\x01" + left + right).digest()


def grow(size: int, roots: tuple[bytes, ...], leaf: bytes) -> tuple[bytes, ...]:
    """The roots of the complete subtrees, largest first, after one more leaf on a tree of `size` leaves."""
    keep = len(roots)
    while size & 1:
        keep -= 1
        leaf = sha256(b"\x01" + roots[keep] + leaf).digest()
        size >>= 1
    return (*roots[:keep], leaf)


def fold(roots: Sequence[bytes]) -> bytes:
    """The root of the whole tree, from the roots of its complete subtrees."""
    return reduce(lambda right, left: node_hash(left, right), roots[::-1]) if roots else sha256().digest()


def verify_inclusion(leaf: bytes, index: int, size: int, path: Sequence[bytes], root: bytes) -> bool:
    """Tell whether the leaf with this hash is at `index` in the tree of `size` leaves with this root."""
    on_right: list[bool] = []  # at each fork, from the root down
    while 0 <= index < size != 1:
        half = 1 << (size - 1).bit_length() - 1
        on_right.append(index >= half)
        index, size = (index - half, size - half) if index >= half else (index, half)
    for other, right in zip(path, reversed(on_right), strict=False):
        leaf = node_hash(other, leaf) if right else node_hash(leaf, other)
    return (index, size) == (0, 1) and len(path) == len(on_right) and leaf == root


def verify_consistency(
    old_size: int, new_size: int, path: Sequence[bytes], old_root: bytes, new_root: bytes
) -> bool:
    """Tell whether the tree with the new root extends the tree with the old one (RFC 9162, 2.1.4.2)."""
    if not 0 <= old_size <= new_size:
        return False
    if old_size in (0, new_size):
        return not path and old_root == (new_root if old_size else fold(()))
    nodes = [old_root, *path] if old_size & (old_size - 1) == 0 else list(path)
    if not nodes:
        return False
    at, last = old_size - 1, new_size - 1
    while at & 1:
        at, last = at >> 1, last >> 1
    old = new = nodes[0]
    for node in nodes[1:]:
        if last == 0:
            return False
        if at & 1 or at == last:
            old, new = node_hash(node, old), node_hash(node, new)
            while at and not at & 1:
                at, last = at >> 1, last >> 1
        else:
            new = node_hash(new, node)
        at, last = at >> 1, last >> 1
    return last == 0 and old == old_root and new == new_root


def canonical(entry: dict[str, Any]) -> bytes:
    """The leaf data of an entry; its keys are strings. ValueError for NaN, infinity and lone surrogates."""
    return _encode(entry).encode()


def key_id(public_key: bytes) -> str:
    return sha256(public_key).hexdigest()[:16]


def head_message(log_id: str, size: int, root: str, at: str) -> bytes:
    """Return the message that a head's signature covers; `root` in hex, `at` exactly as in the head."""
    return b"falaj audit head v1\n" + canonical({"log_id": log_id, "size": size, "root": root, "at": at})


class VerifiedHead(NamedTuple):
    """A signed statement: at this time, the log had this size and this root."""

    log_id: str
    size: int
    root: str
    at: str
    fault: str  # why it proves nothing, as the end of a sentence; empty when it is sound


def _read_head(head: Any, public_key: bytes) -> VerifiedHead:
    kinds = {"log_id": str, "size": int, "root": HASH, "at": UTC_TIME, "key": KEY, "signature": SIGNATURE}
    _need_fields("the head", head, kinds)
    said = head["log_id"], head["size"], head["root"], head["at"]
    if head["key"] != key_id(public_key):
        return VerifiedHead(
            *said, f"is signed by the key {head['key']}, not by the given one, {key_id(public_key)}"
        )
    sound = signed_by(public_key, bytes.fromhex(head["signature"]), head_message(*said))
    return VerifiedHead(*said, "" if sound else "does not have a valid signature: edited or forged")


def _need(condition: object, otherwise: str) -> None:
    if not condition:
        raise UnreadableExport(otherwise)


def _need_fields(what: str, value: Any, kinds: dict[str, Any]) -> None:
    _need(isinstance(value, dict) and set(value) == set(kinds), f"{what} has other fields than it should")
    for name, kind in kinds.items():
        _need(_fits(value[name], kind), f"{what} has a malformed {name}")


def _fits(value: Any, kind: Any) -> bool:
    """Tell whether `value` is of this kind: a type, or a pattern of text; a list is a list of hashes."""
    if isinstance(kind, re.Pattern):
        return isinstance(value, str) and kind.fullmatch(value) is not None
    if kind is int:
        return type(value) is int and 0 <= value < 2**63  # bool is an int too
    if kind is list:
        return isinstance(value, list) and all(_fits(each, HASH) for each in value)
    return isinstance(value, kind) and (kind is not str or value.isprintable())


def _read_object(what: str, text: str) -> dict[str, Any]:
    _need(len(text) <= MAX_LINE, f"{what} is longer than {MAX_LINE} characters")
    try:
        text.encode()
        value = json.loads(text, object_pairs_hook=_unique_keys)
    except UnicodeEncodeError:
        raise UnreadableExport(f"{what} is not UTF-8") from None
    except (ValueError, RecursionError) as fault:
        raise UnreadableExport(
            f"{what} {fault if isinstance(fault, UnreadableExport) else 'is not JSON'}"
        ) from None
    _need(isinstance(value, dict), f"{what} is not a JSON object")
    return {name: part for name, part in value.items() if part is not None}


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    _need(len(dict(pairs)) == len(pairs), "has one key twice, and readers differ on which one counts")
    return dict(pairs)


def _moment(at: str) -> tuple[str, str]:
    """A time that matches UTC_TIME, so that times can be compared."""
    return at[:19], at[20:].rstrip("Z+:0") if at[19] == "." else ""


def _read_entry(entry: Any) -> tuple[int, bytes]:
    """The seq of an entry, and the leaf hash of its contents."""
    _need(isinstance(entry, dict) and _fits(entry.get("seq"), int), "its entry has no whole number as seq")
    try:
        return entry["seq"], leaf_hash(canonical(entry))
    except (ValueError, RecursionError):
        raise UnreadableExport("its entry has no canonical form") from None


class Verification:
    """One pass over an export: the tree so far, the heads not reached yet, and what is wrong."""

    def __init__(self, header: str, public_key: bytes) -> None:
        value = {"frontier": [], **_read_object("the header (line 1 of an export)", header)}
        kinds = {"falaj_audit": int, "log_id": str, "first": int, "size": int, "frontier": list}
        _need_fields("the header", value, kinds)
        _need(value["falaj_audit"] == 1, "the header is not of version 1, which this verifier reads")
        self.log_id, self.first, self.size = value["log_id"], value["first"], value["size"]
        fits = self.first <= self.size and len(value["frontier"]) == bin(self.first).count("1")
        _need(fits, "the first, size and frontier of the header do not fit each other")
        self.tree: tuple[bytes, ...] | None = (*map(bytes.fromhex, value["frontier"]),)  # None after a gap
        self.key, self.entries, self.next, self.covered = public_key, 0, self.first, self.first
        self.heads = {"export": 0, "witness": 0}
        self.matched = {"export": self.first, "witness": self.first}  # the last size with the signed root
        self.parted: set[str] = set()  # those whose heads have another root from there on
        self.restores: list[tuple[int, str]] = []  # the seq and the time of each restore from a backup
        self.lost: dict[int, int] = {}  # by seq of the restore: the size that the log is known to have had
        self.waiting: dict[int, list[tuple[str, VerifiedHead]]] = {}
        self.missing: list[range] = []
        self.problems: list[tuple[int, str]] = []

    def read(self, origin: str, number: int, line: str) -> None:
        try:
            value = _read_object("it", line)
            if set(value) == {"head"} or origin == "witness":
                self._take_head(origin, _read_head(value.get("head", value), self.key))
            else:
                _need({"entry"} <= set(value) <= {"entry", "leaf"}, "it is neither an entry nor a head")
                seq, leaf = _read_entry(value["entry"])
                if seq == self.next and value["entry"].get("restored") is not None:
                    self._take_restore(seq, value["entry"])
                self._take_entry(seq, leaf, value.get("leaf"))
        except UnreadableExport as fault:
            self._say(self.next, f"Line {number} of the {origin} cannot be read: {fault}.")

    def _say(self, place: int, sentence: str) -> None:
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append((place, sentence))

    def _take_head(self, origin: str, head: VerifiedHead) -> None:
        self.heads[origin] += 1
        if head.fault or head.log_id != self.log_id:
            fault = head.fault or f"belongs to another log, {head.log_id[:80]!a}"
            self._say(head.size, f"The {origin}'s head of size {head.size} {fault}.")
        elif head.size > self.next:
            self.waiting.setdefault(head.size, []).append((origin, head))
        elif head.size == self.next:
            self._compare(origin, head)
        elif head.size >= self.first and self.tree is not None:
            self._say(head.size, f"A head of size {head.size} stands after entry {self.next - 1}: reordered.")

    def _take_entry(self, seq: int, leaf: bytes, stored: Any) -> None:
        self.entries += 1
        if stored is not None and stored != leaf.hex():
            self._say(seq, f"Entry {seq} was edited: its contents do not give its stored leaf hash.")
            leaf = bytes.fromhex(stored) if _fits(stored, HASH) else leaf  # lets heads vouch for the others
        if gap := next((gap for gap in self.missing if seq in gap), None):
            self._say(seq, f"Entry {seq} stands after entry {self.next - 1}: reordered.")
            self.missing.remove(gap)
            self.missing += filter(None, (range(gap.start, seq), range(seq + 1, gap.stop)))
        elif not self.next <= seq < self.size:
            self._say(seq, f"Entry {seq} occurs twice, or lies outside the export: inserted.")
        else:
            if seq > self.next:
                self.missing += [range(self.next, seq)][: MAX_PROBLEMS - len(self.missing)]
                self.tree = None
            self.tree = None if self.tree is None else grow(seq, self.tree, leaf)
            self.next = seq + 1
            for origin, head in self.waiting.pop(self.next, ()):
                self._compare(origin, head)

    def _take_restore(self, seq: int, entry: dict[str, Any]) -> None:
        """Read the entry of a restore: the log goes on from the entries of a backup, and later ones are gone."""
        said = entry["restored"]
        kinds = {"backup": str, "taken_at": UTC_TIME, "size": int, "root": HASH, "known": int}
        _need_fields("the restore", said, kinds)
        _need(_fits(entry.get("at"), UTC_TIME), "its entry has no time in UTC as at")
        if said["size"] != seq or (self.tree is not None and said["root"] != fold(self.tree).hex()):
            self._say(
                seq, f"Entry {seq} says that the log was restored from other entries than these: forged."
            )
        self.restores.append((seq, entry["at"]))
        self.lost[seq] = max(seq, said["known"])

    def _gone(self, origin: str, head: VerifiedHead) -> bool:
        """Tell whether a head of the witness is older than a restore that says that its entries are gone."""
        for seq, at in self.restores if origin == "witness" else ():
            if seq < head.size and _moment(head.at) < _moment(at):
                self.lost[seq] = max(self.lost[seq], head.size)
                return True
        return False

    def _compare(self, origin: str, head: VerifiedHead) -> None:
        same = self.tree is not None and head.root == fold(self.tree).hex()
        if not same and self._gone(origin, head):
            return
        self.covered, low = head.size, self.matched[origin]
        if self.tree is None or origin in self.parted:
            return
        if same:
            self.matched[origin] = head.size
        else:
            self.parted.add(origin)
            what = "has edited, deleted, inserted or reordered entries" if low < head.size else "forks"
            self._say(low, f"By the {origin}'s heads, the log {what} between sizes {low} and {head.size}.")

    def report(self) -> VerificationReport:
        for gap in self.missing:
            what = f"Entry {gap[0]} is" if len(gap) == 1 else f"Entries {gap[0]} to {gap[-1]} are"
            self._say(gap[0], f"{what} missing: deleted.")
        if self.parted == {"witness"} and self.matched["export"] > self.first:
            self._say(self.next, "The heads in the export fit it: it was rewritten and signed again.")
        known = max(self._known_sizes())
        if known[0] > self.next:
            cut = "truncated unless the export is older" if "witness" in known[1] else "truncated"
            self._say(self.next, f"The log ends at size {self.next}, but {known[1]}: {cut}.")
        if self.entries and self.covered == self.first:
            self._say(self.first, "No signed head covers any of these entries: nothing is proved.")
        tail = self.next - self.covered
        what = "entry is" if tail == 1 else f"{tail} entries are"
        notes = [f"The last {what} not covered by a signed head yet."] if tail else []
        notes += self.restore_notes()
        problems = [sentence for _, sentence in sorted(self.problems)]
        return VerificationReport(
            self.entries, self.heads["export"], self.heads["witness"], tail, problems, notes
        )

    def _known_sizes(self) -> Iterator[tuple[int, str]]:
        """The sizes that the log is said to have, each with who says so."""
        yield self.size, f"the header says {self.size}"
        for size, heads in self.waiting.items():
            for origin, head in heads:
                if not self._gone(origin, head):
                    yield size, f"the {origin} has a signed head of size {size}"

    def restore_notes(self) -> list[str]:
        """One sentence for each restore: what was lost by it. It is no damage, but has to be known."""
        return [
            f"At {at} the platform was restored from a backup with {seq} entries"
            + (f"; {self.lost[seq] - seq} entries made after it are gone." if self.lost[seq] > seq else ".")
            for seq, at in self.restores
        ]


# Ed25519 (RFC 8032), for where `cryptography` is not installed. It only verifies: there is no secret to leak.
Point = tuple[int, int, int, int]
_P = 2**255 - 19
_L = 2**252 + 27742317777372353535851937790883648493
_D = -121665 * pow(121666, -1, _P) % _P


def signed_by(public_key: bytes, signature: bytes, message: bytes) -> bool:
    if Ed25519PublicKey is not None:
        with suppress(InvalidSignature, ValueError):
            Ed25519PublicKey.from_public_bytes(public_key).verify(signature, message)
            return True
        return False
    key, base = _point(public_key), _point(b"\x58" + b"\x66" * 31)
    scalar = int.from_bytes(signature[32:], "little")
    if key is None or base is None or len(signature) != 64 or scalar >= _L:
        return False
    digest = int.from_bytes(sha512(signature[:32] + public_key + message).digest(), "little") % _L
    minus_key = (-key[0], key[1], 1, -key[3])
    choices = ((0, 1, 1, 0), base, minus_key, _add(base, minus_key))
    total: Point = choices[0]
    for bit in range(252, -1, -1):
        total = _add(_add(total, total), choices[(scalar >> bit & 1) + 2 * (digest >> bit & 1)])
    x, y = (part * pow(total[2], -1, _P) % _P for part in total[:2])
    return (y | (x & 1) << 255).to_bytes(32, "little") == signature[:32]


def _point(raw: bytes) -> Point | None:
    odd, y = divmod(int.from_bytes(raw, "little"), 2**255)
    square = (y * y - 1) * pow(_D * y * y + 1, -1, _P) % _P
    x = pow(square, (_P + 3) // 8, _P)
    if (x * x - square) % _P:
        x = x * pow(2, (_P - 1) // 4, _P) % _P
    if (x * x - square) % _P or len(raw) != 32 or y >= _P or (x == 0 and odd):
        return None
    x = x if x & 1 == odd else _P - x
    return x, y, 1, x * y % _P


def _add(p: Point, q: Point) -> Point:
    a, b = (p[1] - p[0]) * (q[1] - q[0]), (p[1] + p[0]) * (q[1] + q[0])
    c, d = 2 * p[3] * q[3] * _D, 2 * p[2] * q[2]
    e, f, g, h = (b - a) % _P, (d - c) % _P, (d + c) % _P, (b + a) % _P
    return e * f % _P, g * h % _P, f * g % _P, e * h % _P


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Check an exported Falaj audit log, or a proof, offline.")
    parser.add_argument("export", help="the export (JSON Lines), or the proof (JSON)")
    parser.add_argument("--public-key", required=True, help="64 hex digits, or a file that holds them")
    parser.add_argument("--witness", help="signed heads (JSON Lines) that were kept elsewhere")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    args = parser.parse_args(argv)
    try:
        key, proof = read_key(args.public_key), _read_proof(args.export)
        witness = _lines(args.witness) if args.witness else ()
        if proof and "since" in proof:
            report = verify_growth(proof, key, witness)
        else:
            report = verify_proof(proof, key) if proof else verify_export(_lines(args.export), key, witness)
    except (OSError, UnreadableExport) as fault:
        print(f"error: {fault}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps({"ok": report.ok, **report._asdict()}))
    else:
        counts = f"{report.entries} entries, {report.heads} heads, {report.witness_heads} of the witness"
        print(("sound: " if report.ok else "DAMAGED: ") + counts, *report.problems, *report.notes, sep="\n  ")
    return 0 if report.ok else 1


def _lines(path: str) -> Iterator[str]:
    with open(path, "rb") as file:
        while line := file.readline(MAX_LINE + 1):
            yield line.decode("utf-8" if len(line) <= MAX_LINE else "latin-1", "surrogateescape")
            while len(line) > MAX_LINE and not line.endswith(b"\n"):
                line = file.readline(MAX_LINE + 1)


def _read_proof(path: str) -> dict[str, Any] | None:
    with open(path, "rb") as file, suppress(UnreadableExport):
        value = _read_object("it", file.read(MAX_LINE).decode(errors="surrogateescape"))
        return value if "path" in value else None
    return None


def read_key(given: str) -> bytes:
    """Return the public key that `given` is in hex, or that the file of this name holds."""
    text = given if _fits(given.lower(), HASH) else "".join(_lines(given))
    keys = set(re.findall(r"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])", text.lower()))
    _need(len(keys) == 1, f"{given[:80]!a} does not hold one Ed25519 public key as 64 hex digits")
    return bytes.fromhex(keys.pop())


if __name__ == "__main__":
    sys.exit(main())
