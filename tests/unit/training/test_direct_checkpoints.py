"""Checkpoint parts that a worker encrypts and uploads straight to the object store: recorded only if they are right."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import httpx
import obstore
import pytest
from obstore.store import S3Store

from agent_harness import agent_of
from falaj.drivers.objectstore.publisher import STAGING
from falaj.records.training.jobs import Job
from falaj.training.runtime.agent.protocol import SocketAgent
from falaj.training.runtime.checkpointing.storage import direct
from falaj.training.runtime.checkpointing.storage.remote import RemoteCheckpoints
from falaj.training.runtime.checkpointing.storage.store import Retention, SaveId
from falaj.training.runtime.errors import CheckpointFailed
from job_harness import JobHarness
from platforms import make_platform

if TYPE_CHECKING:
    from conftest import S3Server

FIRST = SaveId(5, "a" * 32)
NAMED = {"step": FIRST.step, "save": FIRST.save, "number": 0}
PART = [bytes(range(256)) * 5000, b"and a second piece" * 90_000]
"""More than two frames."""
WHOLE = b"".join(PART)
SHA256 = hashlib.sha256(WHOLE).hexdigest()


class Testbed:
    """The agent of an attempt, whose checkpoints lie in a bucket."""

    __test__ = False

    def __init__(self, harness: JobHarness, agent: SocketAgent, bucket: S3Store, job: Job) -> None:
        self.harness, self.agent, self.bucket, self.job = harness, agent, bucket, job
        self.store = RemoteCheckpoints(agent, is_shared=True, is_remote=True)

    def grant(self, size: int = len(WHOLE), **named: Any) -> dict[str, Any]:
        found, _ = self.agent.call("grant_part", size=size, **(NAMED | named))
        return dict(found)

    def confirm(self, blob: str, sha256: str = SHA256, **named: Any) -> None:
        self.agent.call("confirm_part", blob=blob, sha256=sha256, **(NAMED | named))

    def commit(self) -> None:
        self.store.commit(FIRST, [len(WHOLE)], b"{}", Retention(3, None))

    def stored(self) -> list[str]:
        return sorted(found["path"] for batch in obstore.list(self.bucket) for found in batch)


@pytest.fixture
def testbed(tmp_path: Path, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Testbed]:
    monkeypatch.setenv("FALAJ_TEST_S3", "test")
    name = s3_server.create_bucket()
    toml = f"""
