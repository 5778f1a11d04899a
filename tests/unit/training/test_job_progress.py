"""`fj.job.progress` and heartbeats: sent periodically, always at the end, and not without a platform."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from falaj.training.runtime.agent import heartbeat
from falaj.training.runtime.agent import job as job_module
from falaj.training.runtime.agent.agents import MetricValue
from falaj.training.runtime.agent.job import JobContext


class Heard:
    """An agent that records its calls."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def log(self, metrics: list[MetricValue]) -> None:
        self.told.append([metric.step for metric in metrics])

    def progress(self, step: int, total: int) -> None:
        self.told.append((step, total))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr(heartbeat, "_anybody", None)
    return now


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Heard:
    agent = Heard()
    monkeypatch.setattr(job_module, "platform_agent", lambda: agent)
    monkeypatch.setattr("atexit.register", lambda _: None)
    return agent


def test_progress_is_told_once_a_second_and_at_the_end(clock: list[float], heard: Heard) -> None:
    job = JobContext()

    for step in range(1, 31):
        clock[0] += 0.1
        job.progress(step, 30)

    assert heard.told[0] == (1, 30)
    assert heard.told[-1] == (30, 30)
    assert len(heard.told) == 4


def test_the_metrics_of_a_step_come_before_its_progress(clock: list[float], heard: Heard) -> None:
    job = JobContext()
    job.log(step=1, loss=0.5)

    job.progress(1, 10)

    assert heard.told == [[1], (1, 10)]


def test_numbers_of_other_kinds_are_taken_as_steps(clock: list[float], heard: Heard) -> None:
    JobContext().progress(3.0, 10.0)  # type: ignore[arg-type]

    assert heard.told == [(3, 10)]


def test_without_a_platform_nothing_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("FALAJ_AGENT", raising=False)

    JobContext().progress(1, 10)

    assert capsys.readouterr() == ("", "")


def test_life_is_shown_by_touching_a_file_at_most_once_a_second(
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


def test_nobody_needs_to_watch(clock: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(heartbeat.VARIABLE, raising=False)
    heartbeat.beat_for_job()
    monkeypatch.setattr(heartbeat, "_anybody", None)
    monkeypatch.setenv(heartbeat.VARIABLE, str(tmp_path / "gone"))

    heartbeat.beat_for_job()

    assert not (tmp_path / "gone").exists()


@pytest.mark.parametrize("call", ["log", "progress"])
def test_what_a_script_logs_is_a_sign_of_life(
    clock: list[float], heard: Heard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setenv(heartbeat.VARIABLE, str(tmp_path))
    job = JobContext()

    job.log(step=1, loss=0.5) if call == "log" else job.progress(1, 2)

    assert (tmp_path / "any").exists()
