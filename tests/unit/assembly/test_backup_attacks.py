"""Backups that somebody edited, and platforms that are damaged themselves: nothing of it is taken for sound."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from backup_harness import WHOLE, checked, contents, destroy, fill, put_rows, reopened, restored, taken
from falaj.assembly.backup.archive import Archive
from falaj.drivers.deltalake import tables as delta_tables
from falaj.errors import Damaged, FalajError, InvalidInput, KeyUnavailable
from falaj.records.backups import backup_message
from platforms import OwnPlatform, make_platform
from power_cuts import recorded_disk

Edit = Callable[[dict[str, Any]], None]


def forge(backups: Path, edit: Edit, *, name: str | None = None) -> None:
    """Edit the newest manifest, and sign it with a key of the forger's own, as who can write to the directory can."""
    path = sorted((backups / "manifests").iterdir())[-1]
    manifest = json.loads(json.loads(path.read_text())["manifest"])
    edit(manifest)
    text = json.dumps(manifest)
    key = Ed25519PrivateKey.generate()
    message = backup_message(manifest["log_id"], hashlib.sha256(text.encode()).hexdigest())
    signed = {
        "public_key": key.public_key().public_bytes_raw().hex(),
        "signature": key.sign(message).hex(),
    }
    path.with_name(f"{name or path.stem}.json").write_text(json.dumps({"manifest": text, "signed": signed}))


def replaced(backups: Path, place: str, name: str, content: bytes) -> Edit:
    """Store other bytes for a file, and have the manifest name them."""
    digest = hashlib.sha256(content).hexdigest()
    stored = backups / "objects" / digest[:2] / digest
    stored.parent.mkdir(exist_ok=True)
    stored.write_bytes(content)

    def edit(manifest: dict[str, Any]) -> None:
        file = next(file for file in manifest["files"] if (file["place"], file["name"]) == (place, name))
        file |= {"sha256": digest, "size_bytes": len(content)}

    return edit


def test_settings_of_a_forged_backup_are_never_read(light_platform: OwnPlatform, tmp_path: Path) -> None:
    taken(light_platform, tmp_path, keys=tmp_path / "safe")
    destroy(light_platform)
    light_platform.home.key_file.unlink()
    elsewhere = tmp_path / "public" / "root.json"
    elsewhere.parent.mkdir()
    toml = f'[zones.local]\njurisdiction = "AE"\n\n[keys]\ndriver = "keyfile"\npath = "{elsewhere}"\n'
    forge(
        tmp_path / "backups",
        replaced(tmp_path / "backups", "home", light_platform.home.toml.name, toml.encode()),
    )

    with pytest.raises(KeyUnavailable, match="somebody has replaced"):
        restored(tmp_path, keys=tmp_path / "safe")

    assert not elsewhere.exists()
    assert not light_platform.home.path.exists()


def test_a_backup_of_an_unknown_signer_is_not_restored(light_platform: OwnPlatform, tmp_path: Path) -> None:
    taken(light_platform, tmp_path)
    key = light_platform.parts.keys.public_key().hex()
    kept = light_platform.home.key_file.read_bytes()
    destroy(light_platform)
    light_platform.home.key_file.unlink()

    with pytest.raises(KeyUnavailable, match="--public-key KEY"):
        restored(tmp_path)

    light_platform.home.key_file.write_bytes(kept)
    light_platform.home.key_file.chmod(0o600)
    assert restored(tmp_path, public_key=key).public_key == key


def test_a_manifest_that_names_a_path_as_its_home_is_refused(
    light_platform: OwnPlatform, tmp_path: Path
) -> None:
    taken(light_platform, tmp_path)
    forge(tmp_path / "backups", lambda manifest: manifest.update(home="../../other"))

    with pytest.raises(Damaged, match="manifest"):
        checked(tmp_path)


def test_a_forged_backup_is_not_sound(light_platform: OwnPlatform, tmp_path: Path) -> None:
    taken(light_platform, tmp_path)
    forge(tmp_path / "backups", lambda manifest: manifest.update(version="0"))

    with pytest.raises(KeyUnavailable, match="these are other keys"):
        checked(tmp_path)

    assert not checked(tmp_path, tmp_path / "nobody").signer_known


