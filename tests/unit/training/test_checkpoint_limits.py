"""Checkpoints of a job are bounded by their announced sizes, the configured limit, and the free disk space."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn

from agent_harness import agent_of
from falaj.control.jobs import storage_limits
from falaj.control.jobs.storage_limits import StorageLimits
from falaj.errors import TooLarge
from falaj.records.training.jobs import Job
from falaj.training.runtime.agent.protocol import SocketAgent, send_head
from falaj.training.runtime.checkpointing.storage.store import CheckpointStore, Retention, SaveId
from falaj.training.runtime.errors import CheckpointFailed, InvalidTraining
from falaj.training.runtime.fit import fit
from job_harness import JobHarness
from polling import eventually

MIB = 1 << 20
LIMIT = 4 * MIB
FIRST, SECOND = SaveId(5, "a" * 32), SaveId(6, "b" * 32)


class Volume(NamedTuple):
    f_bavail: int
    f_blocks: int
    f_frsize: int


@pytest.fixture
def job(light_harness: JobHarness) -> Job:
    return light_harness.begin(light_harness.submit())


@pytest.fixture
def store(light_harness: JobHarness, job: Job, tmp_path: Path) -> Iterator[CheckpointStore]:
    """The checkpoints of an attempt, none of which may be larger than the limit."""
    with agent_of(light_harness, job, tmp_path / "attempt", limits=StorageLimits(LIMIT)) as path:
        agent = SocketAgent.connect(str(path))
        yield agent.checkpoints()
        agent.close()


def stored_bytes(harness: JobHarness) -> int:
    """Return the bytes in the folders of the zones."""
    files = (
        each
        for each in (harness.platform.home.path / "blobs").rglob("*")
        if each.is_file() and ".store." not in each.name
    )
    return sum(each.stat().st_size for each in files)


# ------------------------------------------------------------------------------------- one checkpoint


@pytest.mark.slow
def test_a_part_beyond_the_limit_is_refused_before_a_byte_is_kept(
    light_harness: JobHarness, store: CheckpointStore
) -> None:
    before = stored_bytes(light_harness)

    with pytest.raises(CheckpointFailed) as refusal:
        store.save_part(FIRST, 0, [bytes(LIMIT + 1)])

    assert "4 MiB" in refusal.value.message
    assert "jobs.checkpoint_limit" in refusal.value.message
    assert stored_bytes(light_harness) == before
    assert store.steps() == []


def test_all_parts_of_a_checkpoint_count_together(light_harness: JobHarness, store: CheckpointStore) -> None:
    store.save_part(FIRST, 0, [bytes(3 * MIB)])
    before = stored_bytes(light_harness)

    with pytest.raises(CheckpointFailed, match=r"part 1 .* beside 3 MiB"):
        store.save_part(FIRST, 1, [bytes(2 * MIB)])

    assert stored_bytes(light_harness) == before
    store.save_part(FIRST, 1, [bytes(MIB // 2)])  # the refused one does not count
    store.commit(FIRST, [3 * MIB, MIB // 2], b"{}", Retention())
    assert store.steps() == [5]


def test_a_part_that_comes_again_counts_once_and_leaves_nothing_behind(
    light_harness: JobHarness, store: CheckpointStore
) -> None:
    store.save_part(FIRST, 0, [bytes(3 * MIB)])
    once = stored_bytes(light_harness)

    for _ in range(3):
        store.save_part(FIRST, 0, [bytes(3 * MIB)])

    assert stored_bytes(light_harness) == once


def test_the_manifest_counts_towards_the_limit(store: CheckpointStore) -> None:
    store.save_part(FIRST, 0, [bytes(3 * MIB)])

    with pytest.raises(CheckpointFailed, match="the manifest"):
        store.commit(FIRST, [3 * MIB], bytes(2 * MIB), Retention())

    assert store.steps() == []


def test_parts_of_other_sizes_than_announced_make_no_checkpoint(store: CheckpointStore) -> None:
    store.save_part(FIRST, 0, [b"12345"])

    with pytest.raises(InvalidTraining, match="part 0 of the checkpoint of step 5 has 5 bytes, not 4"):
        store.commit(FIRST, [4], b"{}", Retention())

    assert store.steps() == []


@pytest.mark.parametrize("sizes", [None, "5", [-1], ["5"], [5] * 5000])
def test_invalid_sizes_are_refused(store: CheckpointStore, sizes: object) -> None:
    store.save_part(FIRST, 0, [b"12345"])

    with pytest.raises(InvalidTraining, match="sizes"):
        store._caller.call(  # type: ignore[attr-defined]
            "commit_checkpoint", [b"{}"], step=5, save=FIRST.save, sizes=sizes, keep=3
        )


def test_the_bytes_of_a_removed_checkpoint_are_deleted_at_once(
    light_harness: JobHarness, store: CheckpointStore
) -> None:
    sizes = []
    for step in range(1, 6):
        mark = SaveId(step, f"{step:032x}")
        store.save_part(mark, 0, [bytes(2 * MIB)])
        store.commit(mark, [2 * MIB], b"{}", Retention(2))
        sizes.append(stored_bytes(light_harness))

    assert store.steps() == [5, 4]
    assert sizes[1] == sizes[-1]


def test_a_save_superseded_by_later_ones_leaves_nothing(
    light_harness: JobHarness, store: CheckpointStore
) -> None:
    before = stored_bytes(light_harness)
    marks = [SaveId(step, f"{step:032x}") for step in range(1, 8)]

    for mark in marks:
        store.save_part(mark, 0, [bytes(2 * MIB)])

    assert stored_bytes(light_harness) < before + 5 * MIB


# ------------------------------------------------------------------------------------------- the disk


def with_free(monkeypatch: pytest.MonkeyPatch, *left: int) -> None:
    """Simulate a volume of 100 MiB with this free space at consecutive checks; the last one stays."""
    looks = list(left)

    def look(_: object) -> Volume:
        return Volume(looks.pop(0) if len(looks) > 1 else looks[0], 100 * MIB, 1)

    monkeypatch.setattr("falaj.control.jobs.storage_limits.os.statvfs", look)


def test_a_part_larger_than_the_free_space_is_refused(
    light_harness: JobHarness, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with agent_of(light_harness, job, tmp_path / "attempt", limits=StorageLimits(disk=tmp_path)) as path:
        store = SocketAgent.connect(str(path)).checkpoints()
        before = stored_bytes(light_harness)
        with_free(monkeypatch, 7 * MIB)

        with pytest.raises(CheckpointFailed, match=r"7 MiB left, 5 MiB of which stay free"):
            store.save_part(FIRST, 0, [bytes(3 * MIB)])

        assert stored_bytes(light_harness) == before
        store.save_part(FIRST, 0, [bytes(MIB)])
        store.commit(FIRST, [MIB], b"{}", Retention())
        assert store.steps() == [5]


def test_a_disk_that_fills_up_ends_an_upload_and_leaves_nothing(
    light_harness: JobHarness, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_limits, "CHECK_EVERY_BYTES", MIB)
    with agent_of(light_harness, job, tmp_path / "attempt", limits=StorageLimits(disk=tmp_path)) as path:
        store = SocketAgent.connect(str(path)).checkpoints()
        before = stored_bytes(light_harness)
        with_free(monkeypatch, 50 * MIB, 50 * MIB, 4 * MIB)

        with pytest.raises(CheckpointFailed, match=r"4 MiB left"):
            store.save_part(FIRST, 0, [bytes(MIB) for _ in range(8)])

        assert stored_bytes(light_harness) == before
        with_free(monkeypatch, 50 * MIB)
        store.save_part(FIRST, 0, [bytes(MIB)])


def test_an_upload_that_is_broken_off_leaves_nothing(
    light_harness: JobHarness, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = stored_bytes(light_harness)
    with agent_of(light_harness, job, tmp_path / "attempt") as path, socket.socket(socket.AF_UNIX) as near:
        monkeypatch.chdir(path.parent)
        near.connect(path.name)  # its whole path may be too long for a socket
        with near.makefile("wb") as stream:
            send_head(stream, {"call": "save_part", "step": 5, "save": FIRST.save, "number": 0}, 16 * MIB)
            stream.write(bytes(8 * MIB))
        eventually(lambda: stored_bytes(light_harness) > before + MIB)

        near.shutdown(socket.SHUT_RDWR)

        eventually(lambda: stored_bytes(light_harness) == before)


# -------------------------------------------------------------------------------------------- the run


@dataclass(frozen=True)
class RefusingLimits(StorageLimits):
    """Refuses the third request: the second checkpoint, after that of step 0."""

    calls: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def require(self, size: int, *, beside: int, what: str) -> None:
        if next(self.calls) == 3:
            raise TooLarge("no room for that")
        super().require(size, beside=beside, what=what)


def test_a_run_continues_when_a_checkpoint_is_refused(
    light_harness: JobHarness,
    job: Job,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FALAJ_CACHE", str(tmp_path / "cache"))
    rows = torch.randn(32, 4)

    with agent_of(light_harness, job, tmp_path / "attempt", limits=RefusingLimits()) as path:
        monkeypatch.setenv("FALAJ_AGENT", str(path))
        result = fit(
            nn.Linear(4, 1),
            nn.functional.mse_loss,
            (rows, rows[:, :1]),
            batch_size=8,
            steps=20,
            checkpoint_every=5,
            device="cpu",
            tune="off",
        )

    assert len(result.losses) == 20
    assert [each.step for each in light_harness.jobs.checkpoints(job.id)] == [20, 15, 10]
    message = "the checkpoint of step 5 could not be saved: no room for that; the last good one: of step 0. Training "
    assert message in capsys.readouterr().err
