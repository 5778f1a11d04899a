"""Streams over HTTP: complete, in ranges, failing in the middle, interrupted, and continued."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import httpx
import pytest
from sqlalchemy import update

from cutting_proxy import cutting_proxy
from falaj.control.tables import work as work_table
from falaj.errors import (
    Conflict,
    Internal,
    Interrupted,
    NotFound,
    ProcessFailed,
    Unauthenticated,
    Unavailable,
)
from falaj.governance import record_stream
from falaj.records.training.jobs import JobSpec
from falaj.records.tuning import StudySettings
from falaj.sdk.platform import Platform
from falaj.sdk.remote import connect, remote_service
from falaj.training import logs
from interfaces import ServedPlatform
from job_harness import archive
from polling import PATIENCE_S
from probe import SECRET, Note, Probe

MIB = 2**20
JOB = JobSpec(name="waits", script="train.py")
STUDY = StudySettings.model_validate(
    {
        "space": {"x": {"type": "float", "low": -2.0, "high": 2.0}},
        "trials": 6,
        "objectives": [{"metric": "auc", "direction": "maximize"}],
    }
)
DATA = bytes(n * 7 % 251 for n in range(100_000)) * 53  # a little over 5 MiB, with no two frames alike
PLACES = [
    (0, None),
    (0, 0),
    (0, 1),
    (1, 65536),
    (65535, 2),
    (4 * MIB - 1, 2),
    (len(DATA) - 1, None),
    (len(DATA), None),
    (len(DATA) - 5, 100),
    (3, len(DATA)),
]


@pytest.fixture(scope="module")
def platform(served: ServedPlatform) -> Platform:
    served.platform.put("data", DATA)
    served.platform.put("empty", b"")
    return served.platform


@pytest.fixture(scope="module")
def probe(platform: Platform) -> Any:
    """The probe service over HTTP."""
    return remote_service(Probe, platform.workspaces.gate)


# --------------------------------------------------------------------------------------------------- bytes


def test_bytes_come_back_as_they_were_sent(served_on_each: ServedPlatform) -> None:
    sent = served_on_each.platform.put("five-mib", DATA)

    assert sent.size_bytes == len(DATA)
    assert served_on_each.platform.get("five-mib") == DATA


def test_an_upload_may_come_in_any_chunks(served_on_each: ServedPlatform) -> None:
    pieces = [b"", DATA[:1], DATA[1:100_001], b"", DATA[100_001:]]

    staged = served_on_each.platform.blobs.upload(iter(pieces))

    assert served_on_each.platform.get(staged.id) == DATA


@pytest.mark.parametrize(("offset", "length"), PLACES)
def test_a_range_is_a_slice(platform: Platform, offset: int, length: int | None) -> None:
    read = b"".join(platform.blobs.read("data", offset=offset, length=length))

    assert read == (DATA[offset:] if length is None else DATA[offset : offset + length])


def test_an_empty_upload_is_a_blob(platform: Platform) -> None:
    assert platform.blobs.show("empty").size_bytes == 0
    assert list(platform.blobs.read("empty")) == []


def test_an_upload_that_breaks_off_stores_nothing(platform: Platform) -> None:
    def half() -> Iterator[bytes]:
        yield DATA
        raise RuntimeError("the disk was pulled out")

    before = len(platform.blobs.list().items)
    with pytest.raises(RuntimeError, match="pulled out"):
        platform.blobs.upload(half())

    assert len(platform.blobs.list().items) == before
    assert platform.get("data") == DATA  # and the client continues


# -------------------------------------------------------------------------------------- records and tables


def test_records_come_one_by_one(probe: Any) -> None:
    notes = list(probe.notes(count=500, text="x" * 50))

    assert notes == [Note(number=n, text="x" * 50) for n in range(500)]
    assert list(probe.notes(count=0)) == []


@pytest.mark.parametrize(
    "text", ["\u2028", "\x85", "a\x0bb\x0cc\x1dd", '{"problem":', "\n\r\n", "😀" * 40_000]
)
def test_a_record_may_hold_any_text(probe: Any, text: str) -> None:
    assert list(probe.notes(count=2, text=text)) == [Note(number=n, text=text) for n in range(2)]


def test_a_table_comes_in_batches(probe: Any) -> None:
    table = probe.table(count=5)

    assert table.schema.names == ["n"]
    assert table.read_all().column("n").to_pylist()[-1] == 10_003


def test_the_audit_log_is_a_table_and_an_export(served_on_each: ServedPlatform) -> None:
    platform = served_on_each.platform

    table = platform.audit.table().read_all()
    lines = list(platform.audit.export())

    entries = [line.entry for line in lines if line.entry]
    assert lines[0].falaj_audit == 1
    assert table.column("action").to_pylist() == [entry["action"] for entry in entries][: table.num_rows]
    assert table.column("at").to_pylist()[0].tzinfo is not None


# --------------------------------------------------------------------------------------- errors in the middle


@pytest.mark.parametrize("count", [0, 3, 200])
def test_an_error_among_records_arrives_with_its_type(probe: Any, count: int) -> None:
    with pytest.raises(Conflict) as caught:
        list(probe.notes(count=count, end="conflict"))

    assert caught.value.message == "the stream met a conflict"
    assert caught.value.details == {"at": "the end"}


def test_records_before_an_error_are_received(probe: Any) -> None:
    stream = probe.notes(count=3, end="conflict")

    assert [next(stream).number for _ in range(3)] == [0, 1, 2]
    with pytest.raises(Conflict):
        next(stream)


@pytest.mark.parametrize("count", [0, 3])
def test_a_crash_between_records_shows_no_internals(probe: Any, count: int) -> None:
    with pytest.raises(Internal) as caught:
        list(probe.notes(count=count, end="crash"))

    assert SECRET not in str(caught.value)


def test_an_error_before_the_first_byte_arrives_with_its_type(probe: Any) -> None:
    with pytest.raises(Conflict, match="the stream met a conflict"):
        list(probe.pieces(count=0, end="conflict"))


@pytest.mark.parametrize("end", ["conflict", "crash"])
def test_an_error_among_bytes_is_an_interruption(probe: Any, end: str) -> None:
    with pytest.raises(Interrupted):
        list(probe.pieces(count=3, end=end))


def test_an_error_among_batches_is_an_interruption(probe: Any) -> None:
    with pytest.raises(Interrupted):
        probe.table(count=3, end="crash").read_all()


def test_a_role_revoked_in_the_middle_ends_the_stream(served: ServedPlatform, platform: Platform) -> None:
    platform.users.create("reader")
    platform.workspaces.grant("default", "reader", role="viewer")
    platform.put("long", bytes(30 * MIB))
    reader = served.connect(served.issue(user="reader"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(served.parts.gate, "_recheck_s", 0.0)
        stream = reader.blobs.read("long")
        next(stream)
        platform.workspaces.revoke("default", "reader", role="viewer")

        with pytest.raises(NotFound):
            list(stream)


@pytest.mark.parametrize("stream", ["bytes", "records", "batches"])
def test_a_stream_ends_when_its_token_expires(
    served: ServedPlatform, platform: Platform, stream: str
) -> None:
    reader = served.connect(served.issue(expires_in=timedelta(minutes=1)))
    probe = remote_service(Probe, reader.workspaces.gate)
    begin = {
        "bytes": lambda: probe.pieces(count=500),
        "records": lambda: probe.notes(count=50_000, text="x" * 1000),
        "batches": lambda: probe.table(count=500),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(served.parts.gate, "_recheck_s", 0.0)
        pieces = iter(begin[stream]())
        next(pieces)
        served.clock.advance(timedelta(minutes=2))

        with pytest.raises(Unauthenticated if stream == "records" else Interrupted):
            list(pieces)
        with pytest.raises(Unauthenticated):
            reader.users.whoami()


def test_a_stream_continues_while_its_token_is_valid(served: ServedPlatform, platform: Platform) -> None:
    reader = served.connect(served.issue(expires_in=timedelta(minutes=3)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(served.parts.gate, "_recheck_s", 0.0)
        pieces = remote_service(Probe, reader.workspaces.gate).pieces(count=100)
        first = next(pieces)
        served.clock.advance(timedelta(minutes=2))

        rest = list(pieces)

    assert len(first) + sum(map(len, rest)) == 100 * 65536


# ------------------------------------------------------------------------------- a controller that keeps failing


@pytest.fixture
def failing(served: ServedPlatform, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What `falaj up` has published about processes that keep failing; the test changes it."""
    found: dict[str, str] = {}
    monkeypatch.setattr(served.parts.gate, "failing", lambda: found)
    for module in (record_stream, logs):
        monkeypatch.setattr(module, "HEARTBEAT_S", 0.0)
    return found


