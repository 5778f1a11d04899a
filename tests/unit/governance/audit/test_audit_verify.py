"""The stand-alone verifier detects every kind of tampering, and no input crashes it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from falaj.governance.audit import verify
from falaj.governance.audit.merkle import Frontier, inclusion_proof, leaf_hash
from falaj.governance.audit.verify import (
    UnreadableExport,
    VerificationReport,
    canonical,
    head_message,
    key_id,
    main,
)
from platforms import OwnPlatform
from polling import PATIENCE_S

Json = dict[str, Any]

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
OTHER_KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(1, 33)))
PUBLIC = KEY.public_key().public_bytes_raw()
AT = "2026-03-01T12:00:00.5+00:00"


def entry(seq: int, **more: Any) -> Json:
    return {"seq": seq, "action": "models.promote", "caller": "مريم", "request": f"r{seq}", **more}


def frontier(entries: list[Json]) -> Frontier:
    return Frontier().extend(leaf_hash(canonical(each)) for each in entries)


def head(entries: list[Json], size: int, *, key: Ed25519PrivateKey = KEY, log_id: str = "log-1") -> Json:
    root = frontier(entries[:size]).root().hex()
    signature = key.sign(head_message(log_id, size, root, AT)).hex()
    public = key.public_key().public_bytes_raw()
    return {
        "log_id": log_id,
        "size": size,
        "root": root,
        "at": AT,
        "key": key_id(public),
        "signature": signature,
    }


def export(entries: list[Json], heads: list[Json], *, leaves: bool = False, first: int = 0) -> list[Json]:
    """Return the lines of an export as objects: each head after the last entry that it covers."""
    lines: list[Json] = [{"falaj_audit": 1, "log_id": "log-1", "first": first, "size": len(entries)}]
    if first:
        lines[0]["frontier"] = [root.hex() for root in frontier(entries[:first]).roots]
    for size in range(first, len(entries) + 1):
        if size > first:
            leaf = {"leaf": leaf_hash(canonical(entries[size - 1])).hex()} if leaves else {}
            lines.append({"entry": entries[size - 1], **leaf})
        lines += [{"head": each} for each in heads if each["size"] == size]
    return lines


def check(lines: list[Json], witness: list[Json] | None = None, key: bytes = PUBLIC) -> VerificationReport:
    return verify.verify_export(text(lines), key, text(witness or []))


def text(lines: list[Json]) -> list[str]:
    return [json.dumps(line) + "\n" for line in lines]


ENTRIES = [entry(seq) for seq in range(12)]
HEADS = [head(ENTRIES, size) for size in (3, 7, 12)]
RENUMBERED = "the log has edited, deleted, inserted or reordered entries between sizes 3 and 7"


def renumbered(entries: list[Json]) -> list[Json]:
    return [{**each, "seq": seq} for seq, each in enumerate(entries)]


def test_a_sound_log_is_sound() -> None:
    report = check(export(ENTRIES, HEADS, leaves=True), witness=HEADS[1:])

    assert report == VerificationReport(12, 3, 2, 0, [], [])
    assert report.ok


def test_entries_after_the_last_head_are_counted() -> None:
    report = check(export([*ENTRIES, *(entry(seq) for seq in (12, 13, 14))], HEADS))

    assert report.ok
    assert report.unsigned_tail == 3
    assert report.notes == ["The last 3 entries are not covered by a signed head yet."]


def test_the_empty_log_is_sound() -> None:
    assert check(export([], [])).ok
    assert check(export([], [head([], 0)])).ok


def test_a_log_without_heads_proves_nothing() -> None:
    report = check(export(ENTRIES, []))

    assert report.problems == ["No signed head covers any of these entries: nothing is proved."]


def test_heads_may_precede_their_entries_and_blank_lines_are_ignored() -> None:
    header, *lines = export(ENTRIES, HEADS)
    lines = [*(line for line in lines if "head" in line), *(line for line in lines if "entry" in line)]
    spaced = [part for line in text([header, *lines]) for part in (line, "\n", " \r\n")]

    assert verify.verify_export(spaced, PUBLIC) == check(export(ENTRIES, HEADS))


def test_fields_that_are_null_count_as_absent() -> None:
    lines = [{"entry": None, "leaf": None, "head": None, **line} for line in export(ENTRIES, HEADS)[1:]]

    assert check([{**export(ENTRIES, HEADS)[0], "frontier": None}, *lines]).ok


# --- tampering with entries ---


def test_an_edit_is_located_between_two_signed_heads() -> None:
    edited = [{**each, "caller": "eve"} if each["seq"] == 5 else each for each in ENTRIES]

    report = check(export(edited, HEADS))

    assert report.problems == [f"By the export's heads, {RENUMBERED}."]


def test_an_edit_is_named_when_the_stored_leaf_hash_is_there() -> None:
    lines = export(ENTRIES, HEADS, leaves=True)
    for line in lines:
        if line.get("entry", {}).get("seq") == 5:
            line["entry"] = {**line["entry"], "caller": "eve"}

    report = check(lines)

    assert report.problems == ["Entry 5 was edited: its contents do not give its stored leaf hash."]


def test_an_edit_with_a_matching_leaf_hash_still_breaks_the_root() -> None:
    edited = [{**each, "caller": "eve"} if each["seq"] == 5 else each for each in ENTRIES]

    assert check(export(edited, HEADS, leaves=True)).problems == [f"By the export's heads, {RENUMBERED}."]


def test_an_edited_leaf_hash_is_found() -> None:
    for stored in ("00" * 32, "zz", 7, ["x"]):
        lines = export(ENTRIES, HEADS, leaves=True)
        lines[6]["leaf"] = stored

        assert not check(lines).ok


@pytest.mark.parametrize("leaves", [False, True])
def test_a_deletion_is_named(leaves: bool) -> None:
    lines = [line for line in export(ENTRIES, HEADS, leaves=leaves) if line.get("entry") != ENTRIES[5]]

    assert check(lines).problems == ["Entry 5 is missing: deleted."]


def test_several_deletions_are_named() -> None:
    gone = [ENTRIES[4], ENTRIES[5], ENTRIES[9]]
    lines = [line for line in export(ENTRIES, HEADS) if line.get("entry") not in gone]

    assert check(lines).problems == ["Entries 4 to 5 are missing: deleted.", "Entry 9 is missing: deleted."]


def test_a_deletion_hidden_by_renumbering_is_located() -> None:
    entries = renumbered([each for each in ENTRIES if each["seq"] != 5])

    report = check(export(entries, HEADS))

    assert report.problems[0] == f"By the export's heads, {RENUMBERED}."


def test_a_deletion_at_the_start_is_found() -> None:
    lines = [line for line in export(ENTRIES, HEADS) if line.get("entry") != ENTRIES[0]]

    assert check(lines).problems == ["Entry 0 is missing: deleted."]


def test_an_insertion_is_named_and_the_other_entries_still_verify() -> None:
    lines = export(ENTRIES, HEADS)
    lines.insert(9, {"entry": {**ENTRIES[5], "caller": "eve"}})

    assert check(lines).problems == ["Entry 5 occurs twice, or lies outside the export: inserted."]


def test_an_insertion_hidden_by_renumbering_is_located() -> None:
    entries = renumbered([*ENTRIES[:5], entry(5, caller="eve"), *ENTRIES[5:]])

    assert check(export(entries, HEADS)).problems == [f"By the export's heads, {RENUMBERED}."]


def test_an_insertion_beyond_the_size_is_named() -> None:
    report = check([*export(ENTRIES, HEADS), {"entry": entry(12)}])

    assert report.problems == ["Entry 12 occurs twice, or lies outside the export: inserted."]


def test_reordered_lines_are_named() -> None:
    lines = export(ENTRIES, HEADS)
    at = lines.index({"entry": ENTRIES[5]})
    lines[at], lines[at + 1] = lines[at + 1], lines[at]

    assert check(lines).problems == ["Entry 5 stands after entry 6: reordered."]


def test_swapped_entries_are_located() -> None:
    entries = renumbered([*ENTRIES[:4], entry(4, caller="eve"), ENTRIES[4], *ENTRIES[6:]])

    assert check(export(entries, HEADS)).problems == [f"By the export's heads, {RENUMBERED}."]


def test_truncation_is_found_by_the_header() -> None:
    lines = [line for line in export(ENTRIES, HEADS) if line.get("entry", {}).get("seq", 0) < 10]

    report = check(lines[:-1])

    assert report.problems == ["The log ends at size 10, but the header says 12: truncated."]


def test_truncation_is_found_by_a_head_that_was_left() -> None:
    lines = [*export(ENTRIES[:10], HEADS[:2]), {"head": HEADS[2]}]

    report = check(lines)

    assert report.problems == [
        "The log ends at size 10, but the export has a signed head of size 12: truncated."
    ]


def test_truncation_together_with_its_heads_needs_the_witness() -> None:
    lines = export(ENTRIES[:7], HEADS[:2])

    assert check(lines).ok
    assert check(lines, HEADS).problems == [
        "The log ends at size 7, but the witness has a signed head of size 12: truncated unless the export is older."
    ]


def test_a_log_emptied_together_with_its_heads_needs_the_witness() -> None:
    assert not check(export([], []), HEADS[:1]).ok


# --- a platform that was restored from a backup ---

RESTORED_AT = "2026-03-01T12:00:01+00:00"
BEFORE = HEADS
"""The witness's heads from before the restore: of sizes 3, 7 and 12."""


