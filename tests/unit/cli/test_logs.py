"""The log of a platform inside the command line: JSON lines in the home, or on stderr when debugging."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from command_line import CommandLine, command_line, make_template
from falaj.apps.cli.output.logs import log_to
from falaj.governance.operations.gate import Gate

SECRET = "fj_tok_0123456789.abcdefghijklmnop"
WORDS = f'a fault,\nin two lines, with "quotes" and {SECRET}'


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_template(tmp_path_factory.mktemp("template"))


@pytest.fixture
def falaj(template: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[CommandLine]:
    with command_line(tmp_path, capsys, template=template) as line:
        yield line


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every operation fail with an internal error."""

    def fail(*_: object) -> None:
        raise RuntimeError(WORDS)

    monkeypatch.setattr(Gate, "_body", fail)


def parsed(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.usefixtures("broken")
def test_a_fault_is_one_json_line_in_the_home(falaj: CommandLine) -> None:
    ran = falaj("users", "whoami")

    text = (falaj.home / "logs" / "cli.log").read_text()
    (line,) = parsed(text)
    assert ran.status == 1
    assert "the folder logs of the home" in ran.err
    assert "Traceback" not in ran.err
    assert (line["level"], line["logger"], line["action"]) == ("error", "falaj.gate", "users.whoami")
    assert datetime.fromisoformat(line["at"]).tzinfo is not None
    assert "RuntimeError: a fault,\nin two lines" in line["trace"]
    assert SECRET not in text


@pytest.mark.usefixtures("broken")
def test_when_debugging_it_goes_to_stderr_instead(
    falaj: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FALAJ_DEBUG", "1")

    ran = falaj("users", "whoami")

    lines = [json.loads(line) for line in ran.err.splitlines() if line.startswith("{")]
    assert [line["action"] for line in lines if line["level"] == "error"] == ["users.whoami"]
    assert not (falaj.home / "logs" / "cli.log").exists()


def test_a_successful_command_leaves_no_log(falaj: CommandLine) -> None:
    falaj.done("users", "whoami")

    assert not (falaj.home / "logs" / "cli.log").exists()
    assert falaj("users", "whoami").err == ""


@pytest.mark.usefixtures("falaj")
def test_a_line_is_written_once_however_often_the_log_was_set_up(tmp_path: Path) -> None:
    log = logging.getLogger("falaj.anything")

    for name in ("first.log", "second.log", "second.log"):
        log_to(tmp_path / name)
    log.warning("told %s\n%s", "once", SECRET, extra={"count": 3})
    log.info("too small to be told")

    (line,) = parsed((tmp_path / "second.log").read_text())
    assert (line["message"], line["level"], line["count"]) == ("told once\n***", "warning", 3)
    assert not (tmp_path / "first.log").exists()
