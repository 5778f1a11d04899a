"""The processes of `falaj up`: why one ended is told to its parent, and the traceback is in its log alone."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from falaj.apps.message_writer import MessageWriter
from falaj.apps.supervisor import ChildProcess, Supervisor
from falaj.assembly.home import open_home
from falaj.control import repeated_failures
from falaj.control.repeated_failures import RepeatedFailures
from falaj.governance.operations.caller import start_thread
from falaj.records.config import ServerConfig, ServingConfig
from polling import PATIENCE_S, eventually

TOY = """
from pathlib import Path
from threading import Event
if not (Path(__file__).parent / "mended").exists():
    raise ValueError("no disk")
Event().wait()
"""


@pytest.fixture
def child(tmp_path: Path) -> ChildProcess:
    """A process that runs the module toy.py of the test's folder."""
    failures = RepeatedFailures("toy", tmp_path / "toy.jsonl")
    return ChildProcess(failures, ["toy"], os.environ | {"PYTHONPATH": str(tmp_path)})


def run(child: ChildProcess, output: Path, source: str) -> str:
    """Run `source` as the child, and return why it ended."""
    (output.parent / "toy.py").write_text(source)
    with output.open("wb") as printed:
        child.start(output=printed.fileno())
    assert child.process is not None
    child.process.wait(PATIENCE_S)
    return child.stop(by=0)


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("raise ValueError('no disk')", "ValueError: no disk"),
        ("import missing_module", "ModuleNotFoundError: No module named 'missing_module'"),
        ("raise ValueError('postgresql://me:secret@host')", "ValueError: postgresql://***@host"),
    ],
)
def test_an_error_is_told_to_the_parent_and_its_traceback_is_in_the_log(
    child: ChildProcess, tmp_path: Path, source: str, cause: str
) -> None:
    told = run(child, tmp_path / "printed", source)

    [line] = (tmp_path / "toy.jsonl").read_text().splitlines()
    assert told == cause
    assert cause in json.loads(line)["trace"]
    assert (tmp_path / "printed").read_text() == ""


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("import sys; sys.exit(3)", "exit status 3"),
        ("import os; os.kill(os.getpid(), 9)", "killed by signal 9"),
        ("", "exit status 0"),
    ],
)
def test_an_end_without_an_error_is_its_exit_status(
    child: ChildProcess, tmp_path: Path, source: str, cause: str
) -> None:
    assert run(child, tmp_path / "printed", source) == cause


def test_a_traceback_is_printed_where_the_log_cannot_be_written(child: ChildProcess, tmp_path: Path) -> None:
    (tmp_path / "toy.jsonl").mkdir()

    told = run(child, tmp_path / "printed", "raise ValueError('no disk')")

    assert told == "ValueError: no disk"
    assert "ValueError: no disk" in json.loads((tmp_path / "printed").read_text())["trace"]


def test_a_module_gets_its_arguments_and_is_the_main_one(child: ChildProcess, tmp_path: Path) -> None:
    child.command += ["one", "two"]

    told = run(child, tmp_path / "printed", "import sys; print(__name__, *sys.argv[1:])")

    assert told == "exit status 0"
    assert (tmp_path / "printed").read_text() == "__main__ one two\n"


def test_a_child_that_keeps_failing_is_told_once_and_until_it_has_recovered(
    child: ChildProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(repeated_failures, "PAUSES_S", (0.0,))
    monkeypatch.setattr(repeated_failures, "RECOVERED_S", 0.0)
    (tmp_path / "toy.py").write_text(TOY)
    home = open_home(tmp_path / "home", tmp_path / "config")
    supervisor = Supervisor(home, ServerConfig(), ServingConfig())
    supervisor.messages, supervisor.children = MessageWriter(), [ChildProcess(child.failures, [], {}), child]
    supervisor.children[0].start_at = float("inf")
    watching = start_thread(supervisor._watch, name="watch")

    def failing() -> dict[str, str]:
        return dict(json.loads(home.running.read_text())["failing"]) if home.running.exists() else {}

    eventually(lambda: "keeps failing" in failing().get("toy", ""))
    eventually(lambda: len((tmp_path / "toy.jsonl").read_text().splitlines()) >= 5)
    (tmp_path / "mended").touch()
    eventually(lambda: not failing())
    supervisor.stopping = True
    watching.join()
    supervisor._stop_children()
    supervisor.messages.close()

    printed = capfd.readouterr()
    sentences = [line for line in printed.err.splitlines() if "keeps failing since" in line]
    assert printed.err.splitlines() == [
        "warning: the toy ended (ValueError: no disk); it is restarted",
        "warning: the toy ended (ValueError: no disk); it is restarted",
        sentences[0],
    ]
    assert printed.out == "the toy runs again\n"


def test_a_child_that_does_not_stop_is_killed_and_named(
    child: ChildProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("falaj.apps.supervisor.STOP_S", 0.0)
    deaf = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('deaf', flush=True)\nsignal.pause()\n"
    (tmp_path / "toy.py").write_text(deaf)
    supervisor = Supervisor(
        open_home(tmp_path / "home", tmp_path / "config"), ServerConfig(), ServingConfig()
    )
    supervisor.messages, supervisor.children = MessageWriter(), [child]
    with (tmp_path / "printed").open("wb") as printed:
        child.start(output=printed.fileno())
    eventually(lambda: (tmp_path / "printed").read_text())

    supervisor._stop_children()
    supervisor.messages.close()

    assert "the toy did not stop in 0 s; it was killed" in capfd.readouterr().err