def restore_entry(size: int, /, at: str = RESTORED_AT, **more: Any) -> Json:
    root = frontier(ENTRIES[:size]).root().hex()
    said = {"backup": "b", "taken_at": AT, "size": size, "root": root, "known": 12, **more}
    return entry(size, action="platform.restore", at=at, restored=said)


def after_restore(size: int, /, **more: Any) -> list[Json]:
    """The log of a backup of `size` entries, the entry of the restore, and new ones."""
    new = [entry(seq, caller="noor") for seq in range(size + 1, size + 4)]
    return [*ENTRIES[:size], restore_entry(size, **more), *new]


def test_entries_lost_by_a_restore_are_said_and_are_no_damage() -> None:
    log = after_restore(5)

    report = check(export(log, [head(log, 9)]), BEFORE)

    assert report.problems == []
    assert report.notes == [
        f"At {RESTORED_AT} the platform was restored from a backup with 5 entries; 7 entries made after it are gone."
    ]


def test_a_restored_log_that_is_longer_than_the_lost_one_is_sound() -> None:
    log = after_restore(5)
    log += [entry(seq, caller="noor") for seq in range(len(log), 20)]

    assert check(export(log, [head(log, 20)]), BEFORE).problems == []


def test_entries_of_the_backup_must_still_fit_the_witness() -> None:
    log = [{**each, "caller": "eve"} if each["seq"] == 1 else each for each in after_restore(5)]

    assert check(export(log, [head(log, 9)]), BEFORE).problems


