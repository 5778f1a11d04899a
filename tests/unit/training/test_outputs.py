"""Outputs of hostile jobs: they stop neither the end of the job nor the start of the next reconciler."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from falaj.control.jobs import outputs as outputs_module
from falaj.control.jobs import reconciler as reconciling
from falaj.control.jobs.outputs import output_files
from falaj.errors import InvalidInput
from falaj.ports.launcher import AttemptState, Launch
from falaj.records.training.jobs import JobState
from job_harness import DONE, NODE, JobHarness
from platforms import make_platform
from polling import eventually


@pytest.fixture
def outputs(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "outputs"
    folder.mkdir()
    yield folder
    if folder.is_dir():
        flatten(folder)


def name_that_is_no_text(folder: Path) -> None:
    Path(os.fsdecode(os.fsencode(folder) + b"/a\xff")).write_text("x")


def link_in_its_place(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.symlink_to("/etc")


def very_deep(folder: Path) -> None:
    here = os.open(folder, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)


def flatten(folder: Path) -> None:
    """Make it removable for pytest, whose own removal stops at a thousand folders."""
    while (folder / "d" / "d").exists():
        (folder / "d" / "d").rename(folder / "e")
        (folder / "d").rmdir()
        (folder / "e").rename(folder / "d")


@pytest.mark.slow
@pytest.mark.parametrize("leave", [shutil.rmtree, link_in_its_place, name_that_is_no_text])
def test_a_job_ends_despite_invalid_outputs(light_harness: JobHarness, leave: Callable[[Path], None]) -> None:
    def program(launch: Launch) -> AttemptState:
        leave(launch.directory / "outputs")
        return DONE

    light_harness.launcher.program = program
    job = light_harness.submit()
    reconciler = light_harness.reconciler()

    reconciler.tick()

    eventually(lambda: light_harness.jobs.show(job.id).state is JobState.FAILED)
    assert "could not be stored: outputs" in (light_harness.jobs.show(job.id).reason or "")
    reconciler.stop()


def test_too_deeply_nested_outputs_are_refused(outputs: Path) -> None:
    very_deep(outputs)

    with pytest.raises(InvalidInput, match="500 characters"):
        list(output_files(outputs))


def test_folders_and_pipes_count_towards_the_limit(outputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs_module, "MOST_OUTPUTS", 3)
    for number in range(2):
        (outputs / f"folder{number}").mkdir()
        os.mkfifo(outputs / f"pipe{number}")

    with pytest.raises(InvalidInput, match="more than 3"):
        list(output_files(outputs))


def test_regular_files_are_listed_by_name_and_nothing_else(outputs: Path) -> None:
    (outputs / "b").mkdir()
    for name in ("b/2", "b/1", "z", "a"):
        (outputs / name).write_text(name)
    (outputs / "link").symlink_to("/etc/passwd")
    (outputs / "more").symlink_to("/etc")
    os.mkfifo(outputs / "pipe")
    before = len(os.listdir("/proc/self/fd"))

    found = {}
    for path, handle in output_files(outputs):
        with os.fdopen(handle) as file:
            found[path] = file.read()

    assert list(found) == ["a", "z", "b/1", "b/2"]
    assert all(path == text for path, text in found.items())
    assert len(os.listdir("/proc/self/fd")) == before


def test_files_that_cannot_be_removed_do_not_stop_the_reconciler(
    light_harness: JobHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stuck(*_: object) -> None:
        raise RecursionError

    (light_harness.host.folder / "job_gone" / "1").mkdir(parents=True)
    monkeypatch.setattr(reconciling, "remove_attempt", stuck)

    light_harness.reconciler().tick()


FRANKFURT = """
[zones.local]
jurisdiction = "AE"
default = true

[zones.frankfurt]
jurisdiction = "DE"

[node]
zone = "frankfurt"
"""


@pytest.mark.slow
def test_what_a_job_makes_of_bound_data_lies_where_the_job_ran(tmp_path: Path) -> None:
    def program(launch: Launch) -> AttemptState:
        (launch.directory / "outputs" / "weights.bin").write_bytes(b"weights")
        return DONE

    with make_platform(tmp_path, toml=FRANKFURT) as platform:
        harness = JobHarness(platform, tmp_path)
        harness.machine.node = NODE.model_copy(update={"zone": "frankfurt", "jurisdiction": "DE"})
        harness.launcher.program = program
        bound = platform.blobs.upload(iter([b"rows"]), zone="frankfurt", only=("DE",))
        platform.blobs.commit(bound.id, name="bound")
        job = harness.submit(inputs={"data": "bound"})
        reconciler = harness.reconciler()

        def ended() -> bool:
            reconciler.tick()
            return harness.jobs.show(job.id).state not in (JobState.QUEUED, JobState.RUNNING)

        eventually(ended)
        done = harness.jobs.show(job.id)
        made = [platform.blobs.show(each.blob) for each in done.outputs]

    assert (done.state, done.reason) == (JobState.DONE, None)
    assert [(blob.zone, sorted(blob.label.only or ())) for blob in made] == [("frankfurt", ["DE"])]
