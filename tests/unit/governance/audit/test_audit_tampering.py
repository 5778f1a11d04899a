"""Changes of the log in the database are detected by audit.verify, and offline from an export."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import delete, insert

from falaj.errors import Tampered
from falaj.governance.audit.merkle import Frontier
from falaj.governance.audit.verify import canonical, leaf_hash, verify_export
from falaj.governance.tables import audit_entries, audit_heads, audit_state
from platforms import OwnPlatform

Json = dict[str, Any]
Tamper = Callable[[OwnPlatform], None]


@pytest.fixture
def logged(platform: OwnPlatform) -> OwnPlatform:
    """A platform whose log has ten entries; heads are signed at sizes 4, 7 and 10."""
    for number in range(9):
        platform.workspaces.create(f"team-{number}")
        if number in (2, 5, 8):
            platform.parts.audit.sign_head()
    assert len(platform.entries()) == 10
    return platform


# -------------------------------------------------------------------------------------------- tampering


def rewrite(platform: OwnPlatform, entries: list[Json], *, state: bool = False) -> None:
    """Replace the log by `entries`, each with its matching leaf hash."""
    rows = [
        {
            "seq": entry["seq"],
            "at": 0,
            "caller": entry["caller"],
            "action": entry["action"],
            "outcome": entry["outcome"],
            "workspace": entry["workspace"],
            "leaf": leaf_hash(canonical(entry)),
            "entry": canonical(entry).decode(),
            "mac": bytes(32),
        }
        for entry in entries
    ]
    platform.sql("DELETE FROM governance_audit_entries")
    names, values = ", ".join(rows[0]), ", ".join(f":{name}" for name in rows[0])
    platform.sql(f"INSERT INTO governance_audit_entries ({names}) VALUES ({values})", rows)
    if state:
        set_state(platform, rows)


def set_state(platform: OwnPlatform, rows: list[Json]) -> None:
    frontier = Frontier().extend(bytes(row["leaf"]) for row in rows).to_text()
    change = {"size": len(rows), "frontier": frontier}
    platform.sql("UPDATE governance_audit_state SET size = :size, frontier = :frontier", change)


def renumbered(entries: list[Json]) -> list[Json]:
    return [{**entry, "seq": seq} for seq, entry in enumerate(entries)]


def edit(platform: OwnPlatform) -> None:
    entry = {**platform.entries()[5], "caller": "nobody"}
    change = {"entry": canonical(entry).decode()}
    platform.sql("UPDATE governance_audit_entries SET entry = :entry WHERE seq = 5", change)


def edit_with_its_hash(platform: OwnPlatform) -> None:
    entries = platform.entries()
    entries[5] |= {"caller": "nobody"}
    rewrite(platform, entries)


def edit_the_hash(platform: OwnPlatform) -> None:
    platform.sql("UPDATE governance_audit_entries SET leaf = :leaf WHERE seq = 5", {"leaf": bytes(32)})


def delete_in_the_middle(platform: OwnPlatform) -> None:
    platform.sql("DELETE FROM governance_audit_entries WHERE seq = 5")


def delete_and_close_the_gap(platform: OwnPlatform) -> None:
    entries = platform.entries()
    rewrite(platform, renumbered(entries[:5] + entries[6:]), state=True)


def delete_the_first(platform: OwnPlatform) -> None:
    platform.sql("DELETE FROM governance_audit_entries WHERE seq = 0")


def insert_in_the_middle(platform: OwnPlatform) -> None:
    entries = platform.entries()
    rewrite(platform, renumbered([*entries[:5], entries[2], *entries[5:]]), state=True)


def insert_at_the_end(platform: OwnPlatform) -> None:
    entries = platform.entries()
    rewrite(platform, [*entries, {**entries[2], "seq": len(entries)}])


def swap(platform: OwnPlatform) -> None:
    entries = platform.entries()
    entries[5], entries[6] = entries[6], entries[5]
    rewrite(platform, renumbered(entries))


def truncate(platform: OwnPlatform) -> None:
    platform.sql("DELETE FROM governance_audit_entries WHERE seq >= 8")


def truncate_with_state(platform: OwnPlatform) -> None:
    rewrite(platform, platform.entries()[:8], state=True)


def truncate_with_state_and_newest_head(platform: OwnPlatform) -> None:
    truncate_with_state(platform)
    platform.sql("DELETE FROM governance_audit_heads WHERE size > 8")


def rewrite_everything_and_delete_all_heads(platform: OwnPlatform) -> None:
    entries = platform.entries()
    entries[5] |= {"caller": "nobody"}
    rewrite(platform, entries, state=True)
    platform.sql("DELETE FROM governance_audit_heads")


def forge_a_head(platform: OwnPlatform) -> None:
    platform.sql("UPDATE governance_audit_heads SET root = :root WHERE size = 7", {"root": "ab" * 32})


def set_the_clock_of_a_head_back(platform: OwnPlatform) -> None:
    at = {"at": "2020-01-01T00:00:00+00:00"}
    platform.sql("UPDATE governance_audit_heads SET at = :at WHERE size = 7", at)


FOUND_WITHOUT_WITNESS = [
    edit,
    edit_with_its_hash,
    edit_the_hash,
    delete_in_the_middle,
    delete_and_close_the_gap,
    delete_the_first,
    insert_in_the_middle,
    swap,
    truncate,
    truncate_with_state,
    forge_a_head,
    set_the_clock_of_a_head_back,
]
FOUND_BY_THE_WITNESS = [truncate_with_state_and_newest_head, rewrite_everything_and_delete_all_heads]


def test_tampering_is_found(logged: OwnPlatform) -> None:
    found = {}
    for tamper in FOUND_WITHOUT_WITNESS:
        with put_back(logged):
            tamper(logged)
            answers = is_found(lambda: offline(logged)), is_found(lambda: logged.verify_audit())
        found[tamper.__name__] = answers

    assert found == {tamper.__name__: (True, True) for tamper in FOUND_WITHOUT_WITNESS}


def test_an_entry_behind_the_end_is_found(logged: OwnPlatform) -> None:
    insert_at_the_end(logged)

    assert is_found(lambda: offline(logged))
    assert is_found(lambda: logged.verify_audit())


def test_tampering_that_removes_the_heads_is_found_by_the_witness(logged: OwnPlatform) -> None:
    witness = logged.home.witness.read_text().splitlines()
    found = {}
    for tamper in FOUND_BY_THE_WITNESS:
        with put_back(logged):
            tamper(logged)
            answers = is_found(lambda: offline(logged, witness)), is_found(lambda: logged.verify_audit())
        found[tamper.__name__] = answers

    assert found == {tamper.__name__: (True, True) for tamper in FOUND_BY_THE_WITNESS}


@contextmanager
def put_back(platform: OwnPlatform) -> Iterator[None]:
    """Restore the log, its witness and what the key's store remembers afterwards."""
    tables = (audit_entries, audit_heads, audit_state)
    files = [platform.home.witness, *platform.home.key_file.parent.iterdir()]
    kept, contents = [platform.rows(table) for table in tables], [file.read_bytes() for file in files]
    yield
    for file, content in zip(files, contents, strict=True):
        file.write_bytes(content)
    with platform.database.write() as tx:
        for table, rows in zip(tables, kept, strict=True):
            tx.execute(delete(table))
            tx.execute(insert(table), rows)