def test_heads_signed_after_the_restore_must_fit() -> None:
    log = after_restore(5, at="2026-03-01T11:00:00+00:00")  # the heads in the witness are younger

    assert check(export(log, [head(log, 9)]), BEFORE).problems


@pytest.mark.parametrize("forged", [{"size": 4}, {"root": "0" * 64}])
def test_a_restore_from_other_entries_is_found(forged: Json) -> None:
    log = after_restore(5, **forged)

    assert any("forged" in problem for problem in check(export(log, [head(log, 9)])).problems)


@pytest.mark.parametrize("broken", [{"known": -1}, {"extra": 1}, {"taken_at": "yesterday"}])
def test_a_malformed_restore_is_said(broken: Json) -> None:
    log = after_restore(5, **broken)

    assert check(export(log, [head(log, 9)])).problems


# --- tampering by someone who can sign, and with heads ---


def test_a_log_rewritten_and_signed_again_needs_the_witness() -> None:
    forged = [{**each, "caller": "eve"} if each["seq"] == 5 else each for each in ENTRIES]
    lines = export(forged, [head(forged, size) for size in (3, 7, 12)])

    assert check(lines).ok
    assert check(lines, HEADS).problems == [
        f"By the witness's heads, {RENUMBERED}.",
        "The heads in the export fit it: it was rewritten and signed again.",
    ]


def test_a_log_rewritten_and_signed_by_another_key_is_found() -> None:
    forged = [{**each, "caller": "eve"} if each["seq"] == 5 else each for each in ENTRIES]
    other = OTHER_KEY.public_key().public_bytes_raw()
    lines = export(forged, [head(forged, 12, key=OTHER_KEY)])

    report = check(lines)

    assert (
        f"is signed by the key {key_id(other)}, not by the given one, {key_id(PUBLIC)}" in report.problems[1]
    )
    assert report.unsigned_tail == 12