[zones.local]
jurisdiction = "AE"
[zones.local.blobs]
driver = "s3"
bucket = "{name}"
prefix = "team"
endpoint = "{s3_server.endpoint}"
access_key = "env:FALAJ_TEST_S3"
secret_key = "env:FALAJ_TEST_S3"
"""
    bucket = S3Store(
        name,
        config={
            "endpoint": s3_server.endpoint,
            "region": s3_server.region,
            "access_key_id": "test",
            "secret_access_key": "test",
        },
        client_options={"allow_http": True},
    )
    with make_platform(tmp_path / "home", toml=toml) as platform:
        harness = JobHarness(platform, tmp_path)
        job = harness.begin(harness.submit())
        with agent_of(harness, job, tmp_path / "attempt", is_store_open=True) as path:
            agent = SocketAgent.connect(str(path))
            yield Testbed(harness, agent, bucket, job)
            agent.close()


def staged(testbed: Testbed) -> list[str]:
    return [key for key in testbed.stored() if STAGING in key]


def test_a_part_goes_straight_to_the_store_and_is_read_as_any_other(
    testbed: Testbed, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    before, calls = len(testbed.stored()), list[str]()
    plain, grants = testbed.agent.call, list[dict[str, Any]]()

    def call(name: str, body: Any = (), **values: Any) -> Any:
        calls.append(name)
        answer = plain(name, body, **values)
        grants.extend([answer[0]] if name == "grant_part" else [])
        return answer

    with mock.patch.object(testbed.agent, "call", call):
        testbed.store.save_part(FIRST, 0, PART)
    testbed.commit()

    assert calls == ["grant_part", "confirm_part"]
    assert bytes(testbed.store.load_part(5, 0, offset=0, length=len(WHOLE))) == WHOLE
    assert bytes(testbed.store.load_part(5, 0, offset=1_048_550, length=20)) == WHOLE[1_048_550:1_048_570]
    (part,) = testbed.harness.jobs.checkpoints(testbed.job.id)[0].parts
    blob = testbed.harness.platform.blobs.show(part.blob)
    assert (blob.id, blob.size_bytes, blob.sha256) == (grants[0]["blob"], len(WHOLE), SHA256)
    assert len(testbed.stored()) == before + 2  # the part and the manifest
    for key in testbed.stored():
        assert WHOLE[:64] not in bytes(obstore.get(testbed.bucket, key).bytes())
    said = capfd.readouterr()
    assert grants[0]["key"] not in said.out + said.err + caplog.text


def other_bytes(grant: dict[str, Any]) -> None:
    direct.upload([bytes(len(WHOLE))], grant)


def another_size(grant: dict[str, Any]) -> None:
    direct.upload([*PART, b"more"], grant)


def cut_short(grant: dict[str, Any]) -> None:
    sealed = b"".join(direct.sealed(PART, grant, hashlib.sha256()))
    httpx.put(grant["url"], content=sealed[: 1 << 20]).raise_for_status()


def not_encrypted(grant: dict[str, Any]) -> None:
    httpx.put(grant["url"], content=WHOLE).raise_for_status()


def nothing(_grant: dict[str, Any]) -> None:
    pass


@pytest.mark.parametrize("lie", [other_bytes, another_size, cut_short, not_encrypted, nothing])
def test_a_worker_that_lies_is_found_out_and_leaves_nothing(
    testbed: Testbed, lie: Callable[[dict[str, Any]], None]
) -> None:
    before = testbed.stored()
    grant = testbed.grant()
    lie(grant)

    with pytest.raises(CheckpointFailed, match="the store has not what was announced"):
        testbed.confirm(grant["blob"])

    assert testbed.stored() == before
    with pytest.raises(CheckpointFailed, match="send it again"):
        testbed.confirm(grant["blob"])


def test_an_address_is_for_one_part_and_changes_nothing_once_it_was_taken(testbed: Testbed) -> None:
    other = SaveId(6, "b" * 32)
    mine, theirs = testbed.grant(), testbed.grant(step=other.step, save=other.save)
    with pytest.raises(CheckpointFailed, match="send it again"):
        testbed.confirm(theirs["blob"])
    direct.upload(PART, mine | {"url": theirs["url"]})  # at the address of another part
    with pytest.raises(CheckpointFailed):
        testbed.confirm(theirs["blob"], step=other.step, save=other.save)
    with pytest.raises(CheckpointFailed):
        testbed.confirm(mine["blob"])

    again = testbed.grant()
    direct.upload(PART, again)
    testbed.confirm(again["blob"])
    testbed.confirm(again["blob"])  # its answer was lost
    testbed.commit()
    direct.upload([bytes(len(WHOLE))], again)  # the address is used once more

    assert bytes(testbed.store.load_part(5, 0, offset=0, length=len(WHOLE))) == WHOLE
    testbed.harness.platform.clock.advance(timedelta(days=3))
    testbed.harness.platform.blobs.cleanup()
    assert staged(testbed) == []
    assert bytes(testbed.store.load_part(5, 0, offset=0, length=len(WHOLE))) == WHOLE


def test_a_controller_that_was_killed_knows_no_uploads_and_the_part_comes_again(
    testbed: Testbed, tmp_path: Path
) -> None:
    grant = testbed.grant()
    direct.upload(PART, grant)

    with agent_of(testbed.harness, testbed.job, tmp_path / "again", is_store_open=True) as path:
        agent = SocketAgent.connect(str(path))
        with pytest.raises(CheckpointFailed, match="send it again"):
            agent.call("confirm_part", blob=grant["blob"], sha256=SHA256, **NAMED)
        store = RemoteCheckpoints(agent, is_shared=True, is_remote=True)
        store.save_part(FIRST, 0, PART)
        store.commit(FIRST, [len(WHOLE)], b"{}", Retention(3, None))
        assert bytes(store.load_part(5, 0, offset=0, length=len(WHOLE))) == WHOLE
        agent.close()
    assert len(staged(testbed)) == 1
    testbed.harness.platform.clock.advance(timedelta(days=3))
    testbed.harness.platform.blobs.cleanup()
    assert staged(testbed) == []


def test_where_the_store_is_not_reached_parts_go_through_the_platform(
    testbed: Testbed, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # nobody listens there
        away = f"http://127.0.0.1:{closed.getsockname()[1]}/x"
        plain, calls = testbed.agent.call, list[str]()

        def call(name: str, body: Any = (), **values: Any) -> Any:
            calls.append(name)
            found, data = plain(name, body, **values)
            return (found | {"url": away} if name == "grant_part" else found), data

        with mock.patch.object(testbed.agent, "call", call):
            testbed.store.save_part(FIRST, 0, PART)
            testbed.store.save_part(FIRST, 0, PART)  # it is not tried again
    testbed.commit()

    assert calls == ["grant_part", "save_part", "save_part"]
    assert "a part goes through the platform" in capfd.readouterr().err
    assert bytes(testbed.store.load_part(5, 0, offset=0, length=len(WHOLE))) == WHOLE
    assert staged(testbed) == []


def test_a_local_folder_or_a_closed_store_takes_no_uploads(light_harness: JobHarness, tmp_path: Path) -> None:
    job = light_harness.begin(light_harness.submit())
    for is_store_open in (True, False):
        with agent_of(light_harness, job, tmp_path / "attempt", is_store_open=is_store_open) as path:
            agent = SocketAgent.connect(str(path))
            assert agent.call("grant_part", size=1 << 21, **NAMED)[0] is None
            agent.close()


def test_an_image_without_cryptography_sends_parts_through_the_platform() -> None:
    with mock.patch.dict("sys.modules", {"cryptography.hazmat.primitives.ciphers.aead": None}):
        assert not direct.can_seal()
    assert direct.can_seal()
