"""What the workers of an attempt fetch and report, on the platform's disk."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from falaj.drivers.kubernetes.remote_attempt import RemoteAttempt
from falaj.errors import Conflict, InvalidInput, NotFound, TooLarge

RESULT = {
    "exit_code": 0,
    "signal": None,
    "reason": None,
    "started_at": 1.0,
    "ended_at": 2.0,
    "stopped": False,
}


@pytest.fixture
def attempt(tmp_path: Path) -> RemoteAttempt:
    directory = tmp_path / "job"
    for part in ("code/pkg", "inputs", "outputs"):
        (directory / part).mkdir(parents=True)
    (directory / "code" / "train.py").write_text("print(1)")
    (directory / "code" / "pkg" / "x.py").write_text("")
    (directory / "code" / "link").symlink_to("/etc/passwd")
    made = RemoteAttempt(tmp_path / "state", lambda: 12.5)
    launch = {"nodes": 2, "grace_s": 3.0, "disk_bytes": 1000}
    made.prepare(launch, directory, objects="job", namespace="falaj-default", deciding=[0, 1])
    return made


def output(
    attempt: RemoteAttempt, path: str, data: bytes, *, node: int = 0, sha256: str | None = None
) -> None:
    sha256 = sha256 or hashlib.sha256(data).hexdigest()
    attempt.save_output(node, f"pod-{node}", path, size=len(data), sha256=sha256, body=iter([data]))


def test_of_two_nodes_that_send_one_file_at_once_that_of_the_first_node_is_kept(
    attempt: RemoteAttempt,
) -> None:
    for node in (0, 1):
        attempt.claim(node, f"pod-{node}")

    def slowly() -> Iterator[bytes]:
        yield b"of "
        output(attempt, "model.onnx", b"of node 0")
        yield b"node 1"

    digest = hashlib.sha256(b"of node 1").hexdigest()
    attempt.save_output(1, "pod-1", "model.onnx", size=9, sha256=digest, body=slowly())

    assert (attempt.directory / "outputs" / "model.onnx").read_bytes() == b"of node 0"
    assert not list(attempt.folder.glob("output.*"))


def test_a_node_is_claimed_by_one_pod_for_good(attempt: RemoteAttempt) -> None:
    attempt.claim(0, "pod-0")

    attempt.claim(0, "pod-0")
    with pytest.raises(Conflict, match="another pod"):
        attempt.claim(0, "pod-9")
    with pytest.raises(InvalidInput):
        attempt.claim(2, "pod-2")
    with pytest.raises(Conflict):
        attempt.end(0, "pod-9", RESULT)


def test_only_the_holder_of_a_node_says_which_packages_it_has(attempt: RemoteAttempt) -> None:
    attempt.claim(0, "pod-0")
    attempt.claim(1, "pod-1")

    attempt.save_packages(0, "pod-0", iter([b"x==1\n\xff"]))
    attempt.save_packages(1, "pod-1", iter([b"y==2\n"]))
    with pytest.raises(Conflict):
        attempt.save_packages(0, "pod-9", iter([b"z==3\n"]))

    assert attempt.image().packages == "x==1\n\ufffd"
    with pytest.raises(TooLarge):
        attempt.save_packages(0, "pod-0", iter([b"x" * (1 << 20)] * 5))


def test_of_a_claim_and_a_verdict_one_succeeds(attempt: RemoteAttempt) -> None:
    assert attempt.close({"phase": "ended"}, unless_claimed=True)

    with pytest.raises(Conflict, match="over"):
        attempt.claim(0, "pod-0")


def test_a_claimed_attempt_is_not_closed_as_unclaimed(attempt: RemoteAttempt) -> None:
    attempt.claim(0, "pod-0")

    assert not attempt.close({"phase": "ended"}, unless_claimed=True)


def test_files_are_listed_with_their_hashes_and_read_from_any_offset(attempt: RemoteAttempt) -> None:
    listed = {each["path"]: each for each in json.loads(attempt.files())}

    assert set(listed) == {"code/train.py", "code/pkg/x.py"}
    assert listed["code/train.py"]["sha256"] == hashlib.sha256(b"print(1)").hexdigest()
    size, pieces = attempt.read_file("code/train.py", offset=6, length=100)
    assert (size, b"".join(pieces)) == (2, b"1)")
    for path in ("../state/launch.json", "/etc/passwd", "code/link", "code/none"):
        with pytest.raises(NotFound):
            attempt.read_file(path, offset=0, length=1)


def test_the_list_of_files_is_read_once_however_many_are_fetched(
    attempt: RemoteAttempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = []
    listed = attempt.files()
    monkeypatch.setattr(RemoteAttempt, "files", lambda _: (reads.append(1), listed)[1])

    for _ in range(20):
        attempt.read_file("code/train.py", offset=0, length=1)

    assert len(reads) == 1


def test_a_log_may_be_sent_twice_and_has_no_gaps(attempt: RemoteAttempt) -> None:
    for node in (0, 1):
        attempt.claim(node, f"pod-{node}")

    assert attempt.append_log(0, "pod-0", offset=0, body=iter([b"one\n"])) == 4
    assert attempt.append_log(1, "pod-1", offset=0, body=iter([b"other\n"])) == 6
    assert attempt.append_log(0, "pod-0", offset=0, body=iter([b"one\ntwo\n"])) == 8
    assert attempt.append_log(0, "pod-0", offset=4, body=iter([b"two\n"])) == 8

    with pytest.raises(InvalidInput):
        attempt.append_log(0, "pod-0", offset=99, body=iter([b"x"]))
    assert attempt.read_log(offset=0, limit=100) == b"one\nother\ntwo\n"
    assert attempt.read_log(offset=2, limit=5) == b"e\noth"


def test_a_log_that_exceeds_its_limit_is_cut_and_goes_on_being_accepted(attempt: RemoteAttempt) -> None:
    attempt.claim(0, "pod-0")
    small = replace(attempt, log_limit_bytes=6)

    sent = small.append_log(0, "pod-0", offset=0, body=iter([b"one\ntwo\n"]))
    sent = small.append_log(0, "pod-0", offset=sent, body=iter([b"three\n"]))

    assert sent == len(b"one\ntwo\nthree\n")
    assert small.read_log(offset=0, limit=100) == b"one\ntw"


def test_the_index_of_a_log_does_not_grow_with_its_pieces(attempt: RemoteAttempt) -> None:
    for node in (0, 1):
        attempt.claim(node, f"pod-{node}")
    for number in range(50):
        attempt.append_log(0, "pod-0", offset=2 * number, body=iter([b"a\n"]))
    attempt.append_log(1, "pod-1", offset=0, body=iter([b"b\n"]))
    attempt.append_log(0, "pod-0", offset=100, body=iter([b"c\n"]))

    assert (attempt.folder / "log.index").stat().st_size == 3 * 8
    assert attempt.read_log(offset=98, limit=100) == b"a\nb\nc\n"


@pytest.mark.parametrize("ahead_s", [-3600.0, 3600.0])
def test_a_worker_whose_clock_is_wrong_does_not_end_before_it_began(
    attempt: RemoteAttempt, ahead_s: float
) -> None:
    before = time.time()
    attempt.claim(0, "pod-0")
    now = time.time() + ahead_s

    attempt.end(0, "pod-0", RESULT | {"started_at": now, "ended_at": now + 5})

    ended = attempt.results()[0]
    assert before <= ended["started_at"] <= ended["ended_at"] <= time.time()


def test_a_log_whose_index_was_not_written_is_repaired(attempt: RemoteAttempt) -> None:
    attempt.claim(0, "pod-0")
    attempt.append_log(0, "pod-0", offset=0, body=iter([b"one\n"]))
    with open(attempt.folder / "log.0", "ab") as file:
        file.write(b"two\n")  # the controller was killed before it wrote the index

    attempt.append_log(0, "pod-0", offset=4, body=iter([b"two\nthree\n"]))

    assert attempt.read_log(offset=0, limit=100) == b"one\ntwo\nthree\n"


@pytest.mark.parametrize("path", ["../x", "/x", "a/../../x", "", "a//b", "a\\b", "x" * 501, ".", "a\0b"])
def test_an_output_stays_in_its_folder(attempt: RemoteAttempt, path: str) -> None:
    attempt.claim(0, "pod-0")

    with pytest.raises(InvalidInput):
        output(attempt, path, b"x")


def test_an_output_is_stored_whole_or_not_at_all(attempt: RemoteAttempt) -> None:
    for node in (0, 1):
        attempt.claim(node, f"pod-{node}")
    with pytest.raises(InvalidInput):
        output(attempt, "a.bin", b"x", sha256="0" * 64)
    with pytest.raises(TooLarge):
        output(attempt, "a.bin", b"x" * 3000)
    assert not list((attempt.directory / "outputs").iterdir())

    output(attempt, "sub/a.bin", b"first")
    output(attempt, "sub/a.bin", b"second", node=1)

    assert (attempt.directory / "outputs" / "sub" / "a.bin").read_bytes() == b"first"


def test_a_worker_is_told_how_long_it_may_go_on_and_when_to_stop(attempt: RemoteAttempt) -> None:
    for node in (0, 1):
        attempt.claim(node, f"pod-{node}")
    assert (attempt.renew(0, "pod-0").lease_s, attempt.renew(0, "pod-0").stop_grace_s) == (12.5, None)

    attempt.end(
        1, "pod-1", RESULT | {"exit_code": 7, "used": {"cpu_s": 1, "evil": "x"}, "reason": "x" * 5000}
    )

    assert attempt.renew(0, "pod-0").stop_grace_s == 3.0
    assert attempt.results()[1]["used"] == {"cpu_s": 1.0}
    attempt.request_stop(0.5)
    assert attempt.renew(0, "pod-0").stop_grace_s == 0.5


def test_the_first_result_of_a_node_counts(attempt: RemoteAttempt) -> None:
    attempt.claim(0, "pod-0")
    attempt.end(0, "pod-0", RESULT | {"exit_code": 3})

    attempt.end(0, "pod-0", RESULT)

    assert attempt.results()[0]["exit_code"] == 3


@pytest.mark.parametrize("lie", [1e300, float("nan"), float("inf"), -1.0, True, "2", None, [], 10**400])
def test_numbers_of_a_result_that_cannot_be_true_are_left_out(attempt: RemoteAttempt, lie: object) -> None:
    attempt.claim(0, "pod-0")

    attempt.end(0, "pod-0", RESULT | {"exit_code": lie, "ended_at": lie, "used": {"cpu_s": lie}})

    ended = attempt.results()[0]
    assert (ended["exit_code"], ended["used"]) == (None, {})
    assert ended["ended_at"] == ended["started_at"]


def test_a_usage_that_is_no_mapping_is_left_out(attempt: RemoteAttempt) -> None:
    attempt.claim(0, "pod-0")

    attempt.end(0, "pod-0", RESULT | {"used": [1]})

    assert attempt.results()[0]["used"] == {}