def test_a_head_of_another_key_that_claims_the_right_key_is_found() -> None:
    forged = {**head(ENTRIES, 12, key=OTHER_KEY), "key": key_id(PUBLIC)}

    report = check(export(ENTRIES, [*HEADS[:2], forged]))

    assert report.problems == [
        "The export's head of size 12 does not have a valid signature: edited or forged."
    ]


@pytest.mark.parametrize("origin", ["export", "witness"])
@pytest.mark.parametrize(
    "change",
    [
        {"size": 11},
        {"root": "00" * 32},
        {"at": "2026-03-01T12:00:01.5+00:00"},
        {"at": "yesterday"},
        {"at": "2026-03-01T12:00:00+04:00"},
        {"log_id": "log-2"},
        {"log_id": "\ud800"},
        {"key": "00" * 8},
        {"signature": "00" * 64},
        {"signature": "é" * 128},
        {"more": 1},
    ],
)
def test_a_head_with_any_field_changed_is_found(origin: str, change: Json) -> None:
    forged = {**HEADS[2], **change}
    witness = [forged] if origin == "witness" else []

    report = check(export(ENTRIES, HEADS) + [{"head": forged}] * (origin == "export"), witness)

    assert len(report.problems) == 1
    assert origin in report.problems[0] or "reordered" in report.problems[0]


def test_a_head_of_another_log_is_found() -> None:
    report = check(export(ENTRIES, [*HEADS, head(ENTRIES, 12, log_id="log-2")]))

    assert report.problems == ["The export's head of size 12 belongs to another log, 'log-2'."]


def test_two_signed_heads_of_one_size_with_different_roots_are_a_fork() -> None:
    forked = head([entry(seq, caller="eve") for seq in range(12)], 7)

    assert check(export(ENTRIES, [*HEADS, forked])).problems == [
        "By the export's heads, the log forks between sizes 7 and 7."
    ]


def test_a_head_after_later_entries_is_reported_as_reordered() -> None:
    header, *lines = export(ENTRIES, HEADS[2:])

    report = check([header, *lines, {"head": HEADS[0]}])

    assert report.problems == ["A head of size 3 stands after entry 11: reordered."]


def test_the_witness_may_hold_bare_heads_and_a_torn_line_is_reported() -> None:
    lines = [json.dumps(HEADS[0]), json.dumps({"head": HEADS[1]}), json.dumps(HEADS[2])[:50]]

    report = verify.verify_export(text(export(ENTRIES, HEADS)), PUBLIC, lines)

    assert report.witness_heads == 2
    assert report.problems == ["Line 3 of the witness cannot be read: it is not JSON."]


def test_the_list_of_problems_is_bounded() -> None:
    many = [entry(seq) for seq in range(500)]
    lines = export(many, [], leaves=True)
    for line in lines[1:]:
        line["leaf"] = "00" * 32

    assert len(check(lines).problems) == verify.MAX_PROBLEMS


# --- parts of a log ---


@pytest.mark.parametrize("first", range(1, 13))
def test_a_part_of_a_log_is_checked_with_its_frontier(first: int) -> None:
    more = [*ENTRIES, entry(12), entry(13)]
    heads = [head(more, size) for size in (3, 7, 12, 14)]

    report = check(export(more, heads, first=first), witness=heads)
    broken = check(export([*more[:-1], entry(13, caller="eve")], heads, first=first))

    assert report == VerificationReport(
        14 - first, len([h for h in heads if h["size"] >= first]), 4, 0, [], []
    )
    assert not broken.ok


def test_a_wrong_frontier_is_found() -> None:
    lines = export(ENTRIES, HEADS, first=5)
    lines[0]["frontier"] = ["00" * 32, "11" * 32]

    assert not check(lines).ok


@pytest.mark.parametrize("frontier", [[], ["00" * 32], ["00" * 31] * 2, "00", [1, 2], None])
def test_a_part_without_a_matching_frontier_is_refused(frontier: Any) -> None:
    header, *lines = export(ENTRIES, HEADS, first=5)

    with pytest.raises(UnreadableExport, match="frontier"):
        check([{**header, "frontier": frontier}, *lines])


# --- proofs ---


