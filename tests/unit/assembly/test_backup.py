"""Backups: a home is copied while it is written to, destroyed, and made again from the copy."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from backup_harness import (
    WHOLE,
    checked,
    contents,
    destroy,
    fill,
    put_rows,
    reopened,
    restored,
    taken,
    unwatched,
)
from falaj.assembly.backup import archive as archives
from falaj.assembly.backup.archive import Archive
from falaj.assembly.backup.backup import back_up
from falaj.drivers.dbos.workflows import create_schema
from falaj.errors import Conflict, Damaged, Denied, FalajError, InvalidInput, KeyUnavailable, Unavailable
from falaj.governance.operations.caller import acting_as
from falaj.records.governance.identity import Role
from platforms import TWO_ZONES, URL_VARIABLE, OwnPlatform, make_platform
from power_cuts import recorded_disk

if TYPE_CHECKING:
    from conftest import PostgresServer


@pytest.fixture
def empty_again(
    request: pytest.FixtureRequest, platform: OwnPlatform, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], None]:
    """Destroys the home; on PostgreSQL the database, too: an empty one takes its place."""

    def act() -> None:
        destroy(platform)
        if platform.parts.config.metadata.driver == "postgres":
            server: PostgresServer = request.getfixturevalue("postgres_server")
            name = server.create_database()
            request.addfinalizer(lambda: server.drop_database(name))
            monkeypatch.setenv(URL_VARIABLE, server.url(name))

    return act


# ------------------------------------------------------------------------------ a destroyed home is made again


@pytest.mark.slow
def test_a_destroyed_home_is_made_again(
    platform: OwnPlatform, tmp_path: Path, empty_again: Callable[[], None]
) -> None:
    fill(platform)
    made = taken(platform, tmp_path)
    empty_again()

    done = restored(tmp_path)

    with reopened(platform) as again:
        assert contents(again) == WHOLE
        verdict = again.verify_audit()
        assert (verdict.ok, verdict.problems) == (True, ())
        assert again.audit.list(action="platform.restore").items[0].seq == made.entries
    assert (made.missing, done.views) == ((), 1)


@pytest.mark.slow
def test_what_was_written_after_the_backup_is_gone_and_that_is_said(
    platform: OwnPlatform, tmp_path: Path, empty_again: Callable[[], None]
) -> None:
    fill(platform)
    made = taken(platform, tmp_path)
    platform.put("later", b"later")
    platform.parts.audit.sign_head()  # the witness, which outlives the home, knows of it
    empty_again()

    done = restored(tmp_path)

    with reopened(platform) as again:
        again.put("new", b"goes on")
        again.parts.audit.sign_head()
        verdict = again.verify_audit()
        assert "later" not in {blob.name for blob in again.blobs.list().items}
        assert verdict.ok, verdict.problems
        assert any(
            f"backup with {made.entries} entries" in note and "are gone" in note for note in verdict.notes
        )
    assert done.lost_entries > 0


@pytest.mark.slow
def test_a_home_is_made_again_where_nothing_of_it_is_left(
    light_platform: OwnPlatform, tmp_path: Path
) -> None:
    fill(light_platform)
    taken(light_platform, tmp_path, keys=tmp_path / "safe")
    destroy(light_platform)
    shutil.rmtree(tmp_path / "config")

    restored(tmp_path, keys=tmp_path / "safe")

    with reopened(light_platform) as again:
        assert contents(again) == WHOLE
        assert again.verify_audit().ok


@pytest.mark.slow
def test_unfinished_workflows_are_in_the_backup(
    tmp_path: Path,
    schema_on_postgres: str,
    postgres_server: PostgresServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    create_schema(schema_on_postgres)
    row = "INSERT INTO falaj_dbos.workflow_status (workflow_uuid, status, name) VALUES ('w1', 'PENDING', 'falaj')"
    with make_platform(tmp_path, schema_on_postgres, TWO_ZONES, environment=monkeypatch) as platform:
        platform.sql(row)
        taken(platform, tmp_path)
    shutil.rmtree(platform.home.path)
    name = postgres_server.create_database()
    monkeypatch.setenv(URL_VARIABLE, postgres_server.url(name))

    restored(tmp_path)

    with reopened(platform) as again:
        found = again.rows_of("SELECT workflow_uuid FROM falaj_dbos.workflow_status")
        assert found == ["w1"]
    postgres_server.drop_database(name)


def test_unfinished_workflows_of_a_home_are_in_the_backup(
    light_platform: OwnPlatform, tmp_path: Path
) -> None:
    with sqlite3.connect(light_platform.home.workflows) as database:
        database.execute("CREATE TABLE work AS SELECT 7 AS step")
    database.close()
    taken(light_platform, tmp_path)
    destroy(light_platform)

    restored(tmp_path)

    with sqlite3.connect(light_platform.home.workflows) as again:
        assert again.execute("SELECT step FROM work").fetchall() == [(7,)]
    again.close()


@pytest.mark.slow
def test_a_restored_home_is_on_disk(light_platform: OwnPlatform, tmp_path: Path) -> None:
    fill(light_platform)
    taken(light_platform, tmp_path)
    destroy(light_platform)

    with recorded_disk() as disk:
        restored(tmp_path)

    flushed_below_python = ("*.db", "*.db-*", "local", "local-lock")  # by SQLite and LMDB
    lost = disk.cut_power(tmp_path / "home", spare=(*flushed_below_python, "lock", "logs", "spill"))
    assert [each for each in lost if not each.startswith("blobs/local")] == []
    with reopened(light_platform) as again:
        assert contents(again) == WHOLE


def test_a_home_is_restored_twice(light_platform: OwnPlatform, tmp_path: Path) -> None:
    light_platform.put("figures", b"quarterly figures")
    taken(light_platform, tmp_path)
    for number in range(2):
        destroy(light_platform)
        restored(tmp_path)
        light_platform = reopened(light_platform)
        light_platform.put(f"number-{number}", b"after a restore")
        light_platform.parts.audit.sign_head()

    verdict = light_platform.verify_audit()

    assert (verdict.ok, len(verdict.notes)) == (True, 1)
    light_platform.close()


def test_a_log_cut_behind_the_backup_without_a_restore_is_still_reported(
    light_platform: OwnPlatform, tmp_path: Path
) -> None:
    light_platform.put("figures", b"quarterly figures")
    light_platform.parts.audit.sign_head()
    shutil.copy(light_platform.home.database, tmp_path / "copy.db")
    light_platform.database.purge_deleted()
    shutil.copy(light_platform.home.database, tmp_path / "copy.db")
    light_platform.put("later", b"later")
    light_platform.close()
    shutil.copy(tmp_path / "copy.db", light_platform.home.database)

    with reopened(light_platform) as again:
        again.put("other", b"other")
        verdict = again.verify_audit()

    assert not verdict.ok


def test_tokens_end_with_a_restore(light_platform: OwnPlatform, tmp_path: Path) -> None:
    revoked = light_platform.tokens.issue(purpose="lost laptop")
    taken(light_platform, tmp_path)
    light_platform.tokens.revoke(revoked.token.id)
    destroy(light_platform)

    restored(tmp_path)

    light_platform.clock.advance(timedelta(seconds=5))
    with reopened(light_platform) as again, pytest.raises(FalajError, match="expired"):
        again.caller_of(revoked.secret)


def test_tokens_stay_where_that_is_asked_for(light_platform: OwnPlatform, tmp_path: Path) -> None:
    issued = light_platform.tokens.issue(purpose="pipeline")
    taken(light_platform, tmp_path)
    destroy(light_platform)

    restored(tmp_path, keep_tokens=True)

    with reopened(light_platform) as again:
        assert again.caller_of(issued.secret).name


# ------------------------------------------------------------------------------------ while others write


@pytest.mark.slow
def test_a_backup_is_one_moment_while_others_write(
    platform: OwnPlatform, tmp_path: Path, empty_again: Callable[[], None]
) -> None:
    fill(platform)
    stop, errors = threading.Event(), list[BaseException]()

    def write() -> None:
        number = 0
        try:
            while not stop.is_set():
                number += 1
                platform.put(f"blob-{number}", b"x" * 1000)
                platform.features.ingest(
                    "facts", data=put_rows(platform, f"rows-{number}", [("c", 9.0 + number)])
                )
                platform.blobs.delete(f"blob-{number}")
        except BaseException as error:
            errors.append(error)

    writer = threading.Thread(target=write)
    writer.start()
    results = [taken(platform, tmp_path) for _ in range(3)]
    stop.set()
    writer.join()
    empty_again()

    restored(tmp_path, name=results[1].name)

    assert not errors
    with reopened(platform) as again:
        view = again.features.show("facts")
        assert len(again.features.scan("facts").read_all()) == view.rows
        assert all(again.get(blob.name) for blob in again.blobs.list().items)
        assert (
            again.features.ingest("facts", data=put_rows(again, "after", [("d", 1.0)])).rows == view.rows + 1
        )
        assert again.verify_audit().ok
    assert not any(result.missing for result in results)


def test_deleted_bytes_stay_while_a_backup_is_made(platform: OwnPlatform) -> None:
    blob = platform.put("figures", b"quarterly figures")
    hold = platform.platform.begin_backup()
    platform.blobs.delete("figures")
    platform.clock.advance(timedelta(minutes=2))

    during = platform.blobs.cleanup(older_than=timedelta(minutes=1)).removed
    platform.jobs.stored.erase(blob.id)
    kept = [found for zone in ("local",) for found in (platform.home.blobs / zone).rglob(blob.id)]
    platform.platform.finish_backup(hold.id, "0" * 64)

    assert (during, len(kept)) == (0, 1)
    assert platform.blobs.cleanup(older_than=timedelta(minutes=1)).removed == 1


def test_a_backup_that_paused_too_long_is_refused(light_platform: OwnPlatform) -> None:
    hold = light_platform.platform.begin_backup()
    light_platform.clock.advance(timedelta(minutes=9))
    light_platform.platform.extend_backup(hold.id)
    light_platform.clock.advance(timedelta(minutes=11))

    with pytest.raises(Conflict, match="run falaj backup again"):
        light_platform.platform.finish_backup(hold.id, "0" * 64)


def test_only_an_administrator_of_the_platform_backs_it_up(light_platform: OwnPlatform) -> None:
    sara = light_platform.join("sara", Role.ADMIN)

    with acting_as(sara), pytest.raises(Denied):
        light_platform.platform.begin_backup()


# ----------------------------------------------------------------------------- incremental and interrupted


@pytest.mark.slow
def test_only_what_is_new_is_copied(light_platform: OwnPlatform, tmp_path: Path) -> None:
    fill(light_platform)
    light_platform.put("large", os.urandom(3_000_000))
    first = taken(light_platform, tmp_path)

    second = taken(light_platform, tmp_path)

    assert first.copied_bytes > 3_000_000 > second.copied_bytes
    assert second.size_bytes > 3_000_000
    assert second.copied_files < first.copied_files


def test_old_backups_are_removed_where_that_is_asked_for(light_platform: OwnPlatform, tmp_path: Path) -> None:
    light_platform.put("large", os.urandom(1_000_000))
    taken(light_platform, tmp_path)
    light_platform.blobs.delete("large")
    light_platform.clock.advance(timedelta(days=3))
    light_platform.blobs.cleanup()

    last = back_up(
        light_platform.platform,
        light_platform.home,
        tmp_path / "backups",
        keys=None,
        watch=unwatched,
        keep=1,
    )

    assert last.freed_bytes > 1_000_000
    assert Archive.open(tmp_path / "backups").names() == [last.name]
    assert checked(tmp_path).files == last.files


class Killed(BaseException):
    """The process is gone."""


@pytest.mark.slow
@pytest.mark.parametrize("after", range(0, 8, 2))
def test_an_interrupted_backup_leaves_the_former_one_and_can_be_repeated(
    light_platform: OwnPlatform, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    first = taken(light_platform, tmp_path)
    fill(light_platform)
    left, add = [after], Archive.add

    def killed(self: Archive, chunks: Any, advance: Any) -> tuple[str, int]:
        left[0] -= 1
        if left[0] < 0:
            raise Killed
        return add(self, chunks, advance)

    monkeypatch.setattr(Archive, "add", killed)
    with pytest.raises(Killed):
        taken(light_platform, tmp_path)
    monkeypatch.undo()

    sound = checked(tmp_path)
    again = taken(light_platform, tmp_path)
    destroy(light_platform)
    restored(tmp_path)

    assert sound.name == first.name
    assert again.missing == ()
    with reopened(light_platform) as back:
        assert contents(back) == WHOLE


@pytest.mark.slow
def test_an_interrupted_restore_leaves_no_home_and_can_be_repeated(
    light_platform: OwnPlatform, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(light_platform)
    taken(light_platform, tmp_path)
    destroy(light_platform)
    left, read = [5], Archive.read

    def killed(self: Archive, file: Any, advance: Any) -> Iterator[bytes]:
        left[0] -= 1
        if left[0] < 0:
            raise Killed
        return read(self, file, advance)

    monkeypatch.setattr(Archive, "read", killed)
    with pytest.raises(Killed):
        restored(tmp_path)
    monkeypatch.undo()
    assert not light_platform.home.path.exists()

    restored(tmp_path)

    with reopened(light_platform) as again:
        assert contents(again) == WHOLE


# ------------------------------------------------------------------------------------------------- refusals


def test_a_home_that_is_not_empty_is_not_overwritten(light_platform: OwnPlatform, tmp_path: Path) -> None:
    taken(light_platform, tmp_path)

    with pytest.raises(Conflict, match="never overwrites a home"):
        restored(tmp_path)


def test_a_database_that_is_not_empty_is_not_overwritten(
    tmp_path: Path, schema_on_postgres: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_platform(tmp_path, schema_on_postgres, TWO_ZONES, environment=monkeypatch) as platform:
        taken(platform, tmp_path)
    shutil.rmtree(platform.home.path)

    with pytest.raises(Conflict, match="is not empty; restore into an empty one"):
        restored(tmp_path)

    assert not platform.home.path.exists()


@pytest.mark.parametrize("where", ["home/backups", "."])
def test_a_directory_that_is_lost_with_the_home_is_refused(
    light_platform: OwnPlatform, tmp_path: Path, where: str
) -> None:
    with pytest.raises(InvalidInput, match="apart from the home"):
        back_up(light_platform.platform, light_platform.home, tmp_path / where, keys=None, watch=unwatched)


@pytest.mark.parametrize("where", ["backups", "backups/keys", "home/keys"])
def test_keys_beside_the_data_are_refused(light_platform: OwnPlatform, tmp_path: Path, where: str) -> None:
    with pytest.raises(InvalidInput, match="who has both can read everything"):
        taken(light_platform, tmp_path, keys=tmp_path / where)


def test_the_keys_are_not_in_a_backup(light_platform: OwnPlatform, tmp_path: Path) -> None:
    taken(light_platform, tmp_path)

    root = json.loads(light_platform.home.key_file.read_text())["roots"]["1"].encode()
    files = [path for path in (tmp_path / "backups").rglob("*") if path.is_file()]

    assert not any(root in path.read_bytes() for path in files)


def test_other_keys_are_refused(light_platform: OwnPlatform, tmp_path: Path) -> None:
    taken(light_platform, tmp_path)
    destroy(light_platform)
    with make_platform(tmp_path / "other", toml=TWO_ZONES) as other:
        shutil.copy(other.home.key_file, light_platform.home.key_file)

    with pytest.raises(KeyUnavailable, match="these are other keys"):
        restored(tmp_path)

    assert not light_platform.home.path.exists()


def test_missing_keys_are_said_before_anything_is_copied(light_platform: OwnPlatform, tmp_path: Path) -> None:
    taken(light_platform, tmp_path)
    destroy(light_platform)
    light_platform.home.key_file.unlink()

    with pytest.raises(KeyUnavailable, match="--keys DIR"):
        restored(tmp_path)


def test_a_directory_of_something_else_is_refused(light_platform: OwnPlatform, tmp_path: Path) -> None:
    (tmp_path / "backups").mkdir()
    (tmp_path / "backups" / "thesis.tex").touch()

    with pytest.raises(Conflict, match="neither empty nor a directory of backups"):
        taken(light_platform, tmp_path)


def test_backups_of_two_platforms_do_not_share_a_directory(
    light_platform: OwnPlatform, tmp_path: Path
) -> None:
    taken(light_platform, tmp_path)

    with (
        make_platform(tmp_path / "other", toml=TWO_ZONES) as other,
        pytest.raises(Conflict, match="backups of another platform"),
    ):
        taken(other, tmp_path)


def flip(path: Path) -> None:
    path.chmod(0o600)
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


@pytest.mark.slow
@pytest.mark.parametrize("harm", [flip, Path.unlink])
def test_a_damaged_file_is_named(
    light_platform: OwnPlatform, tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    fill(light_platform)
    taken(light_platform, tmp_path)
    destroy(light_platform)
    objects = sorted(path for path in (tmp_path / "backups" / "objects").rglob("*") if path.is_file())
    harm(objects[3])

    with pytest.raises(Damaged, match=objects[3].name):
        checked(tmp_path)
    with pytest.raises(Damaged, match=objects[3].name):
        restored(tmp_path)
    assert not light_platform.home.path.exists()


@pytest.mark.slow
def test_a_changed_manifest_is_found(light_platform: OwnPlatform, tmp_path: Path) -> None:
    made = taken(light_platform, tmp_path)
    path = tmp_path / "backups" / "manifests" / f"{made.name}.json"
    path.write_text(path.read_text().replace(light_platform.home.ident, "home_other"))

    with pytest.raises(Damaged, match="signature does not fit"):
        checked(tmp_path)


def test_a_backup_signed_by_another_key_is_refused(light_platform: OwnPlatform, tmp_path: Path) -> None:
    made = taken(light_platform, tmp_path)
    destroy(light_platform)
    path = tmp_path / "backups" / "manifests" / f"{made.name}.json"
    signed = json.loads(path.read_text())
    with make_platform(tmp_path / "other", toml=TWO_ZONES) as other:
        digest = hashlib.sha256(signed["manifest"].encode()).hexdigest()
        log_id = json.loads(signed["manifest"])["log_id"]
        message = archives.backup_message(log_id, digest)
        signed["signed"] = {
            "public_key": other.parts.keys.public_key().hex(),
            "signature": other.parts.keys.sign(message).hex(),
        }
    path.write_text(json.dumps(signed))

    with pytest.raises(KeyUnavailable, match="these are other keys"):
        restored(tmp_path)


def test_a_full_disk_is_said(
    light_platform: OwnPlatform, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_self: Archive, _chunks: Any, _advance: Any) -> tuple[str, int]:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Archive, "add", full)

    with pytest.raises(Unavailable, match=r"is full .* run the same command again"):
        taken(light_platform, tmp_path)


def test_a_blob_that_the_platform_has_lost_is_named(light_platform: OwnPlatform, tmp_path: Path) -> None:
    blob = light_platform.put("figures", b"quarterly figures")
    next(light_platform.home.blobs.rglob(blob.id)).unlink()

    made = taken(light_platform, tmp_path)

    assert [each.rpartition("/")[2] for each in made.missing] == [blob.id]
