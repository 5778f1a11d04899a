"""Blobs through the whole platform: encrypted at rest, visible when committed, cleaned up when unreferenced."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from falaj.errors import Conflict, Damaged, NotFound
from falaj.governance.operations.caller import acting_as
from falaj.governance.tables import blobs
from falaj.records.governance.identity import Role
from platforms import TWO_ZONES, OwnPlatform, make_platform
from processes import running

if TYPE_CHECKING:
    from conftest import S3Server

DOOMED = Path(__file__).parents[2] / "killed_platform.py"
PLAIN = b"a line that nobody may read at rest\n" * 5000
DAY = timedelta(days=1)


def stored_files(platform: OwnPlatform) -> list[Path]:
    return sorted(
        path for path in platform.home.blobs.rglob("*") if path.is_file() and ".store." not in path.name
    )


# -------------------------------------------------------------------------------------------- round trip


@pytest.mark.parametrize("size", [0, 1, 65_535, 65_536, 65_537, (3 << 20) + 7])
def test_bytes_come_back_as_they_were(light_platform: OwnPlatform, size: int) -> None:
    data = os.urandom(size)

    blob = light_platform.put("data", data)

    assert light_platform.get("data") == data
    assert (blob.size_bytes, blob.committed, blob.name) == (size, True, "data")


@pytest.mark.parametrize(
    ("offset", "length"), [(0, 10), (5, None), (65_530, 20), (1 << 20, 1 << 20), ((2 << 20) - 1, 1), (0, 0)]
)
def test_a_range_is_a_slice(light_platform: OwnPlatform, offset: int, length: int | None) -> None:
    data = os.urandom(2 << 20)
    light_platform.put("data", data)

    part = b"".join(light_platform.blobs.read("data", offset=offset, length=length))

    assert part == data[offset:][:length]


def test_a_range_beyond_the_end_is_empty(light_platform: OwnPlatform) -> None:
    light_platform.put("data", b"bytes")

    assert b"".join(light_platform.blobs.read("data", offset=1000, length=5)) == b""


def test_one_name_in_two_workspaces_is_two_blobs(platform: OwnPlatform) -> None:
    platform.workspaces.create("other")
    platform.put("data", b"ours")
    platform.put("data", b"theirs", workspace="other")

    assert (platform.get("data"), platform.get("other/data")) == (b"ours", b"theirs")


def test_a_member_of_one_workspace_does_not_read_another(light_platform: OwnPlatform) -> None:
    light_platform.workspaces.create("other")
    ident = light_platform.put("data", b"theirs", workspace="other").id
    dana = light_platform.join("dana", Role.ADMIN)

    with acting_as(dana):
        for reference in ("other/data", ident):
            with pytest.raises(NotFound):
                light_platform.get(reference)


def test_names_are_unique(light_platform: OwnPlatform) -> None:
    light_platform.put("data", b"first")

    with pytest.raises(Conflict):
        light_platform.put("data", b"second")

    assert light_platform.get("data") == b"first"


def test_a_deleted_blob_leaves_its_name_free(light_platform: OwnPlatform) -> None:
    light_platform.put("data", b"first")

    light_platform.blobs.delete("data")
    light_platform.put("data", b"second")

    assert light_platform.get("data") == b"second"


def test_an_upload_that_breaks_off_leaves_nothing(light_platform: OwnPlatform) -> None:
    def broken():
        yield b"some"
        raise ConnectionResetError

    with pytest.raises(Exception, match=r"blobs\.upload failed"):
        light_platform.blobs.upload(broken())

    assert (stored_files(light_platform), light_platform.count(blobs)) == ([], 0)


# ----------------------------------------------------------------------------------------------- at rest


def test_no_file_of_the_home_holds_plain_bytes(light_platform: OwnPlatform) -> None:
    light_platform.put("data", PLAIN)
    files = [path for path in light_platform.home.path.rglob("*") if path.is_file()]

    holding = [path.name for path in files if PLAIN[:36] in path.read_bytes()]

    assert len(stored_files(light_platform)) == 1
    assert holding == []


def test_altered_bytes_are_damaged(light_platform: OwnPlatform) -> None:
    light_platform.put("data", PLAIN)
    (file,) = stored_files(light_platform)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)

    with pytest.raises(Damaged):
        light_platform.get("data")


@pytest.mark.parametrize("workspace", ["default", "other"])
def test_bytes_of_another_blob_in_its_place_are_damaged(light_platform: OwnPlatform, workspace: str) -> None:
    light_platform.workspaces.create("other")
    mine = light_platform.put("mine", b"mine!")
    theirs = light_platform.put("theirs", b"their", workspace=workspace)
    files = {path.name: path for path in stored_files(light_platform)}

    files[mine.id].write_bytes(files[theirs.id].read_bytes())

    with pytest.raises(Damaged):
        light_platform.get("mine")


# ----------------------------------------------------------------------------------------------- sweeping


def test_a_sweep_removes_expired_and_deleted_blobs_only(platform: OwnPlatform) -> None:
    platform.put("kept", b"kept")
    platform.put("gone", b"gone")
    platform.blobs.delete("gone")
    platform.blobs.upload(iter([b"staged and forgotten"]))
    platform.clock.advance(3 * DAY)
    fresh = platform.blobs.upload(iter([b"staged just now"]))

    swept = platform.blobs.cleanup()

    assert swept.removed == 2
    assert platform.get("kept") == b"kept"
    assert platform.get(fresh.id) == b"staged just now"
    assert platform.blobs.cleanup().removed == 0


def test_a_sweep_keeps_recently_staged_blobs(light_platform: OwnPlatform) -> None:
    staged = light_platform.blobs.upload(iter([b"bytes"]))
    light_platform.clock.advance(timedelta(minutes=1))

    assert light_platform.blobs.cleanup(older_than=timedelta(minutes=1)).removed == 0
    assert light_platform.blobs.commit(staged.id, name="data").committed
    assert light_platform.get("data") == b"bytes"


def test_a_staged_blob_that_expired_cannot_be_committed(platform: OwnPlatform) -> None:
    staged = platform.blobs.upload(iter([b"bytes"]))
    platform.clock.advance(3 * DAY)
    platform.blobs.cleanup()

    with pytest.raises((Conflict, NotFound)):
        platform.blobs.commit(staged.id, name="data")

    assert "data" not in [blob.name for blob in platform.blobs.list().items]


def test_a_blob_is_committed_once(light_platform: OwnPlatform) -> None:
    blob = light_platform.put("data", b"bytes")

    with pytest.raises(Conflict):
        light_platform.blobs.commit(blob.id, name="again")


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["stop_before_commit", "stop_half_way"])
def test_kill_9_during_an_upload_leaves_no_blob_and_a_sweep_leaves_no_bytes(
    platform: OwnPlatform, tmp_path: Path, moment: str
) -> None:
    platform.put("living", b"bytes")
    with running(DOOMED, str(tmp_path), moment, "doomed bytes") as child:
        assert child.line() == "stopped"
        child.kill()
    left_over = len(stored_files(platform)) - 1

    seen = [blob.name for blob in platform.blobs.list().items]
    platform.clock.advance(3 * DAY)
    platform.blobs.cleanup()

    assert (seen, platform.count(blobs), left_over) == (["living"], 1, 1)
    assert len(stored_files(platform)) == 1
    assert platform.get("living") == b"bytes"


# --------------------------------------------------------------------------------------- object storage


@pytest.mark.slow
def test_a_zone_in_a_bucket(tmp_path: Path, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FALAJ_TEST_S3", "test")
    bucket = s3_server.create_bucket()
    toml = f"""{TWO_ZONES}