def proof(index: int = 5, size: int = 7) -> Json:
    leaves = [leaf_hash(canonical(each)) for each in ENTRIES]
    path = [each.hex() for each in inclusion_proof(leaves, index, size)]
    return {"entry": ENTRIES[index], "index": index, "size": size, "path": path, "head": head(ENTRIES, size)}


def test_a_proof_of_each_entry_is_sound() -> None:
    for size in (3, 7, 12):
        for index in range(size):
            report = verify.verify_proof(proof(index, size), PUBLIC)

            assert report.ok, (index, size)
            assert report.notes == [f"Entry {index} is in the log 'log-1' of {size} entries, signed {AT}."]


@pytest.mark.parametrize(
    "change",
    [
        {"entry": {**ENTRIES[5], "caller": "eve"}},
        {"entry": ENTRIES[4]},
        {"index": 4},
        {"size": 8},
        {"path": proof()["path"][:-1]},
        {"path": [*proof()["path"][:-1], "00" * 32]},
        {"head": HEADS[2]},
        {"head": {**HEADS[1], "size": 8}},
        {"head": {**HEADS[1], "log_id": "log-2"}},
        {"head": head(ENTRIES, 7, key=OTHER_KEY)},
    ],
)
def test_a_changed_proof_fails(change: Json) -> None:
    assert not verify.verify_proof({**proof(), **change}, PUBLIC).ok


@pytest.mark.parametrize(
    "change",
    [
        {"index": -1},
        {"index": True},
        {"size": "7"},
        {"path": "00"},
        {"path": ["00"]},
        {"head": []},
        {"entry": []},
        {"entry": {}},
        {"entry": {"seq": 5.0}},
        {"entry": {"seq": 5, "x": float("nan")}},
        {"x": 1},
    ],
)
def test_a_malformed_proof_is_refused(change: Json) -> None:
    with pytest.raises(UnreadableExport):
        verify.verify_proof({**proof(), **change}, PUBLIC)


# --- Ed25519, with the library and without ---

RFC_8032 = [
    (
        "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
        "",
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555"
        "fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b",
    ),
    (
        "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
        "72",
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da0"
        "85ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00",
    ),
    (
        "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025",
        "af82",
        "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac1"
        "8ff9b538d16f290ae67f760984dc6594a7c15e9716ed28dc027beceea1ec40a",
    ),
]


@pytest.fixture(params=["library", "our own"])
def signed_by(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[[bytes, bytes, bytes], bool]:
    if request.param == "our own":
        monkeypatch.setattr(verify, "Ed25519PublicKey", None)
    return verify.signed_by


@pytest.mark.parametrize(("key", "message", "signature"), RFC_8032)
def test_vectors_of_rfc_8032(
    signed_by: Callable[[bytes, bytes, bytes], bool], key: str, message: str, signature: str
) -> None:
    parts = bytes.fromhex(key), bytes.fromhex(signature), bytes.fromhex(message)

    assert signed_by(*parts)
    assert not signed_by(parts[0], parts[1], parts[2] + b"x")
    assert not signed_by(parts[0], parts[1][:63] + b"\xff", parts[2])
    assert not signed_by(parts[0], b"\x00" + parts[1][1:], parts[2])
    assert not signed_by(bytes.fromhex(RFC_8032[0][0])[::-1], parts[1], parts[2])


def test_malformed_keys_and_signatures_are_not_valid(
    signed_by: Callable[[bytes, bytes, bytes], bool],
) -> None:
    signature = KEY.sign(b"m")
    order = 2**252 + 27742317777372353535851937790883648493
    larger = (int.from_bytes(signature[32:], "little") + order).to_bytes(32, "little")

    assert signed_by(PUBLIC, signature, b"m")
    assert not signed_by(PUBLIC, signature[:32] + larger, b"m")
    assert not signed_by(PUBLIC, signature[:63], b"m")
    assert not signed_by(PUBLIC, signature + b"\x00", b"m")
    assert not signed_by(PUBLIC, b"", b"m")
    for key in (
        b"",
        PUBLIC[:31],
        PUBLIC + b"\x00",
        b"\xff" * 32,
        b"\x02" + bytes(31),
        b"\x01" + bytes(30) + b"\x80",
    ):
        assert not signed_by(key, signature, b"m")


def test_a_point_has_one_encoding() -> None:
    one = (1).to_bytes(32, "little")

    assert verify._point(one) == (0, 1, 1, 0)
    assert verify._point(one[:31] + b"\x80") is None  # minus zero
    assert verify._point((2**255 - 19 + 1).to_bytes(32, "little")) is None  # one, written as p + 1
    assert verify._point((2).to_bytes(32, "little")) is None  # not on the curve
    assert verify._point(one + b"\x00") is None


@given(st.binary(min_size=32, max_size=32), st.binary(max_size=80), st.integers(0, 511))
def test_our_own_verification_agrees_with_the_library(seed: bytes, message: bytes, bit: int) -> None:
    key = Ed25519PrivateKey.from_private_bytes(seed)
    signature = key.sign(message)
    flipped = (int.from_bytes(signature, "big") ^ 1 << bit).to_bytes(64, "big")
    public = key.public_key().public_bytes_raw()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "Ed25519PublicKey", None)

        assert verify.signed_by(public, signature, message)
        assert not verify.signed_by(public, flipped, message)


