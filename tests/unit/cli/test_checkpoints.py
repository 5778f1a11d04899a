"""The CLI shows the checkpoints, attempts and retries of a job."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from command_line import CommandLine, command_line, make_template
from falaj.records.scheduling.snapshot import Placement


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_template(tmp_path_factory.mktemp("template"))


@pytest.fixture
def falaj(template: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[CommandLine]:
    (tmp_path / "says.py").write_text("print(1)")
    with command_line(tmp_path, capsys, template=template) as line:
        yield line


@pytest.fixture
def job(falaj: CommandLine, tmp_path: Path) -> str:
    """A running job."""
    ident: str = falaj.json("train", tmp_path / "says.py", "--retries", "1", "--detach")["id"]
    begin(falaj, ident, 1)
    return ident


def begin(falaj: CommandLine, job: str, attempt: int) -> None:
    with falaj.as_controller() as platform:
        platform.jobs.begin(job, attempt=attempt, placements=(Placement(replica=0, node="here"),))


def settle(falaj: CommandLine, job: str, verdict: str, **facts: str) -> None:
    with falaj.as_controller() as platform:
        platform.jobs.finish(job, attempt=1, verdict=verdict, **facts)


@pytest.mark.slow
def test_checkpoints_are_a_table_that_people_can_read(falaj: CommandLine, job: str, tmp_path: Path) -> None:
    (tmp_path / "part").write_bytes(bytes(2048))
    blobs = [falaj.json("blobs", "put", tmp_path / "part", name)["id"] for name in ("manifest", "a", "b")]
    with falaj.as_controller() as platform:
        platform.jobs.save_checkpoint(
            job, attempt=1, step=40, save="0" * 32, manifest=blobs[0], parts=tuple(blobs[1:])
        )

    shown = falaj.done("jobs", "checkpoints", job).out

    assert [line.split() for line in shown.splitlines()] == [
        ["step", "size", "parts", "manifest", "save"],
        ["40", "6", "KiB", "2", blobs[0], "0" * 32],
    ]
    assert falaj.json("jobs", "checkpoints", job)[0]["parts"][1]["blob"] == blobs[2]


@pytest.mark.slow
def test_a_job_without_checkpoints_is_reported(falaj: CommandLine, job: str) -> None:
    assert falaj.done("jobs", "checkpoints", job).out == f"job {job} has no checkpoint yet\n"


def test_a_retried_job_shows_how_the_previous_attempt_ended(falaj: CommandLine, job: str) -> None:
    settle(falaj, job, "failed", reason="rank 1: signal 9")
    begin(falaj, job, 2)

    assert "; attempt 1 failed: rank 1: signal 9" in falaj.done("jobs", "explain", job).out


@pytest.mark.slow
def test_a_retry_names_the_run_that_it_continues(falaj: CommandLine, job: str) -> None:
    before = falaj.json("jobs", "show", job)["run"]
    settle(falaj, job, "cancelled")

    output = falaj.done("jobs", "retry", job).out

    after = falaj.json("jobs", "show", job)["run"]
    assert after != before
    assert f"is queued again, as run {after}" in output
    assert f"next   falaj jobs logs {job} --follow" in output
