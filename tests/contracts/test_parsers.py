"""What every ParserPool keeps to: a parser that crashes, hangs or eats ends alone, and sees nothing of the platform."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from falaj.drivers.parsing import pool as pool_module
from falaj.drivers.parsing.pool import ParserLimits, ProcessParserPool
from falaj.drivers.sandbox import sandbox_for
from falaj.errors import Damaged, Internal, InvalidInput, TooLarge, Unavailable
from falaj.governance.isolation import fault_of
from falaj.ports.parsers import ByteSource, ParserPool
from polling import PATIENCE_S, eventually, let_pass
from sandbox_testbed import machine

FOLDER = Path(__file__).parents[1]
NAMES = (
    "echo",
    "shout",
    "crash",
    "hang",
    "fill_memory",
    "write_file",
    "refuse",
    "stumble",
    "pretend",
    "kill_parent",
    "remember",
    "look_around",
    "read_wildly",
)
LIMITS = ParserLimits(memory_bytes=512 << 20, seconds=2, calls=4, wait_s=20)


def open_pool(mechanism: str, **more: object) -> ProcessParserPool:
    facts = machine("bubblewrap")  # those of this Python
    if mechanism != "same-uid" and (fault := fault_of(mechanism, facts)) is not None:
        pytest.skip(f"the {mechanism} sandbox: {fault.given}")
    parsers = {name: f"misbehaving_parsers:{name}" for name in NAMES}
    return ProcessParserPool(
        parsers,
        sandboxes=lambda: [sandbox_for(mechanism, facts)],
        folders=[FOLDER],
        **{"limits": LIMITS, **more},
    )


@pytest.fixture(scope="module", params=["bubblewrap", "landlock", "same-uid"])
def pool(request: pytest.FixtureRequest) -> Iterator[ParserPool]:
    made = open_pool(request.param)
    yield made
    made.close()


def source(data: bytes) -> ByteSource:
    return ByteSource(len(data), lambda offset, length: data[offset : offset + length])


def works(pool: ParserPool) -> bool:
    return pool.parse("echo", [source(b"abc")], owner="test").content == b"abc"


def test_a_parser_gets_sources_and_options(pool: ParserPool) -> None:
    large = os.urandom(40 << 20)

    parsed = pool.parse(
        "echo",
        [source(b"abc"), source(large), source(b"")],
        {"n": 1, "t": "é"},
        owner="test",
        reserve=lambda size_bytes: None,
    )

    assert parsed.facts == {"options": {"n": 1, "t": "é"}}
    assert parsed.content == b"abc" + large


def test_content_that_nobody_reserved_memory_for_is_refused(pool: ParserPool) -> None:
    with pytest.raises(InvalidInput, match="content is not valid"):
        pool.parse("fill_memory", [], {"size_bytes": 5 << 20}, owner="test")

    assert works(pool)


def test_what_a_parser_prints_does_not_hold_it_up(pool: ParserPool) -> None:
    assert pool.parse("shout", owner="test").facts == {"said": True}


def test_a_refusal_arrives_as_it_was_raised(pool: ParserPool) -> None:
    with pytest.raises(InvalidInput) as refused:
        pool.parse("refuse", owner="test")

    assert refused.value.faults[0].allowed == "sense"


def test_a_parser_cannot_raise_what_only_the_platform_may(pool: ParserPool) -> None:
    with pytest.raises(Internal):
        pool.parse("pretend", owner="test")


def test_a_crash_is_the_fault_of_the_content(pool: ParserPool) -> None:
    with pytest.raises(InvalidInput, match="content is not valid"):
        pool.parse("crash", owner="test")

    assert works(pool)


def test_what_a_parser_did_not_expect_is_the_fault_of_the_content(pool: ParserPool) -> None:
    with pytest.raises(InvalidInput, match="content is not valid"):
        pool.parse("stumble", owner="test")

    assert works(pool)


def test_options_that_are_too_large_are_refused_and_end_nothing(pool: ParserPool) -> None:
    started, go_on = threading.Event(), threading.Event()
    found: list[bytes] = []

    def wait(offset: int, length: int) -> bytes:
        started.set()
        go_on.wait(PATIENCE_S)
        return b"abc"

    other = threading.Thread(
        target=lambda: found.append(pool.parse("echo", [ByteSource(3, wait)], owner="other").content)
    )
    other.start()
    started.wait(PATIENCE_S)

    with pytest.raises(TooLarge, match="exceeds"):
        pool.parse("echo", [], {"sql": "x" * (5 << 20)}, owner="test")

    go_on.set()
    other.join()
    assert found == [b"abc"]


@pytest.mark.slow
@pytest.mark.parametrize("stubborn", [False, True], ids=["asleep", "without its alarm"])
def test_a_parser_that_hangs_is_stopped(pool: ParserPool, stubborn: bool) -> None:
    with pytest.raises(InvalidInput):
        pool.parse("hang", [], {"stubborn": stubborn}, owner="test")

    assert works(pool)


def test_memory_is_limited(pool: ParserPool) -> None:
    with pytest.raises(TooLarge, match="512 MiB"):
        pool.parse("fill_memory", [], {"size_bytes": 1 << 30}, owner="test")

    assert works(pool)


def test_the_caller_limits_the_result(pool: ParserPool) -> None:
    def reserve(size_bytes: int) -> None:
        raise TooLarge(f"{size_bytes} bytes")

    with pytest.raises(TooLarge, match="1048576 bytes"):
        pool.parse("fill_memory", [], {"size_bytes": 1 << 20}, reserve=reserve, owner="test")

    assert works(pool)


def test_a_parser_writes_no_files(pool: ParserPool) -> None:
    with pytest.raises((InvalidInput, Internal)):
        pool.parse("write_file", owner="test")

    written = Path("/tmp/written-by-a-parser")
    assert not written.exists() or written.stat().st_size == 0


def test_one_call_leaves_nothing_to_the_next(pool: ParserPool) -> None:
    assert [pool.parse("remember", owner="test").facts["count"] for _ in range(3)] == [1, 1, 1]


def test_a_process_that_was_killed_is_replaced(pool: ParserPool) -> None:
    with pytest.raises((InvalidInput, Unavailable)):
        pool.parse("kill_parent", owner="test")

    assert works(pool)


@pytest.mark.parametrize(
    "asked", [[1, 0, 1], [-1, 0, 1], [0, -1, 1], [0, 9, 1], [0, 0, 1 << 40], "x", [0, 0]]
)
def test_a_parser_reads_its_own_sources_only(pool: ParserPool, asked: object) -> None:
    with pytest.raises(InvalidInput):
        pool.parse("read_wildly", [source(b"abc")], {"asked": asked}, owner="test")

    assert works(pool)


def test_an_error_of_a_source_is_the_platforms_own(pool: ParserPool) -> None:
    def damaged(offset: int, length: int) -> bytes:
        raise Damaged("the blob was changed")

    with pytest.raises(Damaged):
        pool.parse("echo", [ByteSource(3, damaged)], owner="test")

    assert works(pool)


def test_calls_run_beside_each_other_and_wait_for_their_turn(pool: ParserPool) -> None:
    done: list[bool] = []
    threads = [threading.Thread(target=lambda: done.append(works(pool))) for _ in range(8)]

    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert done == [True] * 8


@pytest.mark.parametrize("mechanism", ["bubblewrap", "landlock"])
def test_a_parser_sees_nothing_of_the_platform(
    mechanism: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FALAJ_TOKEN", "secret")
    secret = tmp_path / "key.json"
    secret.write_text("secret")
    pool = open_pool(mechanism, hidden=[tmp_path])
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            options = {"secret": str(secret), "port": server.getsockname()[1]}
            seen = pool.parse("look_around", [], options, owner="test").facts
    finally:
        pool.close()

    assert "FALAJ_TOKEN" not in seen["environment"]
    assert not seen["secret"]
    assert not seen["parent_memory"]
    assert not seen["network"]
    assert [each.partition(":")[0] for each in seen["descriptors"]] == ["socket"]  # of this call


def test_without_a_sandbox_there_is_still_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FALAJ_TOKEN", "secret")
    pool = open_pool("same-uid")
    try:
        seen = pool.parse("look_around", [], {"secret": "/nothing", "port": 1}, owner="test").facts
    finally:
        pool.close()

    assert "FALAJ_TOKEN" not in seen["environment"]


def test_the_next_sandbox_is_tried_where_one_does_not_start() -> None:
    class Refusing:
        name, gaps = "refusing", ()

        def start(self, code: object, *, stdout: int, stderr: int) -> None:
            raise OSError("not here")

    facts = machine("bubblewrap")
    pool = ProcessParserPool(
        {"echo": "misbehaving_parsers:echo"},
        sandboxes=lambda: [Refusing(), sandbox_for("same-uid", facts)],  # type: ignore[list-item]
        folders=[FOLDER],
    )
    try:
        assert pool.isolation == "same-uid"
        assert works(pool)
    finally:
        pool.close()


def test_one_owner_leaves_turns_to_others() -> None:
    limits = ParserLimits(memory_bytes=512 << 20, seconds=int(PATIENCE_S), calls=2, wait_s=0.5)
    pool = open_pool("same-uid", limits=limits)
    started, goes_on = threading.Event(), threading.Event()

    def wait(offset: int, length: int) -> bytes:
        started.set()
        goes_on.wait(PATIENCE_S)
        return b"abc"

    slow = threading.Thread(target=lambda: pool.parse("echo", [ByteSource(3, wait)], owner="one"))
    slow.start()
    started.wait(PATIENCE_S)
    try:
        with pytest.raises(Unavailable, match="busy"):
            pool.parse("echo", owner="one")
        assert pool.parse("echo", [source(b"x")], owner="other").content == b"x"
    finally:
        goes_on.set()
        slow.join()
        pool.close()


@pytest.mark.slow
def test_a_slow_source_ends_its_own_call_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "GRACE_S", 0.5)
    pool = open_pool("same-uid", limits=ParserLimits(memory_bytes=512 << 20, seconds=1, calls=4, wait_s=20))

    def process() -> int:
        assert pool._worker is not None
        return pool._worker.process.pid

    def slow(offset: int, length: int) -> bytes:
        eventually(lambda: len(parser_processes(process())) <= 1)  # the child has gone
        let_pass(1)  # and the time is over
        return b"abc"

    try:
        assert works(pool)
        before = process()
        with pytest.raises(InvalidInput):
            pool.parse("echo", [ByteSource(3, slow)], owner="test")

        assert process() == before
    finally:
        pool.close()


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", ["bubblewrap", "landlock", "same-uid"])
def test_nothing_outlives_a_platform_that_was_killed(mechanism: str) -> None:
    program = f"""
