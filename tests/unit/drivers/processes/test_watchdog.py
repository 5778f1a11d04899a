"""Checks of an attempt that need no process: secrets in the log, disk usage, heartbeats and task counts."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from falaj.drivers.processes.attempt_folder import AttemptFolder
from falaj.drivers.processes.diagnosis import heartbeats
from falaj.drivers.processes.diagnosis.heartbeats import HeartbeatMonitor
from falaj.drivers.processes.limits.disk_quota import DiskPressure, DiskQuota, UsageScan, publish_usage
from falaj.drivers.processes.limits.disk_usage import MAX_DEPTH, MAX_SHARES, DiskUsage, measure_usage
from falaj.drivers.processes.limits.tasks import TaskLimit, count_descendant_tasks
from falaj.drivers.processes.supervisor.attempt_log import AttemptLog
from falaj.drivers.processes.supervisor.secret_mask import SecretMask
from falaj.records.sizes import format_size
from falaj.training.runtime.agent import heartbeat

MIB = 1 << 20

# ------------------------------------------------------------------------------------------------ secrets


@given(
    secrets=st.lists(st.text("ab*", min_size=4, max_size=7), max_size=3),
    text=st.text("ab*\n", max_size=60),
    cuts=st.lists(st.integers(0, 60), max_size=8),
)
def test_secret_is_masked_across_chunk_boundaries(secrets: list[str], text: str, cuts: list[int]) -> None:
    data, mask = text.encode(), SecretMask(secrets)
    ends = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})

    pieces = [mask.add(data[a:b]) for a, b in pairwise(ends)]
    shown = b"".join([*pieces, mask.flush()])

    assert shown == SecretMask(secrets).hide(data)


def test_masking_time_is_bounded_for_adversarial_text() -> None:
    """Naive masking would take minutes for each MiB, and block the supervision of the attempt."""
    almost = "a" * 65_000
    mask = SecretMask([almost + "b", "other"])

    shown = mask.add(b"a" * MIB) + mask.add(b"b, and another") + mask.flush()

    assert shown == b"a" * (MIB - 65_000) + b"***, and an***"


def test_lines_of_a_key_are_masked_one_by_one_and_short_values_are_not() -> None:
    key = "-----BEGIN KEY-----\nMIIEvQIBADANBgkqhkiG\n9w0BAQEFAASC\n-----END KEY-----\n"
    mask = SecretMask([key, "no", ""])

    assert mask.hide(b"x MIIEvQIBADANBgkqhkiG y no") == b"x *** y no"


def test_log_and_tail_are_masked(tmp_path: Path) -> None:
    output = AttemptLog(tmp_path / "log", limit_bytes=100, mask=SecretMask(["s3cr3t"]))

    for chunk in (b"a s3c", b"r3t b s3", b"c"):
        output.add(chunk)
    output.close()

    assert (tmp_path / "log").read_bytes() == output.tail == b"a *** b s3c"


# --------------------------------------------------------------------------------------------------- disk


def test_folder_is_measured_without_following_links_and_counts_hard_links_once(tmp_path: Path) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "folder"
    outside.mkdir()
    (outside / "huge").write_bytes(os.urandom(4 * MIB))
    (folder / "outputs" / "deep" / "deeper").mkdir(parents=True)
    (folder / "outputs" / "deep" / "deeper" / "x").write_bytes(os.urandom(MIB))
    os.link(folder / "outputs" / "deep" / "deeper" / "x", folder / "again")
    (folder / "link").symlink_to(outside)
    with open(folder / "sparse", "wb") as file:
        file.truncate(100 * MIB)

    usage = measure_usage(folder)

    assert MIB <= usage.size_bytes < 2 * MIB
    assert usage.entries == 7
    assert not usage.is_too_deep


@pytest.mark.parametrize("mode", [0o000, 0o300, 0o400])
def test_a_folder_without_permissions_is_still_measured(tmp_path: Path, mode: int) -> None:
    """Without root, user code may have our own uid."""
    tmp_path.chmod(0o777)
    script = f"""
import os, sys
from pathlib import Path
from falaj.drivers.processes.limits.disk_usage import measure_usage
if os.geteuid() == 0:
    os.setgid(65534), os.setuid(65534)