@pytest.mark.parametrize("stream", ["jobs.wait", "jobs.logs", "workflows.watch", "studies.watch"])
def test_whoever_waits_for_a_controller_that_keeps_failing_is_told(
    platform: Platform, failing: dict[str, str], stream: str
) -> None:
    changes = begin_waiting(platform)[stream]()

    failing["controller"] = "the controller keeps failing"

    with pytest.raises(ProcessFailed, match="the controller keeps failing"):
        list(changes)
    assert platform.platform.status().failing == failing


def test_another_process_that_keeps_failing_stops_no_waiting(
    platform: Platform, failing: dict[str, str]
) -> None:
    changes = iter(begin_waiting(platform)["jobs.wait"]())
    failing["console"] = "the console keeps failing"

    assert next(changes) == next(changes) == next(changes)


def test_what_has_ended_is_shown_while_the_controller_keeps_failing(
    platform: Platform, failing: dict[str, str]
) -> None:
    job = platform.jobs.submit(JOB, code=upload_code(platform)).id
    platform.jobs.cancel(job)
    failing["controller"] = "the controller keeps failing"

    assert [each.state for each in platform.jobs.wait(job)] == ["cancelled"]
    assert b"".join(platform.jobs.logs(job, follow=True)) == b""


def upload_code(platform: Platform) -> str:
    return str(platform.blobs.upload(iter([archive({"train.py": "print(1)"})])).id)


