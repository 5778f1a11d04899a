"""The BlobStore contract, on local files and on S3."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from falaj.drivers.objectstore import bucket_publisher
from falaj.drivers.objectstore.blobs import ObjectStoreBlobs, local_blobs, s3_blobs
from falaj.errors import AlreadyExists, InvalidInput, NotFound, Unavailable
from falaj.ports.blobs import BlobKey

if TYPE_CHECKING:
    from conftest import S3Server

MIB = 1 << 20
KEY = BlobKey("models/churn/weights.bin")
LARGE = [bytes([number]) * MIB for number in range(40)]  # larger than one request


@dataclass(frozen=True)
class Place:
    """A store, and the expression with which another process opens it."""

    store: ObjectStoreBlobs
    expression: str


@pytest.fixture(params=["local", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "local":
        directory = tmp_path / "blobs"
        return Place(local_blobs(directory), f"local_blobs(pathlib.Path({str(directory)!r}))")
    server: S3Server = request.getfixturevalue("s3_server")
    bucket = server.create_bucket()
    options = {
        "region": server.region,
        "endpoint": server.endpoint,
        "access_key_id": server.access_key_id,
        "secret_access_key": server.secret_access_key,
        "prefix": "some/prefix",
    }
    return Place(s3_blobs(bucket, **options), f"s3_blobs({bucket!r}, **{options!r})")


@pytest.fixture
def store(place: Place) -> ObjectStoreBlobs:
    return place.store


def content(store: ObjectStoreBlobs, key: BlobKey = KEY, **options: int) -> bytes:
    return b"".join(store.read(key, **options))


def failing(chunks: list[bytes], failure: Exception) -> Iterator[bytes]:
    yield from chunks
    raise failure


@pytest.mark.slow
def test_written_bytes_are_read_back(store: ObjectStoreBlobs) -> None:
    size = store.write(KEY, [b"one ", b"", b"two"])

    assert size == store.size(KEY) == 7
    assert content(store) == b"one two"


@pytest.mark.parametrize("chunks", [[], [b""]])
def test_an_empty_blob_is_a_blob(store: ObjectStoreBlobs, chunks: list[bytes]) -> None:
    store.write(KEY, chunks)

    assert store.size(KEY) == 0
    assert content(store) == b""


@pytest.mark.slow
def test_a_large_blob_is_read_in_chunks(store: ObjectStoreBlobs) -> None:
    store.write(KEY, iter(LARGE))

    chunks = list(store.read(KEY))

    assert b"".join(chunks) == b"".join(LARGE)
    assert max(map(len, chunks)) <= 8 * MIB
    assert content(store, start=3 * MIB - 1, length=30 * MIB) == b"".join(LARGE)[3 * MIB - 1 : 33 * MIB - 1]


@pytest.mark.parametrize(
    ("start", "length", "expected"),
    [(0, 3, b"012"), (4, 100, b"456789"), (9, 1, b"9"), (10, 5, b""), (99, 5, b""), (3, 0, b"")],
)
def test_a_range_is_a_slice(store: ObjectStoreBlobs, start: int, length: int, expected: bytes) -> None:
    store.write(KEY, [b"0123456789"])

    assert content(store, start=start, length=length) == expected


def test_a_range_without_a_length_goes_to_the_end(store: ObjectStoreBlobs) -> None:
    store.write(KEY, [b"0123456789"])

    assert content(store, start=7) == b"789"
    assert content(store, start=10) == b""


def test_a_blob_is_never_overwritten(store: ObjectStoreBlobs) -> None:
    store.write(KEY, [b"first"])

    with pytest.raises(AlreadyExists):
        store.write(KEY, [b"second"])

    assert content(store) == b"first"


def test_a_large_blob_does_not_overwrite_either(store: ObjectStoreBlobs) -> None:
    store.write(KEY, [b"first"])

    with pytest.raises(AlreadyExists):
        store.write(KEY, iter(LARGE))

    assert content(store) == b"first"


@pytest.mark.parametrize("chunks", [LARGE[:1], LARGE], ids=["small", "large"])
def test_the_first_of_two_writers_to_finish_wins(store: ObjectStoreBlobs, chunks: list[bytes]) -> None:
    def slowly() -> Iterator[bytes]:
        yield from chunks
        store.write(KEY, [b"the other was faster"])

    with pytest.raises(AlreadyExists):
        store.write(KEY, slowly())

    assert content(store) == b"the other was faster"
    assert leftovers(store) == 0


def test_one_of_eight_concurrent_writers_succeeds(tmp_path: Path) -> None:
    store = local_blobs(tmp_path)  # moto does not check and write atomically, as S3 does

    def write(number: int) -> int | None:
        try:
            store.write(KEY, [bytes([number]) * MIB])
        except AlreadyExists:
            return None
        return number

    with ThreadPoolExecutor(8) as threads:
        winners = [number for number in threads.map(write, range(8)) if number is not None]

    assert len(winners) == 1
    assert content(store) == bytes(winners) * MIB


@pytest.mark.slow
def test_a_large_blob_is_copied_from_the_store_to_itself(store: ObjectStoreBlobs) -> None:
    store.write(KEY, iter(LARGE))

    store.write(BlobKey("copy"), store.read(KEY))

    assert content(store, BlobKey("copy")) == b"".join(LARGE)


@pytest.mark.parametrize("failure", [RuntimeError("broken"), FileNotFoundError("broken"), NotFound("broken")])
@pytest.mark.parametrize("chunks", [LARGE[:1], LARGE], ids=["small", "large"])
def test_chunks_that_raise_leave_nothing(
    store: ObjectStoreBlobs, chunks: list[bytes], failure: Exception
) -> None:
    with pytest.raises(type(failure), match="broken"):
        store.write(KEY, failing(chunks, failure))

    assert list(store.list()) == []
    assert leftovers(store) == 0
    store.write(KEY, [b"again"])


def test_a_missing_blob_is_not_found(store: ObjectStoreBlobs) -> None:
    with pytest.raises(NotFound):
        store.size(KEY)
    with pytest.raises(NotFound):
        store.read(KEY)
    with pytest.raises(NotFound):
        store.read(KEY, start=5, length=0)


def test_a_deleted_blob_is_gone_and_its_key_free(store: ObjectStoreBlobs) -> None:
    store.write(KEY, [b"first"])

    store.delete(KEY)
    store.delete(KEY)

    with pytest.raises(NotFound):
        store.read(KEY)
    store.write(KEY, [b"second"])
    assert content(store) == b"second"


def test_a_prefix_is_any_beginning_of_a_key(store: ObjectStoreBlobs) -> None:
    keys = ["a/b/one", "a/b/two", "a/bc", "d=1/e@2+3/f-4_5.6"]
    for key in keys:
        store.write(BlobKey(key), [key.encode()])

    listed = {prefix: sorted(blob.key for blob in store.list(prefix)) for prefix in ("", "a/b", "a/b/", "x/")}

    assert listed == {"": keys, "a/b": keys[:3], "a/b/": keys[:2], "x/": []}
    assert {blob.size_bytes for blob in store.list("a/b/")} == {7}
    assert all(abs(datetime.now(UTC) - blob.modified_at) < timedelta(minutes=5) for blob in store.list())


@pytest.mark.parametrize(
    "key",
    [
        "",
        "/etc/passwd",
        "../up",
        "a/../b",
        "a/./b",
        "a//b",
        "a/",
        ".staging/x",
        "a\\b",
        "a\nb",
        "é",
        "x" * 256,
    ],
)
def test_a_key_that_escapes_the_store_is_refused(store: ObjectStoreBlobs, key: str) -> None:
    with pytest.raises(InvalidInput, match="blob key"):
        store.write(BlobKey(key), [b"x"])
    with pytest.raises(InvalidInput, match="blob key"):
        store.read(BlobKey(key))
    with pytest.raises(InvalidInput, match="blob key"):
        store.delete(BlobKey(key))


WRITER = """
import pathlib, sys
from falaj.drivers.objectstore.blobs import local_blobs, s3_blobs

