"""The parent of the platform's processes: how it restarts a model server that cannot start."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from falaj.apps import supervisor as supervising
from falaj.apps.supervisor import ChildProcess, Supervisor
from falaj.assembly.home import open_home
from falaj.records.config import ServerConfig, ServingConfig

UNABLE = """
import json, os
with os.fdopen(int(os.environ["FALAJ_READY_FD"]), "w") as parent:
    json.dump({"problem": "the model server cannot listen"}, parent)
raise SystemExit(1)
"""


class Warnings:
    """The messages of a supervisor."""

    def __init__(self) -> None:
        self.pipe = os.open(os.devnull, os.O_WRONLY)
        self.warned: list[str] = []

    def warn(self, line: str) -> None:
        self.warned.append(line)


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    made = Supervisor(open_home(tmp_path / "home", tmp_path / "config"), ServerConfig(), ServingConfig())
    made.messages = messages = Warnings()  # type: ignore[assignment]
    made.model_server = ChildProcess(
        "the model server", ["unable"], os.environ | {"PYTHONPATH": str(tmp_path)}
    )
    yield made
    os.close(messages.pipe)


def pauses_after(supervisor: Supervisor, starts: int) -> list[float]:
    """Let the model server start and end so often; return the pauses until the next starts."""
    child, found = supervisor.model_server, []
    assert child is not None
    for _ in range(starts):
        supervisor._start_model_server(child)
        assert child.process is not None
        child.process.wait(60)
        now = time.monotonic()
        supervisor._schedule_restart(child, now)
        found.append(child.start_at - now)
    return found


def test_a_model_server_that_cannot_listen_is_tried_ever_more_rarely(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    (tmp_path / "unable.py").write_text(UNABLE)

    pauses = pauses_after(supervisor, 4)

    assert pauses == pytest.approx([5, 15, 60, 60])
    assert supervisor.running["models_problem"] == "the model server cannot listen"
    assert supervisor.messages.warned == ["the model server cannot listen"]  # type: ignore[attr-defined]


def test_a_model_server_that_ends_again_and_again_is_told_with_its_log(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    (tmp_path / "unable.py").write_text("raise SystemExit(7)")

    pauses = pauses_after(supervisor, supervising.CRASHES)

    assert pauses == pytest.approx([0.1, 1, 60])
    problem = supervisor.running["models_problem"]
    assert problem.startswith("the model server ends as soon as it starts (code 7)")
    assert str(supervisor.home.logs / "models.jsonl") in problem


def test_a_model_server_that_serves_again_has_no_problem(supervisor: Supervisor, tmp_path: Path) -> None:
    (tmp_path / "unable.py").write_text(UNABLE)
    pauses_after(supervisor, 1)
    child = supervisor.model_server
    assert child is not None

    supervisor._model_server_said(child, {"url": "http://127.0.0.1:7481"})

    assert supervisor.running["models_problem"] is None
    assert supervisor._is_unable(child, 1) is False
