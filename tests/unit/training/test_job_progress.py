"""`fj.job.progress` and heartbeats: sent periodically, always at the end, and not without a platform."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from falaj.training.runtime.agent import heartbeat
from falaj.training.runtime.agent import job as job_module
from falaj.training.runtime.agent.agents import MetricValue
from falaj.training.runtime.agent.job import JobContext


class RecordingAgent:
    """An agent that records its calls."""

    def __init__(self) -> None:
        self.reports: list[Any] = []

    def log(self, metrics: list[MetricValue]) -> None:
        self.reports.append([metric.step for metric in metrics])

    def progress(self, step: int, total: int) -> None:
        self.reports.append((step, total))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr(heartbeat, "_anybody", None)
    return now


@pytest.fixture
def recording_agent(monkeypatch: pytest.MonkeyPatch) -> RecordingAgent:
    agent = RecordingAgent()
    monkeypatch.setattr(job_module, "platform_agent", lambda: agent)
    monkeypatch.setattr("atexit.register", lambda _: None)
    return agent


def test_progress_is_reported_once_a_second_and_at_the_end(
    clock: list[float], recording_agent: RecordingAgent
) -> None:
    job = JobContext()

    for step in range(1, 31):
        clock[0] += 0.1
        job.progress(step, 30)

    assert recording_agent.reports[0] == (1, 30)
    assert recording_agent.reports[-1] == (30, 30)
    assert len(recording_agent.reports) == 4


def test_the_metrics_of_a_step_come_before_its_progress(
    clock: list[float], recording_agent: RecordingAgent
) -> None:
    job = JobContext()
    job.log(step=1, loss=0.5)

    job.progress(1, 10)

    assert recording_agent.reports == [[1], (1, 10)]


def test_steps_of_other_numeric_types_are_accepted(
    clock: list[float], recording_agent: RecordingAgent
) -> None:
    JobContext().progress(3.0, 10.0)  # type: ignore[arg-type]

    assert recording_agent.reports == [(3, 10)]


def test_without_a_platform_nothing_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("FALAJ_AGENT", raising=False)

    JobContext().progress(1, 10)

    assert capsys.readouterr() == ("", "")


def test_the_heartbeat_file_is_touched_at_most_once_a_second(
    clock: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(heartbeat.VARIABLE, str(tmp_path))
    heartbeat.beat_for_job()
    first = (tmp_path / "any").stat().st_mtime_ns
    (tmp_path / "any").unlink()

    clock[0] += 0.5
    heartbeat.beat_for_job()
    assert not (tmp_path / "any").exists()
    clock[0] += 0.5
    heartbeat.beat_for_job()

    assert (tmp_path / "any").stat().st_mtime_ns >= first


def test_a_heartbeat_without_a_watcher_does_nothing(
    clock: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(heartbeat.VARIABLE, raising=False)
    heartbeat.beat_for_job()
    monkeypatch.setattr(heartbeat, "_anybody", None)
    monkeypatch.setenv(heartbeat.VARIABLE, str(tmp_path / "gone"))

    heartbeat.beat_for_job()

    assert not (tmp_path / "gone").exists()


@pytest.mark.parametrize("call", ["log", "progress"])
def test_logging_counts_as_a_heartbeat(
    clock: list[float],
    recording_agent: RecordingAgent,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
) -> None:
    monkeypatch.setenv(heartbeat.VARIABLE, str(tmp_path))
    job = JobContext()

    job.log(step=1, loss=0.5) if call == "log" else job.progress(1, 2)

    assert (tmp_path / "any").exists()