# --- odd and hostile input ---


def test_leaf_data_is_the_documented_canonical_json() -> None:
    value = {"seq": 1, "b": ["é", None, 1.5], "a": {"z": 1, "y": "\u2028"}}

    expected = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()

    assert canonical(value) == expected
    assert canonical(json.loads(expected)) == expected


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "\ud800"])
def test_values_without_a_canonical_form_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"JSON compliant|surrogates"):
        canonical({"seq": 0, "x": value})


def test_a_head_message_cannot_be_read_in_two_ways() -> None:
    assert head_message('a","size":1', 2, "00", "t") != head_message("a", 1, "00", "t")
    assert head_message("a", 1, "00", "t").startswith(b"falaj audit head v1\n")


BAD_LINES = [
    "{",
    "null",
    "[]",
    "{}",
    '"text"',
    "7",
    "NaN",
    '{"entry": []}',
    '{"entry": {}}',
    '{"entry": {"seq": "5"}}',
    '{"entry": {"seq": true}}',
    '{"entry": {"seq": -1}}',
    '{"entry": {"seq": 5.0}}',
    '{"entry": {"seq": 1e999}}',
    '{"entry": {"seq": 99999999999999999999}}',
    '{"entry": {"seq": 5, "seq": 5}}',
    '{"entry": {"seq": 5, "x": NaN}}',
    '{"entry": {"seq": 5, "x": 1e999}}',
    '{"entry": {"seq": 5, "x": "\\ud800"}}',
    '{"entry": {"seq": 5}, "head": {}}',
    '{"entry": {"seq": 5}, "more": 1}',
    '{"entry": {"seq": 5, "x": ' + "9" * 5000 + "}}",
    '{"entry": {"seq": 5, "x": ' + "[" * 100_000 + "]" * 100_000 + "}}",
    '{"entry": {"seq": 5, "x": "\udcff"}}',
    '{"head": null}',
    '{"head": 5}',
    '{"head": {}}',
    '{"leaf": "00"}',
    '{"entry": {"seq": 5, "x": "' + "x" * verify.MAX_LINE + '"}}',
]


@pytest.mark.parametrize("line", BAD_LINES, ids=lambda line: line[:40])
def test_a_line_that_cannot_be_read_is_damage(line: str) -> None:
    lines = text(export(ENTRIES, HEADS))

    report = verify.verify_export([*lines[:7], line, *lines[7:]], PUBLIC)

    assert len(report.problems) == 1
    assert report.problems[0].startswith("Line 8 of the export cannot be read: ")


@pytest.mark.parametrize("line", BAD_LINES, ids=lambda line: line[:40])
def test_a_witness_line_that_cannot_be_read_is_damage(line: str) -> None:
    report = verify.verify_export(text(export(ENTRIES, HEADS)), PUBLIC, [line])

    assert len(report.problems) == 1
    assert report.problems[0].startswith("Line 1 of the witness cannot be read: ")


@pytest.mark.parametrize(
    "change",
    [
        {"falaj_audit": 2},
        {"falaj_audit": True},
        {"log_id": 5},
        {"log_id": "\ud800"},
        {"first": -1},
        {"size": "12"},
        {"size": None},
        {"size": 2**64},
        {"first": 13, "size": 12, "frontier": ["00" * 32] * 3},
        {"more": 1},
    ],
)
def test_a_malformed_header_is_refused(change: Json) -> None:
    header, *lines = export(ENTRIES, HEADS)

    with pytest.raises(UnreadableExport, match="the header"):
        check([{**header, **change}, *lines])


