"""The workflow engine contract, on SQLite and on PostgreSQL."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from dbos import _migration

from falaj.drivers.dbos.workflows import DbosWorkflows
from falaj.errors import Denied
from falaj.ports.workflows import JsonObject, WorkflowEngine, WorkflowOutcome, WorkflowSteps
from polling import eventually, let_pass


class Counting:
    """Workflows that record how often each step ran."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    def add(self, steps: WorkflowSteps, given: JsonObject) -> JsonObject:
        first = steps.run("double", lambda: self._note("double", {"n": 2 * given["n"]}))
        return steps.run("increase", lambda: self._note("increase", {"n": first["n"] + 1}))

    def refuse(self, steps: WorkflowSteps, given: JsonObject) -> JsonObject:
        def denied() -> JsonObject:
            raise Denied("the rules say no", details={"rule": "default"})

        return steps.run("ask", denied)

    def tell(self, steps: WorkflowSteps, given: JsonObject) -> JsonObject:
        return {"id": steps.workflow}

    def _note(self, step: str, result: JsonObject) -> JsonObject:
        self.ran.append(step)
        return result


@pytest.fixture
def counting() -> Counting:
    return Counting()


@pytest.fixture
def engine(database_url: str, counting: Counting) -> Iterator[WorkflowEngine]:
    made = DbosWorkflows(database_url)
    made.launch({"add": counting.add, "refuse": counting.refuse, "tell": counting.tell})
    yield made
    made.close()


def end_of(engine: WorkflowEngine, ident: str) -> WorkflowOutcome:
    return eventually(lambda: engine.outcome(ident))


@pytest.mark.slow
def test_a_workflow_runs_its_steps_and_ends_with_its_result(
    engine: WorkflowEngine, counting: Counting
) -> None:
    engine.start("w1", "add", {"n": 20})

    assert end_of(engine, "w1") == WorkflowOutcome(result={"n": 41})
    assert counting.ran == ["double", "increase"]


def test_the_same_id_is_started_once(engine: WorkflowEngine, counting: Counting) -> None:
    engine.start("w1", "add", {"n": 1})
    end_of(engine, "w1")

    engine.start("w1", "add", {"n": 1})

    assert end_of(engine, "w1").result == {"n": 3}
    assert counting.ran == ["double", "increase"]


def test_a_refusal_ends_it_with_its_message(engine: WorkflowEngine) -> None:
    engine.start("w1", "refuse", {})

    assert end_of(engine, "w1") == WorkflowOutcome(result=None, error="the rules say no")


def test_a_workflow_knows_its_id(engine: WorkflowEngine) -> None:
    engine.start("w1", "tell", {})

    assert end_of(engine, "w1").result == {"id": "w1"}


def test_an_unknown_workflow_fails_and_an_unknown_id_has_not_ended(engine: WorkflowEngine) -> None:
    engine.start("w1", "fly", {})

    assert "no workflow" in str(end_of(engine, "w1").error)
    assert engine.outcome("w2") is None


FIRST_START = """
import sys
from falaj.drivers.dbos.workflows import DbosWorkflows
print("begins", flush=True)
engine = DbosWorkflows(sys.argv[1])
engine.launch({})
print("done", flush=True)
engine.close()
"""


@pytest.mark.slow
def test_killed_first_start_leaves_no_partial_database(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'workflows.db'}"
    for wait_s in (0.0, 0.05, 0.1, 0.2, 0.3):
        command = [sys.executable, "-c", FIRST_START, url]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            assert process.stdout is not None
            process.stdout.readline()
            let_pass(wait_s)
            process.kill()

    ended = subprocess.run(
        [sys.executable, "-c", FIRST_START, url], capture_output=True, text=True, check=False
    )

    assert "done" in ended.stdout, ended.stderr


SQL_OF_NOW = {"3.11": "(strftime('%s','now') * 1000)", "3.12": "(unixepoch('subsec') * 1000)"}
"""What dbos writes into its tables as the default of times, by the version of Python."""


@pytest.mark.parametrize("pythons", [("3.12", "3.12"), ("3.12", "3.11"), ("3.11", "3.12")], ids="-then-".join)
def test_workflows_run_whatever_python_made_their_database(
    tmp_path: Path, counting: Counting, monkeypatch: pytest.MonkeyPatch, pythons: tuple[str, str]
) -> None:
    written = _migration.get_sqlite_timestamp_expr()
    for python in pythons:
        version = tuple(map(int, python.split(".")))
        monkeypatch.setattr("dbos._sys_db.sys", SimpleNamespace(**vars(sys) | {"version_info": version}))
        migrations = [each.replace(written, SQL_OF_NOW[python]) for each in _migration.sqlite_migrations]
        monkeypatch.setattr("dbos._sys_db_sqlite.sqlite_migrations", migrations)
        engine = DbosWorkflows(f"sqlite:///{tmp_path}/workflows.db")
        engine.launch({"add": counting.add})
        try:
            ident = f"w{len(counting.ran)}"

            engine.start(ident, "add", {"n": 1})

            assert end_of(engine, ident).result == {"n": 3}
        finally:
            engine.close()