hiding = Path("hiding")
hiding.mkdir()
(hiding / "big").write_bytes(bytes({MIB}))
hiding.chmod({mode})
print(measure_usage(Path(".")).size_bytes)
"""
    ran = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)

    assert int(ran.stdout or 0) >= MIB, ran.stderr


@pytest.mark.parametrize(
    ("files", "largest"),
    [
        ({"outputs/a/x": 4, "outputs/b": 1, "code/c": 1}, "outputs/a"),
        ({"outputs/a": 1, "outputs/b": 1, "outputs/c": 1, "code/d": 1}, "outputs"),
        ({"core": 3, "outputs/a": 1}, "core"),
    ],
)
def test_largest_entry_is_named_with_its_largest_child(
    tmp_path: Path, files: dict[str, int], largest: str
) -> None:
    for name, size in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(os.urandom(size * MIB))

    assert measure_usage(tmp_path).largest == largest


def test_number_of_recorded_shares_is_limited(tmp_path: Path) -> None:
    (tmp_path / "outputs").mkdir()
    for number in range(MAX_SHARES + 10):
        (tmp_path / "outputs" / str(number)).touch()

    usage = measure_usage(tmp_path)

    assert (usage.entries, len(usage.shares)) == (MAX_SHARES + 11, MAX_SHARES)


def test_too_deeply_nested_folders_exceed_the_quota(tmp_path: Path) -> None:
    here = os.getcwd()
    try:
        os.chdir(tmp_path)
        for _ in range(MAX_DEPTH + 5):
            os.mkdir("d")
            os.chdir("d")
    finally:
        os.chdir(here)

    assert DiskQuota(MIB).fault(measure_usage(tmp_path)) == (
        "its folders are nested too deep to be measured against its disk quota"
    )


def test_missing_folder_uses_no_disk(tmp_path: Path) -> None:
    assert measure_usage(tmp_path / "none").size_bytes == 0


def test_scan_continues_in_time_slices_and_pauses_after_it(tmp_path: Path) -> None:
    for number in range(300):
        (tmp_path / str(number)).touch()
    scan = UsageScan(tmp_path)

    assert completed(scan, now=10.0).entries == 300
    assert scan.advance(now=10.1) is None
    assert completed(scan, now=100.0).entries == 300


def completed(scan: UsageScan, *, now: float) -> DiskUsage:
    """Return the usage once the scan is complete, however many time slices that takes."""
    while (usage := scan.advance(now)) is None:
        pass
    return usage


def test_disk_pressure_stops_the_largest_living_attempt(tmp_path: Path) -> None:
    directory = tmp_path / "job"
    directory.mkdir()
    (directory / "x").write_bytes(os.urandom(65 * MIB))
    (tmp_path / "control" / "own").mkdir(parents=True)
    (tmp_path / "control" / "other").mkdir()
    own, other = AttemptFolder(tmp_path / "control" / "own"), AttemptFolder(tmp_path / "control" / "other")
    publish_usage(other.usage, 1 << 40)
    shortage = DiskPressure(own, directory, reserve_bytes=1 << 60)
    usage = measure_usage(directory)

    lock = other.acquire()
    faults = []
    for now in (0, 1, 2):
        shortage.check(now)
        faults.append(shortage.fault(usage))
    assert lock is not None
    os.close(lock)

    assert faults == [None, None, None]
    assert "it held most of all attempts here: 65 MiB, most of it in x" in (shortage.fault(usage) or "")


def test_volume_with_free_space_stops_no_attempt(tmp_path: Path) -> None:
    shortage = DiskPressure(AttemptFolder(tmp_path), tmp_path, reserve_bytes=0)

    shortage.check(0)

    assert not shortage.is_short


def test_sizes_are_for_people() -> None:
    assert [format_size(size) for size in (0, 1023, 1536, 256 * MIB, 1.2 * 1024 * MIB, 1 << 50)] == [
        "0 bytes",
        "1023 bytes",
        "1.5 KiB",
        "256 MiB",
        "1.2 GiB",
        "1024 TiB",
    ]


# --------------------------------------------------------------------------------------------- heartbeats


def test_rank_without_heartbeat_is_silent_whatever_is_printed() -> None:
    silence = HeartbeatMonitor(10, now=0)
    silence.check({"0": 1, "1": 1}, now=1)

    silence.check({"0": 2, "1": 1}, now=9)
    silence.record_output(10.9)

    assert silence.silent_ranks(10.9) is None
    assert silence.silent_ranks(11) == [1]


def test_clock_jump_is_not_taken_for_a_hang() -> None:
    silence = HeartbeatMonitor(10, now=0)
    silence.check({"0": 1_800_000_000}, now=1)

    silence.check({"0": 5}, now=9)  # the clock was set back by fifty years, and the rank beats

    assert silence.silent_ranks(18) is None
    assert silence.silent_ranks(19) == [0]


def test_clock_that_jumps_ahead_does_not_keep_a_dead_rank_alive() -> None:
    silence = HeartbeatMonitor(10, now=0)

    for now in range(1, 30):
        silence.check({"0": 4_000_000_000}, now=now)

    assert silence.silent_ranks(11) == [0]


def test_without_heartbeats_output_and_an_ended_heartbeat_count_as_activity() -> None:
    silence = HeartbeatMonitor(10, now=0)
    assert silence.silent_ranks(9.9) is None
    assert silence.silent_ranks(10) == []

    silence.record_output(5)
    assert silence.silent_ranks(14.9) is None
    silence.check({"any": 7}, now=14)
    assert silence.silent_ranks(23.9) is None
    silence.check({"any": 7, "0": 1}, now=24)
    silence.check({"any": 7}, now=33)

    assert silence.silent_ranks(42.9) is None
    assert silence.silent_ranks(43) == []


def test_heartbeat_of_an_ended_rank_is_ignored_until_renewed() -> None:
    silence = HeartbeatMonitor(10, now=0)
    silence.check({"0": 1, "3": 1}, now=1)
    silence.check({"0": 2, "3": 1}, now=11)
    assert silence.silent_ranks(11) == [3]

    silence.discard([3])
    silence.check({"0": 2, "3": 1}, now=12)
    assert silence.silent_ranks(12) is None
    assert silence.silent_ranks(21) == [0]
    silence.check({"0": 3, "3": 2}, now=22)

    assert silence.silent_ranks(32) == [0, 3]


def test_without_a_valid_heartbeat_output_counts_again() -> None:
    silence = HeartbeatMonitor(10, now=0)
    silence.check({"3": 1}, now=1)
    silence.discard([3])

    silence.check({"3": 1}, now=11)

    assert silence.silent_ranks(11) == []


def test_number_of_heartbeat_files_read_is_limited(tmp_path: Path) -> None:
    for number in range(heartbeats.MAX_FILES + 100):
        (tmp_path / str(number)).touch()

    assert len(heartbeats.read_heartbeats(tmp_path)) <= heartbeats.MAX_FILES


def test_unexpected_entries_in_the_heartbeat_folder_are_ignored(tmp_path: Path) -> None:
    folder = heartbeats.prepare_folder(tmp_path, "pass")
    (folder / "0").touch()
    (folder / "any").symlink_to("/etc/passwd")
    (folder / "1").mkdir()

    found = heartbeats.read_heartbeats(folder)

    assert found.keys() == {"0", "1", "any"}
    silence = HeartbeatMonitor(1, now=0)
    silence.check({**found, "9" * 4000: 3}, now=0)
    assert heartbeats.read_heartbeats(tmp_path / "none") == {}


def test_runtime_beats_at_most_once_a_second_until_it_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FALAJ_HEARTBEAT", str(tmp_path))
    monkeypatch.setenv("RANK", "3")
    moments = iter([100.0, 100.5, 101.5])
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: next(moments)))
    heart, file = heartbeat.rank_heartbeat(), tmp_path / "3"

    heart.beat()
    os.utime(file, (5, 5))
    heart.beat()
    early = file.stat().st_mtime
    heart.beat()
    late = file.stat().st_mtime
    heart.stop()
    heart.stop()

    assert early == 5
    assert late > 5
    assert list(tmp_path.iterdir()) == []


def test_runtime_runs_alone_without_a_heartbeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FALAJ_HEARTBEAT", raising=False)
    monkeypatch.chdir(tmp_path)
    heart = heartbeat.rank_heartbeat()

    heart.beat()
    heart.stop()

    assert list(tmp_path.iterdir()) == []


# ----------------------------------------------------------------------------------------------- counting


def test_threads_of_all_descendants_are_counted(tmp_path: Path) -> None:
    for pid, parent, threads in [(10, 1, 1), (11, 10, 3), (12, 11, 2), (13, 1, 50)]:
        stat = tmp_path / "proc" / str(pid) / "stat"
        stat.parent.mkdir(parents=True)
        fields = ["S", str(parent), *["0"] * 15, str(threads), *["0"] * 4]
        stat.write_text(f"{pid} (a ) b) {' '.join(fields)}")

    assert count_descendant_tasks(10, root=tmp_path) == 5
    assert count_descendant_tasks(99, root=tmp_path) == 0


def test_machine_with_few_tasks_is_not_searched(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "loadavg").write_text("0.1 0.2 0.3 2/85 4242\n")

    assert TaskLimit(86, root=tmp_path).check(1.0) is None