def chunks():
    for number in range(64):
        if number == 48:
            print("under way", flush=True)
            {then}
        yield bytes([number]) * (1 << 20)

{store}.write({key!r}, chunks())
"""


@pytest.mark.parametrize("then", ["sys.stdin.read()", "pass"], ids=["waiting", "running"])
def test_a_killed_writer_leaves_a_complete_blob_or_none(place: Place, then: str) -> None:
    code = WRITER.format(store=place.expression, key=str(KEY), then=then)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"under way\n"
        writer.send_signal(signal.SIGKILL)

    listed = [blob.key for blob in place.store.list()]

    assert listed in ([], [KEY])
    if listed:
        assert content(place.store) == b"".join(bytes([number]) * MIB for number in range(64))
    else:
        assert place.store.write(KEY, [b"again"]) == 5
    leftovers(place.store)
    assert leftovers(place.store) == 0
    assert [blob.key for blob in place.store.list()] == [KEY]


def test_a_full_disk_is_unavailable_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = local_blobs(tmp_path)
    write = os.write

    def write_until_full(handle: int, data: memoryview) -> int:
        if os.fstat(handle).st_size > 5 * MIB:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(handle, data[: len(data) // 2 + 1])

    monkeypatch.setattr(os, "write", write_until_full)
    with pytest.raises(Unavailable, match="No space left"):
        store.write(KEY, iter(LARGE))
    monkeypatch.undo()

    assert list(store.list()) == []
    assert leftovers(store) == 0


def test_a_leftover_is_removed_once_it_is_old(tmp_path: Path) -> None:
    store = local_blobs(tmp_path)
    (tmp_path / ".staging" / "left").write_bytes(b"half")
    now = datetime.now(UTC)

    assert store.delete_incomplete(before=now - timedelta(hours=1)) == 0
    assert store.delete_incomplete(before=now + timedelta(hours=1)) == 1


def test_local_blobs_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    store = local_blobs(tmp_path / "blobs")
    store.write(KEY, [b"x"])

    found = {path.stat().st_mode & 0o777 for path in (tmp_path / "blobs").rglob("*")}

    assert found == {0o700, 0o600}


def test_an_upload_that_breaks_off_leaves_no_parts_in_the_bucket(s3_server: S3Server) -> None:
    bucket = s3_server.create_bucket()
    store = s3_on(s3_server, bucket)

    with pytest.raises(RuntimeError, match="broken"):
        store.write(KEY, failing(LARGE * 2, RuntimeError("broken")))

    assert "<Upload>" not in httpx.get(f"{s3_server.endpoint}/{bucket}?uploads").text


@pytest.mark.slow
def test_above_the_limit_of_a_copy_a_blob_is_sent_again(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_publisher, "COPY_LIMIT_BYTES", 35 * MIB)
    store = s3_on(s3_server, s3_server.create_bucket())

    store.write(KEY, iter(LARGE))

    assert content(store) == b"".join(LARGE)
    assert leftovers(store) == 0
    with pytest.raises(AlreadyExists):
        store.write(KEY, iter(LARGE))


def test_a_store_that_does_not_answer_is_unavailable() -> None:
    store = s3_blobs(
        "bucket",
        region="us-east-1",
        endpoint="http://127.0.0.1:9",
        access_key_id="test",
        secret_access_key="test",
    )

    with pytest.raises(Unavailable):
        store.write(KEY, [b"x"])


def test_a_missing_bucket_is_unavailable(s3_server: S3Server) -> None:
    store = s3_on(s3_server, "no-such-bucket")

    with pytest.raises(Unavailable, match="NoSuchBucket"):
        store.write(KEY, [b"x"])
    with pytest.raises(Unavailable, match="NoSuchBucket"):
        store.read(KEY)


def test_what_is_uploaded_to_an_address_is_adopted_once_and_out_of_reach(s3_server: S3Server) -> None:
    store = s3_on(s3_server, s3_server.create_bucket())
    address, unused = (store.open_upload(lasts=timedelta(minutes=1)) for _ in range(2))
    assert address is not None
    assert unused is not None
    httpx.put(address.url, content=b"one").raise_for_status()
    assert list(store.list()) == []

    store.adopt(address.staged, KEY)
    httpx.put(address.url, content=b"two").raise_for_status()

    assert content(store) == b"one"
    with pytest.raises(AlreadyExists):
        store.adopt(address.staged, KEY)
    with pytest.raises(NotFound):
        store.adopt(unused.staged, BlobKey("other"))
    assert store.delete_incomplete(before=datetime.now(UTC) + timedelta(minutes=1)) == 1


def test_a_folder_takes_no_uploads(tmp_path: Path) -> None:
    assert local_blobs(tmp_path).open_upload(lasts=timedelta(minutes=1)) is None


def s3_on(server: S3Server, bucket: str) -> ObjectStoreBlobs:
    return s3_blobs(
        bucket,
        region=server.region,
        endpoint=server.endpoint,
        access_key_id=server.access_key_id,
        secret_access_key=server.secret_access_key,
    )


def leftovers(store: ObjectStoreBlobs) -> int:
    """Return the number of leftovers, after removing them."""
    return store.delete_incomplete(before=datetime.now(UTC) + timedelta(days=1))
