"""Waiting for a workflow on the command line: progress, and how its end is reported."""

from __future__ import annotations

import io
from collections.abc import Iterator
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from falaj.apps.cli.output import work_progress
from falaj.apps.cli.session import Session
from falaj.errors import Conflict, Interrupted
from falaj.records.control.workflows import WorkflowRun, WorkflowState
from falaj.records.names import ObjectId


def work(state: WorkflowState = WorkflowState.RUNNING, **values: Any) -> WorkflowRun:
    return WorkflowRun(
        id=ObjectId("work_1"),
        workspace=ObjectId("platform"),
        workflow="queues.what_if",
        state=state,
        created_at=datetime(2026, 3, 2, tzinfo=UTC),
        **values,
    )


HALF_WAY = work(step=5, steps=10, doing="replay with the changes")
DONE = work(WorkflowState.DONE, step=10, steps=10)


def follow(*streams: list[WorkflowRun | BaseException]) -> WorkflowRun:
    """Watch the workflow once for each stream."""
    left = iter(streams)

    def watch(ident: str) -> Iterator[WorkflowRun]:
        for each in next(left):
            if isinstance(each, BaseException):
                raise each
            yield each

    platform: Any = SimpleNamespace(workflows=SimpleNamespace(watch=watch))
    return work_progress.follow_work(Session(), platform, work(), "replay", result="queues what-if-result")


def test_progress_is_printed_periodically_as_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work_progress, "LINE_EVERY_S", 0.0)

    assert follow([work(), HALF_WAY, DONE]) == DONE

    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == ["replay running", "replay with the changes, 50%"]


def test_a_terminal_gets_a_transient_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True)
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("TERM", "xterm")

    assert follow([work(), HALF_WAY, DONE]) == DONE

    assert "100%" in screen.getvalue()
    assert screen.getvalue().endswith("\x1b[2K")


def test_an_interrupted_stream_is_reopened() -> None:
    assert follow([HALF_WAY, Interrupted("the platform restarts")], [HALF_WAY, DONE]) == DONE


@pytest.mark.parametrize("state", [WorkflowState.FAILED, WorkflowState.CANCELLED])
def test_a_failed_replay_is_an_error_with_its_reason(state: WorkflowState) -> None:
    with pytest.raises(Conflict, match=f"replay work_1 {state}: no memory"):
        follow([HALF_WAY, work(state, error="no memory")])


def test_an_interrupt_prints_the_command_to_continue(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt):
        follow([HALF_WAY, KeyboardInterrupt()])

    err = capsys.readouterr().err
    for command in ("workflows cancel work_1", "workflows watch work_1", "queues what-if-result work_1"):
        assert f"falaj {command}" in err
