"""What every workflow engine does: one suite, on SQLite and on PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from falaj.drivers.dbos.workflows import DbosWorkflows
from falaj.errors import Denied
from falaj.ports.workflows import Ended, Json, Steps, Workflows
from polling import eventually


class Counting:
    """Workflows that say how often each step ran."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    def add(self, steps: Steps, given: Json) -> Json:
        first = steps.run("double", lambda: self._note("double", {"n": 2 * given["n"]}))
        return steps.run("increase", lambda: self._note("increase", {"n": first["n"] + 1}))

    def refuse(self, steps: Steps, given: Json) -> Json:
        def denied() -> Json:
            raise Denied("the rules say no", details={"rule": "default"})

        return steps.run("ask", denied)

    def tell(self, steps: Steps, given: Json) -> Json:
        return {"id": steps.workflow}

    def _note(self, step: str, result: Json) -> Json:
        self.ran.append(step)
        return result


@pytest.fixture
def counting() -> Counting:
    return Counting()


@pytest.fixture
def engine(database_url: str, counting: Counting) -> Iterator[Workflows]:
    made = DbosWorkflows(database_url)
    made.launch({"add": counting.add, "refuse": counting.refuse, "tell": counting.tell})
    yield made
    made.close()


def end_of(engine: Workflows, ident: str) -> Ended:
    return eventually(lambda: engine.ended(ident), within=10)


def test_a_workflow_runs_its_steps_and_ends_with_its_result(engine: Workflows, counting: Counting) -> None:
    engine.start("w1", "add", {"n": 20})

    assert end_of(engine, "w1") == Ended(result={"n": 41})
    assert counting.ran == ["double", "increase"]


def test_the_same_id_is_started_once(engine: Workflows, counting: Counting) -> None:
    engine.start("w1", "add", {"n": 1})
    end_of(engine, "w1")

    engine.start("w1", "add", {"n": 1})

    assert end_of(engine, "w1").result == {"n": 3}
    assert counting.ran == ["double", "increase"]


def test_a_refusal_ends_it_in_words(engine: Workflows) -> None:
    engine.start("w1", "refuse", {})

    assert end_of(engine, "w1") == Ended(result=None, error="the rules say no")


def test_a_workflow_knows_its_id(engine: Workflows) -> None:
    engine.start("w1", "tell", {})

    assert end_of(engine, "w1").result == {"id": "w1"}


def test_an_unknown_workflow_fails_and_an_unknown_id_has_not_ended(engine: Workflows) -> None:
    engine.start("w1", "fly", {})

    assert "no workflow" in str(end_of(engine, "w1").error)
    assert engine.ended("w2") is None
