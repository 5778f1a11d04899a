"""The log vouches for the stores: what is changed beside the platform is found and named by the deep check."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet
from sqlalchemy import Column, MetaData, Table, Text, insert, text, update

from falaj.features.tables import table_files
from falaj.governance.audit import log as audit_log
from falaj.governance.audit import service as audit_service
from falaj.governance.audit.rows import RecordedTransaction, RowShape, recorded_shapes
from falaj.governance.tables import grants
from falaj.ports.metadata import METADATA
from falaj.records.features import ColumnType, Entity, Feature, FeatureView
from falaj.records.governance.identity import Role
from falaj.records.names import ROOT
from platforms import OwnPlatform, make_platform


@pytest.fixture
def busy(platform: OwnPlatform) -> OwnPlatform:
    """A platform with people, grants, tokens, policies, labels, blobs and lineage."""
    platform.workspaces.create("team-a")
    platform.join("alia", Role.DEVELOPER, workspace="team-a")
    platform.tokens.issue(user="alia", purpose="a script")
    platform.policies.publish(
        "quiet", text='forbid(principal, action == Action::"blobs.copy", resource);', workspace="team-a"
    )
    platform.put("first", b"one", workspace="team-a")
    platform.put("second", b"two", workspace="team-a", sources=("team-a/blob:first",))
    return platform


def problems(platform: OwnPlatform) -> tuple[str, ...]:
    return platform.verify_audit(deep=True).problems


@pytest.mark.slow
def test_an_untouched_platform_is_sound(busy: OwnPlatform) -> None:
    busy.workspaces.revoke("team-a", "alia", role=Role.DEVELOPER)
    busy.objects.label("team-a/blob:first", only=("AE",))
    busy.blobs.delete("team-a/blob:second")
    busy.users.disable("alia")

    check = busy.verify_audit(deep=True)

    assert (check.ok, check.problems) == (True, ())
    assert busy.again().verify_audit(deep=True).ok


TAMPERING = {
    "governance_grants was added": "INSERT INTO governance_grants (workspace, subject, role) "
    "SELECT 'platform', subject, 'admin' FROM governance_grants WHERE role = 'developer'",
    "governance_grants was removed": "DELETE FROM governance_grants WHERE role = 'developer'",
    "governance_objects was altered": "UPDATE governance_objects SET owner = 'nobody' WHERE name = 'first'",
    "governance_tokens was altered": "UPDATE governance_tokens SET expires_at = expires_at + 1",
    "governance_policies was removed": "DELETE FROM governance_policies",
    "governance_lineage_edges was removed": "DELETE FROM governance_lineage_edges WHERE target LIKE 'blob%'",
    "governance_activities was altered": "UPDATE governance_activities SET action = 'blobs.read'",
    "governance_blobs was altered": "UPDATE governance_blobs SET sha256 = 'ab'",
    "governance_data_keys was altered": "UPDATE governance_data_keys SET root = 'elsewhere'",
    "governance_principals was altered": "UPDATE governance_principals SET disabled_at = 1",
}


@pytest.mark.slow
@pytest.mark.parametrize("found", TAMPERING)
def test_rows_that_were_changed_beside_the_platform_are_named(busy: OwnPlatform, found: str) -> None:
    assert busy.sql(TAMPERING[found])

    assert busy.verify_audit().ok  # the log itself is sound
    assert any(found in problem for problem in problems(busy))


@pytest.mark.slow
def test_an_edited_label_is_named(busy: OwnPlatform) -> None:
    busy.objects.label("team-a/blob:first", only=("AE",))

    busy.sql("UPDATE governance_objects SET label = NULL WHERE name = 'second'")

    (problem,) = problems(busy)
    ident = busy.blobs.show("team-a/second").id
    assert problem == f"Row {ident} of governance_objects was altered outside the log."


@pytest.mark.slow
def test_an_altered_row_is_still_named_after_an_operation_has_changed_it(busy: OwnPlatform) -> None:
    busy.sql("UPDATE governance_objects SET owner = 'nobody' WHERE name = 'first'")
    busy.objects.label("team-a/blob:first", only=("AE",))

    (problem,) = problems(busy)

    ident, seq = busy.blobs.show("team-a/first").id, busy.audit.list(action="objects.label").items[0].seq
    assert problem == f"Row {ident} of governance_objects was altered outside the log before entry {seq}."


@pytest.mark.slow
def test_bytes_of_a_blob_that_are_gone_are_named(busy: OwnPlatform) -> None:
    files = [file for file in (busy.home.path / "blobs").rglob("*") if file.is_file()]
    next(file for file in files if not file.name.startswith(".store.")).unlink()

    (problem,) = problems(busy)

    assert "are missing" in problem


def stored_file(platform: OwnPlatform, blob: str) -> Path:
    (key,) = platform.rows_of(f"SELECT key FROM governance_blobs WHERE id = '{blob}'")
    return platform.home.path / "blobs" / "local" / str(key)


@pytest.mark.slow
@pytest.mark.parametrize("place", [40, 5_000_000, -1])
def test_a_flipped_bit_in_a_blob_is_named_with_what_refers_to_it(busy: OwnPlatform, place: int) -> None:
    blob = busy.put("weights", bytes(10_000_000), workspace="team-a")
    busy.put("summary", b"of it", workspace="team-a", sources=("team-a/blob:weights",))
    file = stored_file(busy, blob.id)
    damaged = bytearray(file.read_bytes())
    damaged[place] ^= 1
    file.chmod(0o600)
    file.write_bytes(damaged)

    (problem,) = problems(busy)

    assert problem.startswith(f"Blob weights ({blob.id}), used by blob:summary, is damaged: ")


@pytest.mark.slow
def test_bytes_of_another_blob_of_the_same_size_are_named(busy: OwnPlatform) -> None:
    """The store of a home can be written to by its owner, who also has the keys."""
    one, two = busy.blobs.show("team-a/first").id, busy.blobs.show("team-a/second").id
    files = stored_file(busy, one), stored_file(busy, two)
    contents = [file.read_bytes() for file in files]
    for file, content in zip(files, reversed(contents), strict=True):
        file.chmod(0o600)
        file.write_bytes(content)

    assert len(problems(busy)) == 2


def test_blobs_whose_keys_were_destroyed_are_counted_and_no_damage(busy: OwnPlatform) -> None:
    busy.keys.destroy("team-a")

    check = busy.again().verify_audit(deep=True)  # keys are known for a moment

    assert (check.ok, check.problems) == (True, ())
    assert "The bytes of 2 blobs were not checked: their keys were destroyed." in check.notes


@pytest.mark.slow
def test_the_deep_check_reports_the_bytes_that_it_has_hashed(
    busy: OwnPlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_service, "REPORT_BYTES", 1_000_000)
    busy.put("weights", bytes(10_000_000), workspace="team-a")

    checks = list(busy.audit.verify(deep=True))

    sizes = [check.checked_bytes for check in checks if check.checked_bytes]
    assert sizes == sorted(sizes)
    assert len(sizes) >= 3
    assert {check.size_bytes for check in checks if check.checked_bytes} == {10_000_006}


@pytest.mark.slow
def test_what_was_altered_can_be_accepted(busy: OwnPlatform) -> None:
    busy.sql("DELETE FROM governance_lineage_edges WHERE target LIKE 'blob%'")

    accepted = busy.audit.accept(reason="a repair by hand")

    assert any("governance_lineage_edges was removed" in problem for problem in accepted.problems)
    check = busy.verify_audit(deep=True)
    assert (check.ok, check.problems) == (True, ())
    assert "a repair by hand" in check.notes[0]


@pytest.mark.slow
def test_the_check_runs_beside_writers(busy: OwnPlatform) -> None:
    def work(number: int) -> tuple[str, ...]:
        if number % 4 == 0:
            return problems(busy)
        for turn in range(5):
            busy.workspaces.create(f"team-{number}-{turn}")
            busy.workspaces.grant(f"team-{number}-{turn}", "alia", role=Role.DEVELOPER)
            busy.workspaces.revoke(f"team-{number}-{turn}", "alia", role=Role.DEVELOPER)
        return ()

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(work, range(12)))

    assert found == [()] * 12
    assert problems(busy) == ()


def test_many_rows_are_recorded_in_several_entries(
    light_platform: OwnPlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_log, "ROWS_PER_ENTRY", 3)
    light_platform.workspaces.create("team-a")

    last = [entry for entry in light_platform.entries() if entry["action"] == "workspaces.create"]
    light_platform.put("a", b"1", workspace="team-a")

    assert problems(light_platform) == ()
    assert {entry.get("part", 1) for entry in light_platform.entries()} >= {1, 2}
    assert all(len(entry["rows"]) <= 3 for entry in last)


def test_a_write_without_the_recorder_is_found(busy: OwnPlatform) -> None:
    row = {"workspace": ROOT, "subject": busy.users.show("alia").id, "role": "auditor"}
    with busy.database.write() as tx:
        tx.execute(insert(grants), row)

    assert any("was added outside the log" in problem for problem in problems(busy))


# ------------------------------------------------------------------------------------- the recorder


def test_plain_sql_that_changes_recorded_rows_is_refused(light_platform: OwnPlatform) -> None:
    with light_platform.database.write() as plain:
        tx = light_platform.parts.audit.recording(plain)
        for statement in ("UPDATE governance_grants SET role = 'x'", "DELETE FROM governance_grants"):
            with pytest.raises(RuntimeError, match="recorded"):
                tx.execute_sql(statement)
        with pytest.raises(RuntimeError, match="recorded"):
            tx.bulk_insert("governance_grants", ("workspace", "subject", "role"), [])


def test_an_inserted_row_has_the_digest_of_the_stored_one(platform: OwnPlatform) -> None:
    """For every recorded table: what is given, and what the database makes of it, are the same text."""
    with platform.database.write() as plain:
        rows = {shape.name: plain.execute_sql(shape.all_rows) for shape in recorded_shapes()}

        for shape in recorded_shapes():
            for stored in plain.execute(shape.table.select()).mappings():
                assert shape.given_text(stored) in [shape.stored_text(row) for row in rows[shape.name]]
        assert isinstance(platform.parts.audit.recording(plain), RecordedTransaction)


def test_defaults_of_the_database_are_read_back_and_any_update_counts() -> None:
    columns = Column("id", Text, primary_key=True), Column("state", Text, server_default=text("'new'"))
    table = Table("defaults", MetaData(), *columns)

    shape = RowShape(table, ("state",))

    assert shape.has_defaults
    assert not RowShape(table, ()).has_defaults
    assert shape.is_touched_by(update(table).where(table.c.id == "a"))
    assert not RowShape(table, ()).is_touched_by(update(table).values(state="old"))


def test_tables_of_identity_policy_and_lineage_are_recorded() -> None:
    names = {shape.name for shape in recorded_shapes()}

    assert names >= {
        *(f"governance_{name}" for name in ("objects", "principals", "group_members", "grants", "tokens")),
        *(f"governance_{name}" for name in ("policies", "blobs", "data_keys", "secrets", "lineage_edges")),
        *(f"registry_{name}" for name in ("models", "versions", "aliases", "alias_changes", "approvals")),
        *(
            "features_views",
            "features_training_sets",
            "serving_endpoints",
            "serving_batches",
            "training_jobs",
        ),
    }
    assert "governance_audit_entries" not in names
    assert len(names) < len(METADATA.tables)


# ----------------------------------------------------------------------------------------- the tables


@pytest.mark.slow
def test_a_table_whose_files_were_altered_is_named(tmp_path: Path) -> None:
    with make_platform(tmp_path) as platform:
        ingest(platform)
        assert problems(platform) == ()
        (published,) = [each for entry in platform.entries() for each in entry.get("published", ())]
        assert published["kind"] == "table"
        assert len(published["digest"]) == 64
        (file,) = (platform.home.path / "tables").rglob("*.parquet")
        file.write_bytes(file.read_bytes()[:-9] + b"x" * 9)

        (problem,) = problems(platform)

        assert "was altered outside the log" in problem
        assert file.name in problem


def test_altered_rows_are_named_also_if_their_hashes_in_the_database_were_adjusted(tmp_path: Path) -> None:
    with make_platform(tmp_path) as platform:
        ingest(platform)
        (file,) = (platform.home.path / "tables").rglob("*.parquet")
        rows = parquet.read_table(file)
        parquet.write_table(rows.set_column(rows.column_names.index("km"), "km", pa.array([6.0])), file)
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        with platform.database.write() as tx:
            tx.execute(update(table_files).values(sha256=digest, size_bytes=file.stat().st_size))

        (problem,) = problems(platform)

        assert "was altered outside the log: its files are not those that were published" in problem


@pytest.mark.slow
def test_an_older_version_that_got_other_files_is_named(tmp_path: Path) -> None:
    """Training sets pin old versions: which files belong to them is not in the rows that the log records."""
    with make_platform(tmp_path) as platform:
        ingest(platform)
        ingest(platform, driver="d2")
        assert problems(platform) == ()
        platform.sql("UPDATE features_table_files SET version = 0")

        (problem,) = problems(platform)

        assert "of view:trips" in problem
        assert "its files are not those that were published as version 0 (entry" in problem


def ingest(platform: OwnPlatform, driver: str = "d1") -> None:
    """One view with one row more."""
    kilometres = Feature(name="km", type=ColumnType.FLOAT)
    view = FeatureView(name="trips", entities=("driver",), columns=(kilometres,), event_time="at")
    platform.features.apply(entities=(Entity(name="driver", key="driver"),), views=(view,))
    at = pa.array([datetime(2024, 6, 1, tzinfo=UTC)], pa.timestamp("us", "UTC"))
    rows, sink = pa.table({"driver": [driver], "at": at, "km": [5.0]}), pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write_table(rows)
    platform.features.ingest("trips", data=platform.put(f"rows-{driver}", sink.getvalue().to_pybytes()).id)