def test_the_next_backup_takes_nothing_from_a_forged_one(light_platform: OwnPlatform, tmp_path: Path) -> None:
    first = taken(light_platform, tmp_path)
    toml = light_platform.home.toml
    size = toml.stat().st_size
    evil = b"#" + b"x" * (size - 2) + b"\n"
    forge(
        tmp_path / "backups", replaced(tmp_path / "backups", "home", toml.name, evil), name="9" + first.name
    )

    second = taken(light_platform, tmp_path)
    kept = toml.read_bytes()
    destroy(light_platform)
    restored(tmp_path, name=second.name)

    assert toml.read_bytes() == kept


def test_an_older_backup_under_a_newer_name_is_refused(light_platform: OwnPlatform, tmp_path: Path) -> None:
    made = taken(light_platform, tmp_path)
    path = tmp_path / "backups" / "manifests" / f"{made.name}.json"
    path.rename(path.with_name("20990101T000000.000000Z.json"))

    with pytest.raises(Damaged, match=f"renamed: it is that of the backup {made.name}"):
        checked(tmp_path)


def test_a_damaged_mark_is_said(light_platform: OwnPlatform, tmp_path: Path) -> None:
    taken(light_platform, tmp_path)
    (tmp_path / "backups" / "falaj-backup.json").write_bytes(b"")

    with pytest.raises(Damaged, match=r"falaj-backup\.json is damaged"):
        taken(light_platform, tmp_path)


# ------------------------------------------------------------------------- what the platform itself has lost


def parquet_files(platform: OwnPlatform) -> list[Path]:
    return sorted((platform.home.path / "tables").rglob("*.parquet"))


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


@pytest.mark.slow
def test_a_file_of_a_table_that_the_platform_has_lost_is_named(
    light_platform: OwnPlatform, tmp_path: Path
) -> None:
    fill(light_platform)
    lost, altered = parquet_files(light_platform)
    lost.unlink()
    flip(altered)

    made = taken(light_platform, tmp_path)

    assert [each.rpartition("/")[2] for each in made.missing] == [lost.name]
    assert [each.rpartition("/")[2] for each in made.damaged] == [altered.name]


@pytest.mark.slow
def test_a_lost_table_does_not_keep_the_rest_from_being_restored(
    light_platform: OwnPlatform, tmp_path: Path
) -> None:
    fill(light_platform)
    view = light_platform.features.show("facts")
    next((light_platform.home.path / "tables").rglob(f"{view.id}/**/*.parquet")).unlink()
    taken(light_platform, tmp_path)
    destroy(light_platform)

    done = restored(tmp_path)

    assert (done.views, len(done.not_online)) == (0, 1)
    assert done.not_online[0].startswith("view facts: ")
    with reopened(light_platform) as again:
        assert again.get("figures") == WHOLE["blob"]
        with pytest.raises(Damaged, match="no such file"):
            again.features.scan("facts")


@pytest.mark.slow
def test_what_is_damaged_in_every_backup_can_be_left_out(light_platform: OwnPlatform, tmp_path: Path) -> None:
    fill(light_platform)
    light_platform.put("other", b"other figures")
    taken(light_platform, tmp_path)
    taken(light_platform, tmp_path)  # the same object is in both
    blob = light_platform.blobs.show("other")
    stored = next(light_platform.home.blobs.rglob(blob.id)).read_bytes()
    table = parquet_files(light_platform)[0].read_bytes()
    for content in (stored, table):
        digest = hashlib.sha256(content).hexdigest()
        harmed = tmp_path / "backups" / "objects" / digest[:2] / digest
        harmed.chmod(0o600)
        flip(harmed)
    destroy(light_platform)

    with pytest.raises(Damaged) as error:
        checked(tmp_path)
    with pytest.raises(Damaged, match="--without-damaged"):
        restored(tmp_path)
    done = restored(tmp_path, without_damaged=True)

    assert len(error.value.faults) == 2
    assert sorted(each.partition("/")[0] for each in done.left_out) == ["blobs", "tables"]
    with reopened(light_platform) as again:
        assert again.get("figures") == WHOLE["blob"]
        with pytest.raises(FalajError):
            again.get("other")
        assert again.verify_audit().ok


@pytest.mark.slow
def test_a_machine_without_online_values_is_restored(tmp_path: Path) -> None:
    toml = '[zones.local]\njurisdiction = "AE"\n'
    with make_platform(tmp_path, toml=toml) as platform:
        fill(platform)
        platform.home.toml.write_text(toml + 'online = { driver = "none" }\n')
        taken(platform, tmp_path)
    destroy(platform)

    done = restored(tmp_path)

    assert (done.views, done.not_online) == (0, ())