[zones.frankfurt.blobs]
driver = "s3"
bucket = "{bucket}"
prefix = "team"
endpoint = "{s3_server.endpoint}"
access_key = "env:FALAJ_TEST_S3"
secret_key = "env:FALAJ_TEST_S3"
"""
    with make_platform(tmp_path, toml=toml) as platform:
        platform.put("data", PLAIN, zone="frankfurt")
        platform.put("gone", b"gone", zone="frankfurt")
        platform.blobs.delete("gone")
        stored = bucket_contents(s3_server, bucket)
        platform.clock.advance(3 * DAY)

        removed = platform.blobs.cleanup().removed

        assert platform.get("data") == PLAIN
        assert b"".join(platform.blobs.read("data", offset=70_000, length=9)) == PLAIN[70_000:70_009]
        assert stored_files(platform) == []
    assert removed == 1
    assert len(stored) == 2
    assert not [key for key, content in stored.items() if PLAIN[:36] in content]
    assert {key.split("/")[0] for key in stored} == {"team"}


def bucket_contents(server: S3Server, bucket: str) -> dict[str, bytes]:
    import obstore
    from obstore.store import S3Store

    store = S3Store(
        bucket,
        config={
            "endpoint": server.endpoint,
            "region": server.region,
            "access_key_id": server.access_key_id,
            "secret_access_key": server.secret_access_key,
        },
        client_options={"allow_http": True},
    )
    keys = [found["path"] for batch in obstore.list(store) for found in batch]
    return {key: bytes(obstore.get(store, key).bytes()) for key in keys}