ORIGINAL = "".join(text(export(ENTRIES[:4], [HEADS[0], head(ENTRIES, 4)], leaves=True)))


@given(st.integers(0, len(ORIGINAL) - 1), st.characters(max_codepoint=0x2FF))
def test_every_single_changed_character_is_detected(at: int, character: str) -> None:
    changed = (ORIGINAL[:at] + character + ORIGINAL[at + 1 :]).splitlines(keepends=True)

    try:
        ok = verify.verify_export(changed, PUBLIC).ok
    except UnreadableExport:
        ok = False

    assert not ok or [json.loads(line) for line in changed] == [
        json.loads(line) for line in ORIGINAL.splitlines()
    ]


@given(st.lists(st.text(max_size=30) | st.sampled_from(text(export(ENTRIES, HEADS))), max_size=30))
def test_arbitrary_lines_never_crash_the_verifier(lines: list[str]) -> None:
    header = text(export(ENTRIES, HEADS))[0]

    report = verify.verify_export([header, *lines], PUBLIC, lines)

    assert not report.ok


def test_memory_does_not_grow_with_the_entries() -> None:
    def lines(count: int) -> Iterator[str]:
        yield json.dumps({"falaj_audit": 1, "log_id": "log-1", "first": 0, "size": count})
        for seq in range(count):
            yield json.dumps({"entry": entry(seq)})

    def peak(count: int) -> int:
        tracemalloc.start()
        verify.verify_export(lines(count), PUBLIC)
        bytes_held = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return bytes_held

    peak(10)

    assert peak(5_000) < peak(500) + 20_000


