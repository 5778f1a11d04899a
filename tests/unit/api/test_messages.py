"""What the platform's processes print and log where nobody can read it: lines are lost, and nothing else."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from falaj.apps import message_writer
from falaj.apps.logs import RotatingLog
from falaj.apps.message_writer import MessageWriter
from falaj.apps.supervisor import Supervisor
from falaj.assembly.home import open_home
from falaj.records.config import ServerConfig, ServingConfig
from polling import eventually


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, int]]:
    """A pipe in the place of both standard streams."""
    reading, writing = os.pipe()
    monkeypatch.setattr(message_writer, "STDOUT", writing)
    monkeypatch.setattr(message_writer, "STDERR", writing)
    yield reading, writing
    for each in (reading, writing):
        with suppress(OSError):
            os.close(each)


def test_messages_and_the_output_of_children_are_written(pipe: tuple[int, int]) -> None:
    messages = MessageWriter()
    messages.say("it runs")
    messages.warn("a part has ended")
    os.write(messages.pipe, b"a child\n")

    messages.close()

    found = os.read(pipe[0], 4096)
    assert sorted(found.splitlines()) == [b"a child", b"it runs", b"warning: a part has ended"]


def test_nobody_waits_for_a_pipe_that_is_not_read(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(message_writer, "PATIENCE_S", 0.1)
    messages = MessageWriter()

    for _ in range(100):
        os.write(messages.pipe, bytes(4096))  # more than the pipe holds, twice
    for _ in range(5000):
        messages.warn("unread")
    messages.close()

    assert os.read(pipe[0], 1 << 20)  # what fitted


@pytest.mark.parametrize("path", ["/dev/full"])
def test_a_stream_that_is_full_loses_lines(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with open(path, "wb", buffering=0) as full:
        monkeypatch.setattr(message_writer, "STDERR", full.fileno())
        messages = MessageWriter()
        messages.warn("lost")
        messages.close()

    assert not messages._writer.is_alive()


def test_a_full_disk_loses_log_lines_and_says_so_once(capsys: pytest.CaptureFixture[str]) -> None:
    handler = RotatingLog("/dev/full", maxBytes=0)
    log = logging.Logger("test")
    log.addHandler(handler)

    for _ in range(10):
        log.error("a line")

    with suppress(OSError):
        handler.close()
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith("warning: lines of /dev/full are lost: [Errno 28]")


def test_a_file_that_cannot_be_written_is_written_later(tmp_path: Path) -> None:
    home = open_home(tmp_path / "home", tmp_path / "config")
    supervisor = Supervisor(home, ServerConfig(), ServingConfig())
    supervisor.messages = MessageWriter()
    supervisor._write_facts(url="http://127.0.0.1:1", pid=1)
    blocked = home.running.with_suffix(".new")
    blocked.mkdir()

    supervisor._write_facts(models="http://127.0.0.1:2")
    before = json.loads(home.running.read_text())
    blocked.rmdir()
    supervisor._write_facts()

    assert "models" not in before
    assert json.loads(home.running.read_text())["models"] == "http://127.0.0.1:2"
    supervisor.messages.close()
    eventually(lambda: not supervisor.messages._writer.is_alive())