import sys, time
sys.path[:0] = {[str(FOLDER), str(FOLDER / "contracts")]!r}
from test_parsers import open_pool
pool = open_pool({mechanism!r})
print(pool.isolation, flush=True)
pool.parse("hang", [], {{"stubborn": True}}, owner="test")
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as platform:
        assert platform.stdout is not None
        if not platform.stdout.readline():
            pytest.skip(f"the {mechanism} sandbox does not work here")
        eventually(lambda: len(parser_processes(platform.pid)) >= 2)
        started = parser_processes(platform.pid)
        platform.kill()

    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in started))


def parser_processes(platform: int) -> set[int]:
    """The parser process below `platform`, and its children."""
    parents = {}
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):
            fields = dict(line.split(":\t", 1) for line in status.read_text().splitlines() if ":\t" in line)
            parents[int(fields["Pid"])] = int(fields["PPid"])
    below = {platform}
    while found := {pid for pid, parent in parents.items() if parent in below and pid not in below}:
        below |= found
    return {pid for pid in below if b"falaj.drivers.parsing.worker" in command_line(pid)}


def command_line(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def test_a_closed_pool_starts_nothing() -> None:
    pool = open_pool("same-uid")
    pool.close()

    with pytest.raises(Unavailable, match="closed"):
        pool.parse("echo", owner="test")


def test_where_nothing_starts_the_call_is_refused() -> None:
    pool = ProcessParserPool({}, sandboxes=list)
    with pytest.raises(Unavailable):
        pool.parse("echo", owner="test")
    pool.close()