def test_a_blob_that_was_cut_is_named(light_platform: OwnPlatform, tmp_path: Path) -> None:
    blob = light_platform.put("figures", b"quarterly figures")
    stored = next(light_platform.home.blobs.rglob(blob.id))
    stored.chmod(0o600)
    stored.write_bytes(stored.read_bytes()[:-1])

    made = taken(light_platform, tmp_path)

    assert [each.rpartition("/")[2] for each in made.damaged] == [blob.id]


@pytest.mark.slow
def test_files_of_tables_stay_while_a_backup_is_made(
    platform: OwnPlatform, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta_tables, "MERGED_FILES", 3)
    fill(platform)
    before = parquet_files(platform)
    hold = platform.platform.begin_backup()
    for number in range(4):  # small files are merged meanwhile
        platform.features.ingest("facts", data=put_rows(platform, f"more-{number}", [("c", float(number))]))
    platform.features.materialize("facts")
    platform.clock.advance(timedelta(minutes=5))
    written = set(parquet_files(platform))

    during = platform.features.cleanup(older_than=timedelta(minutes=1)).files
    stayed = set(parquet_files(platform))
    platform.platform.finish_backup(hold.id, "0" * 64)
    after = platform.features.cleanup(older_than=timedelta(minutes=1)).files

    assert (during, stayed) == (0, written)
    assert set(before) <= stayed
    assert after > 0


# ------------------------------------------------------------------------------ what lies outside of the home

OUTSIDE = """
[zones.local]
jurisdiction = "AE"
tables = {{ path = "{folder}/zone/tables" }}
online = {{ path = "{folder}/zone/online" }}
"""


@pytest.mark.slow
def test_online_values_that_outlived_the_home_do_not_stay(tmp_path: Path) -> None:
    with make_platform(tmp_path, toml=OUTSIDE.format(folder=tmp_path)) as platform:
        fill(platform)
        taken(platform, tmp_path)
        later = put_rows(platform, "later", [("a", 99.0)])
        platform.features.ingest("facts", data=later)
        platform.features.materialize("facts")
        assert platform.features.read("facts", keys=("a",)).rows[0].values == (99.0,)
    destroy(platform)

    restored(tmp_path)

    with reopened(platform) as again:
        assert contents(again) == WHOLE


@pytest.mark.slow
def test_restored_tables_outside_of_the_home_are_on_disk(tmp_path: Path) -> None:
    with make_platform(tmp_path, toml=OUTSIDE.format(folder=tmp_path)) as platform:
        fill(platform)
        taken(platform, tmp_path)
    destroy(platform)
    (tmp_path / "zone").rename(tmp_path / "gone")

    with recorded_disk() as disk:
        restored(tmp_path)

    assert disk.cut_power(tmp_path / "zone" / "tables", spare=(".queues",)) == []


# ---------------------------------------------------------------------------------------------- residency


@pytest.mark.slow
def test_data_is_not_copied_to_where_it_may_not_lie(light_platform: OwnPlatform, tmp_path: Path) -> None:
    fill(light_platform)
    content = b"bound figures"
    staged = light_platform.blobs.upload(iter([content]), zone="frankfurt", only=("DE",))
    light_platform.blobs.commit(staged.id, name="bound")

    here = taken(light_platform, tmp_path)  # the machine is in AE

    assert [each.partition(":")[0] for each in here.left_out] == ["zone frankfurt"]
    assert "only DE" in here.left_out[0]
    assert here.missing == ()
    manifest = Archive.open(tmp_path / "backups").load(here.name)[0]
    assert not any("frankfurt" in file.place for file in manifest.files)


def test_data_is_copied_to_where_it_may_lie(light_platform: OwnPlatform, tmp_path: Path) -> None:
    staged = light_platform.blobs.upload(iter([b"bound figures"]), zone="frankfurt", only=("DE",))
    light_platform.blobs.commit(staged.id, name="bound")

    there = taken(light_platform, tmp_path, zone="frankfurt")
    with pytest.raises(InvalidInput, match="local, frankfurt"):
        taken(light_platform, tmp_path, zone="mars")
    destroy(light_platform)
    restored(tmp_path)

    assert there.left_out == ()
    with reopened(light_platform) as again:
        assert again.get("bound") == b"bound figures"