def begin_waiting(platform: Platform) -> dict[str, Any]:
    """Return the streams of a job, work and a study that no controller does."""
    job = platform.jobs.submit(JOB, code=upload_code(platform)).id
    copied = platform.blobs.copy("data", "local", name=f"copy-for-{job}").id
    study = platform.studies.create(
        f"study-for-{job}".replace("_", "-"), settings=STUDY, job=JOB, code=upload_code(platform)
    ).id
    return {
        "jobs.wait": lambda: platform.jobs.wait(job),
        "jobs.logs": lambda: platform.jobs.logs(job, follow=True),
        "workflows.watch": lambda: platform.workflows.watch(copied),
        "studies.watch": lambda: platform.studies.watch(study),
    }


# -------------------------------------------------------------------------------- interrupted connections


@pytest.mark.parametrize("cut", [1000, 500_000, 3_000_000])
def test_an_interrupted_read_continues_from_its_offset(
    served: ServedPlatform, platform: Platform, cut: int
) -> None:
    with cutting_proxy(served.url, [cut]) as proxy, connect(proxy.url, served.admin) as away:
        read = b"".join(away.blobs.read("data", offset=10, length=5_000_000))

        assert read == DATA[10:5_000_010]
        assert proxy.connections == 2
        assert b'"offset":10,' in proxy.sent
        assert proxy.sent.count(b'"offset":') == 2


def test_a_read_that_is_interrupted_repeatedly_is_abandoned(
    served: ServedPlatform, platform: Platform
) -> None:
    with cutting_proxy(served.url, [100_000] * 9) as proxy, connect(proxy.url, served.admin) as away:
        with pytest.raises(Interrupted):
            list(away.blobs.read("data"))

        assert proxy.connections == 3


def test_truncated_records_are_an_interruption(served: ServedPlatform, platform: Platform) -> None:
    with cutting_proxy(served.url, [20_000]) as proxy, connect(proxy.url, served.admin) as away:
        stream = remote_service(Probe, away.workspaces.gate).notes(count=1000, text="x" * 100)

        with pytest.raises(Interrupted):
            list(stream)


@pytest.mark.parametrize("cut", [0, 40])
def test_a_write_whose_answer_is_lost_is_sent_again_and_done_once(
    served_on_each: ServedPlatform, cut: int
) -> None:
    with cutting_proxy(served_on_each.url, [cut]) as proxy, connect(proxy.url, served_on_each.admin) as away:
        made = away.workspaces.create(f"lost-{cut}")

        keys = {
            line for line in bytes(proxy.sent).split(b"\r\n") if line.lower().startswith(b"idempotency-key")
        }
        assert proxy.connections == 2
        assert len(keys) == 1
    assert served_on_each.platform.workspaces.show(f"lost-{cut}") == made


def test_an_upload_whose_answer_is_lost_is_not_sent_again(served: ServedPlatform) -> None:
    with cutting_proxy(served.url, [0]) as proxy, connect(proxy.url, served.admin) as away:
        with pytest.raises(Unavailable):
            away.blobs.upload(iter([b"once"]))

        assert proxy.connections == 1


# ------------------------------------------------------------------------------------------- one connection


def test_a_client_keeps_its_connection(served: ServedPlatform, platform: Platform) -> None:
    with cutting_proxy(served.url, []) as proxy, connect(proxy.url, served.admin) as away:
        for number in range(5):
            away.put(f"kept-{number}", DATA[: number * 300_000])
            assert away.get(f"kept-{number}") == DATA[: number * 300_000]
            assert away.users.whoami().principal.kind == "user"
            assert list(away.lineage.graph(f"blob:kept-{number}"))
            away.audit.table().read_all()

        assert (
            proxy.connections <= 1 + 5
        )  # Arrow ends before its stream does: its connection is not used again


@pytest.mark.slow
def test_unread_streams_release_their_connections(served: ServedPlatform, platform: Platform) -> None:
    with connect(served.url, served.admin) as away:
        pool = away.workspaces.gate._client._transport._pool
        for read in (away.blobs.read, away.lineage.graph, away.audit.table):
            held = [read("blob:data") if read != away.audit.table else read() for _ in range(3)]
            assert len(pool.connections) >= 3
            del held
            gc.collect()

            assert [each for each in pool.connections if not each.is_idle()] == []


@pytest.mark.slow
def test_many_open_streams_do_not_block_the_api(served: ServedPlatform, platform: Platform) -> None:
    work = platform.blobs.copy("data", "local", name="copied")  # it stays pending: no controller runs here
    headers = {"Authorization": f"Bearer {served.admin}"}
    watch = httpx.Request("GET", f"{served.url}/api/v1/workflows/watch?work={work.id}", headers=headers)
    clients = [httpx.Client() for _ in range(41)]
    try:
        for client in clients:
            client.send(watch, stream=True)

        httpx.get(f"{served.url}/", timeout=PATIENCE_S)
    finally:
        for client in clients:
            client.close()
        end(served, work.id)


def end(served: ServedPlatform, work: str) -> None:
    """Let the watchers go."""
    with served.parts.database.write() as tx:
        tx.execute(update(work_table).where(work_table.c.id == work).values(state="cancelled"))