def test_an_edit_of_a_filter_column_is_found(logged: OwnPlatform) -> None:
    found = {}
    for column in ("at", "caller", "action", "outcome", "workspace"):
        value = 5 if column == "at" else "nobody"
        change = f"UPDATE governance_audit_entries SET {column} = :value WHERE seq = 5"
        with put_back(logged):
            logged.sql(change, {"value": value})
            found[column] = is_found(lambda: logged.verify_audit())

    assert found == dict.fromkeys(found, True)


def test_a_rewritten_log_is_still_found_after_it_has_grown(logged: OwnPlatform) -> None:
    edit_with_its_hash(logged)

    for number in range(20):
        logged.workspaces.create(f"later-{number}")

    assert is_found(lambda: logged.verify_audit())


def test_an_untouched_log_is_sound(logged: OwnPlatform) -> None:
    witness = logged.home.witness.read_text().splitlines()

    assert offline(logged, witness).problems == []
    check = logged.verify_audit()
    assert (check.ok, check.problems) == (True, ())
    assert check.heads == logged.count(audit_heads)
    assert check.entries == logged.count(audit_entries)  # the check itself is recorded, too


def is_found(check: Callable[[], Any]) -> bool:
    """Return whether a check finds the tampering, or appending to the log fails."""
    try:
        return not check().ok
    except Tampered:
        return True


def offline(platform: OwnPlatform, witness: list[str] | None = None) -> Any:
    """Return the result of the offline verifier on an export."""
    lines = [line.model_dump_json(exclude_none=True) for line in platform.audit.export()]
    assert all(isinstance(json.loads(line), dict) for line in lines)
    return verify_export(lines, bytes.fromhex(platform.audit.key().ed25519), witness or [])