# --- the command ---


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with only what an auditor has: the verifier, an export, a witness and a public key."""
    shutil.copy(verify.__file__, tmp_path / "verify.py")
    (tmp_path / "log.jsonl").write_text("".join(text(export(ENTRIES, HEADS, leaves=True))))
    (tmp_path / "damaged.jsonl").write_text("".join(text(export(ENTRIES[:7], HEADS[:2]))))
    (tmp_path / "witness.jsonl").write_text("".join(text(HEADS)))
    (tmp_path / "proof.json").write_text(json.dumps(proof(), indent=2))
    (tmp_path / "key").write_text(
        json.dumps({"log_id": "log-1", "key": key_id(PUBLIC), "ed25519": PUBLIC.hex()})
    )
    return tmp_path


@pytest.mark.parametrize("without_packages", [[], ["-S"]], ids=["with cryptography", "without cryptography"])
def test_the_file_works_alone(folder: Path, without_packages: list[str]) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-I", *without_packages, "verify.py", *arguments, "--public-key", "key"]
        return subprocess.run(
            command, cwd=folder, capture_output=True, text=True, check=False, timeout=PATIENCE_S
        )

    sound = run("log.jsonl", "--witness", "witness.jsonl")
    damaged = run("damaged.jsonl", "--witness", "witness.jsonl", "--json")
    proven = run("proof.json")
    missing = run("nowhere.jsonl")

    assert (sound.returncode, sound.stdout) == (0, "sound: 12 entries, 3 heads, 3 of the witness\n")
    assert (damaged.returncode, json.loads(damaged.stdout)["ok"]) == (1, False)
    assert proven.returncode == 0
    assert "Entry 5 is in the log" in proven.stdout
    assert missing.returncode == 2
    assert missing.stderr.count("\n") == 1
    assert "nowhere.jsonl" in missing.stderr
    assert [each.stderr for each in (sound, damaged, proven)] == ["", "", ""]


def test_without_packages_there_is_no_cryptography() -> None:
    command = [sys.executable, "-I", "-S", "-c", "import cryptography"]

    assert subprocess.run(command, capture_output=True, check=False).returncode != 0


def test_each_problem_is_printed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = export(ENTRIES, HEADS)
    del lines[6]
    (folder / "log.jsonl").write_text("".join(text(lines)))

    status = main([str(folder / "log.jsonl"), "--public-key", PUBLIC.hex().upper()])

    assert status == 1
    assert capsys.readouterr().out.splitlines() == [
        "DAMAGED: 11 entries, 3 heads, 0 of the witness",
        "  Entry 4 is missing: deleted.",
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not JSON"),
        (b"\n\n \n", "not JSON"),
        (b"\x00\x01\x02\xfe\xff" * 1000, "not UTF-8"),
        (bytes(3 * verify.MAX_LINE), "longer than"),
        ("é".encode() * verify.MAX_LINE, "longer than"),
        (b"\xff\xfe{", "not UTF-8"),
        (b'{"falaj_audit": 1, "log_id": "\xff", "first": 0, "size": 0}', "not UTF-8"),
        (b"[]", "not a JSON object"),
        (b"7\n8", "not a JSON object"),
        (b"{}", "the header has other fields"),
        (b"[" * 200_000, "not JSON"),
        (b'{"path": []}', "the proof has other fields"),
        (json.dumps({**proof(), "path": {}}).encode(), "the proof has a malformed path"),
    ],
    ids=lambda value: repr(value[:20]),
)
def test_a_file_that_is_not_an_export_is_misuse(
    folder: Path, capsys: pytest.CaptureFixture[str], content: bytes, message: str
) -> None:
    (folder / "log.jsonl").write_bytes(content)

    status = main([str(folder / "log.jsonl"), "--public-key", PUBLIC.hex()])

    error = capsys.readouterr().err
    assert status == 2
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert message in error


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"entry": {"seq": 12, "x": "\xff"}}', "not UTF-8"),
        (b"\x00\xff\xfe" * 999, "not UTF-8"),
        (b"x" * (3 * verify.MAX_LINE) + b"\n", "longer than"),
    ],
    ids=["bad UTF-8", "junk", "huge line"],
)
def test_a_line_of_junk_is_damage(
    folder: Path, capsys: pytest.CaptureFixture[str], content: bytes, message: str
) -> None:
    with (folder / "log.jsonl").open("ab") as file:
        file.write(content)

    status = main([str(folder / "log.jsonl"), "--public-key", PUBLIC.hex()])

    _, *problems = capsys.readouterr().out.splitlines()
    assert status == 1
    assert len(problems) == 1
    assert message in problems[0]


@pytest.mark.parametrize("key", ["", "00", "nowhere", "zz" * 32, ".", "log.jsonl", "verify.py"])
def test_a_malformed_key_is_misuse(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    monkeypatch.chdir(folder)

    status = main(["log.jsonl", "--public-key", key])

    error = capsys.readouterr().err
    assert status == 2
    assert error.startswith("error: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize("arguments", [["log.jsonl"], [], ["log.jsonl", "--public-key"]])
def test_missing_arguments_are_misuse(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)

    assert stop.value.code == 2


def test_a_missing_witness_is_misuse(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = main([str(folder / "log.jsonl"), "--public-key", PUBLIC.hex(), "--witness", str(folder / "no")])

    assert status == 2
    assert "no" in capsys.readouterr().err


# ------------------------------------------------------------------------------------- consistency proofs


def test_a_consistency_proof_is_read_and_held_against_kept_heads(
    light_platform: OwnPlatform, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = light_platform.audit.inclusion_proof(0).head
    light_platform.workspaces.create("team-a")
    proof = light_platform.audit.consistency_proof(kept.size).model_dump(mode="json")
    key = light_platform.audit.key().ed25519
    rewritten = proof | {"root": "ab" * 32}
    heads = {"kept": kept.model_dump(), "other": proof["head"] | {"size": kept.size}}
    files = {}
    for name, content in {"proof": proof, "rewritten": rewritten, **heads}.items():
        files[name] = tmp_path / f"{name}.json"
        files[name].write_text(json.dumps(content))

    def status(name: str, *more: str) -> int:
        return main([str(files[name]), "--public-key", key, *more])

    assert status("proof", "--witness", str(files["kept"])) == 0
    assert f"only grew, from {kept.size} entries" in capsys.readouterr().out
    assert status("proof") == 0
    assert kept.root in capsys.readouterr().out  # to be compared by hand
    assert status("rewritten") == 1
    assert "does not extend" in capsys.readouterr().out
    assert status("proof", "--witness", str(files["other"])) == 0  # its signature is false: it says nothing
    assert "Compare the root" in capsys.readouterr().out
