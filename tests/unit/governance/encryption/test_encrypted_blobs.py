"""Blobs are encrypted on the way to a store, and changes by the store are detected."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from falaj.drivers.objectstore.blobs import ObjectStoreBlobs, local_blobs, s3_blobs
from falaj.errors import Damaged, NotFound
from falaj.governance.encryption.blobs import EncryptedBlobs
from falaj.governance.encryption.frames import FIELDS, HEADER_BYTES, DataKey
from falaj.ports.blobs import BlobKey

if TYPE_CHECKING:
    from conftest import S3Server

MIB = 1 << 20
KEY = BlobKey("models/churn/weights.bin")
LARGE = [bytes([number]) * MIB for number in range(34)]


class Keyring:
    """A key for each workspace and version."""

    newest = 2

    def current(self, workspace: str) -> DataKey:
        return DataKey(self.newest, self.version(workspace, self.newest))

    def version(self, workspace: str, version: int) -> bytes:
        return hashlib.sha256(f"{workspace} {version}".encode()).digest()


@pytest.fixture(params=["local", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStoreBlobs:
    if request.param == "local":
        return local_blobs(tmp_path)
    server: S3Server = request.getfixturevalue("s3_server")
    return s3_blobs(
        server.create_bucket(),
        region=server.region,
        endpoint=server.endpoint,
        access_key_id=server.access_key_id,
        secret_access_key=server.secret_access_key,
    )


@pytest.fixture
def encrypted(store: ObjectStoreBlobs) -> EncryptedBlobs:
    return EncryptedBlobs(store, Keyring())


@pytest.mark.parametrize("chunks", [[], [b"plain words"], LARGE], ids=["empty", "small", "large"])
def test_written_bytes_are_read_back(
    encrypted: EncryptedBlobs, store: ObjectStoreBlobs, chunks: list[bytes]
) -> None:
    plain = b"".join(chunks)

    encrypted.write("w", KEY, iter(chunks))

    assert encrypted.size(KEY) == len(plain)
    assert b"".join(encrypted.read("w", KEY)) == plain
    assert not plain or plain[:11] not in b"".join(store.read(KEY))


def test_a_range_is_a_slice(encrypted: EncryptedBlobs) -> None:
    encrypted.write("w", KEY, iter(LARGE))

    found = b"".join(encrypted.read("w", KEY, start=5 * MIB - 3, length=7 * MIB))

    assert found == b"".join(LARGE)[5 * MIB - 3 : 12 * MIB - 3]


@pytest.mark.slow
def test_a_large_blob_is_reencrypted_while_it_is_read(encrypted: EncryptedBlobs) -> None:
    encrypted.write("w", KEY, iter(LARGE))

    encrypted.write("v", BlobKey("again"), encrypted.read("w", KEY))

    assert b"".join(encrypted.read("v", BlobKey("again"))) == b"".join(LARGE)


def test_blobs_encrypted_before_a_rotation_are_readable_after_it(
    encrypted: EncryptedBlobs, store: ObjectStoreBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    encrypted.write("w", KEY, [b"secret"])

    monkeypatch.setattr(Keyring, "newest", 3)
    encrypted.write("w", BlobKey("next"), [b"secret"])

    assert b"".join(encrypted.read("w", KEY)) == b"secret"
    assert [key_version(store, key) for key in (KEY, BlobKey("next"))] == [2, 3]


def key_version(store: ObjectStoreBlobs, key: BlobKey) -> int:
    header = b"".join(store.read(key, length=HEADER_BYTES))
    return int(FIELDS.unpack(header[: FIELDS.size])[2])


def test_a_reader_may_stop_early(encrypted: EncryptedBlobs) -> None:
    encrypted.write("w", KEY, iter(LARGE))

    assert next(encrypted.read("w", KEY))[:5] == bytes(5)


def test_chunks_that_raise_leave_nothing(encrypted: EncryptedBlobs) -> None:
    def failing() -> Iterator[bytes]:
        yield from LARGE[:9]
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        encrypted.write("w", KEY, failing())

    assert list(encrypted.list()) == []


def test_another_workspace_cannot_read(encrypted: EncryptedBlobs) -> None:
    encrypted.write("w", KEY, [b"secret"])

    with pytest.raises(Damaged):
        b"".join(encrypted.read("v", KEY))


def test_a_blob_moved_to_another_key_is_damaged(encrypted: EncryptedBlobs, store: ObjectStoreBlobs) -> None:
    encrypted.write("w", KEY, [b"secret"])
    store.write(BlobKey("other"), store.read(KEY))

    with pytest.raises(Damaged, match="frame 0"):
        b"".join(encrypted.read("w", BlobKey("other")))


def test_a_missing_blob_is_not_found_before_the_first_byte(encrypted: EncryptedBlobs) -> None:
    with pytest.raises(NotFound):
        encrypted.read("w", KEY)
