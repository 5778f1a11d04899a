"""The engine of ensembles: the order of steps, those beside each other, time limits, and whose error it is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from falaj.errors import InvalidInput, TooLarge, Unavailable
from falaj.records.registry import TensorSpec
from falaj.records.serving.endpoints import ServedFile
from falaj.records.serving.ensembles import ComposedEnsemble, ComposedStep
from falaj.records.serving.tensors import Datatype, ServedModel, Tensor
from falaj.serving.runtime.engine import LONGEST_S
from falaj.serving.runtime.ensembles.engine import EnsembleEngine
from falaj.serving.runtime.probe import RunCost
from polling import A_MOMENT_S, PATIENCE_S, let_pass

Array = npt.NDArray[Any]
FILE = ServedFile(model="all", version="1")
QUICK = RunCost(0.0001, rows=32, inline_rows=0)


@dataclass
class FunctionEngine:
    """An engine that is a function of its only input, with a cost of the test's choice."""

    function: Callable[[Array], Array]
    cost: RunCost = QUICK
    outputs: tuple[Tensor, ...] = (Tensor(name="y", datatype=Datatype.FP32, shape=(-1, 2)),)
    limits: list[float] = field(default_factory=list)
    closed: int = 0
    in_process: bool = True

    @property
    def model(self) -> ServedModel:
        inputs = (Tensor(name="x", datatype=Datatype.FP32, shape=(-1, 2)),)
        return ServedModel(name="m", version="1", platform="test", inputs=inputs, outputs=self.outputs)

    def run(self, inputs: Sequence[Array], *, limit_s: float = LONGEST_S) -> list[Array]:
        self.limits.append(limit_s)
        return [self.function(inputs[0])]

    def close(self) -> None:
        self.closed += 1


def step(name: str, source: str | tuple[str, ...]) -> ComposedStep:
    return ComposedStep(
        name=name,
        model="m@1",
        inputs={"x": source},
        takes=(TensorSpec(name="x", dtype="float32", shape=(-1, 2)),),
        gives=(TensorSpec(name="y", dtype="float32", shape=(-1, 2)),),
    )


def engine(steps: Sequence[ComposedStep], output: str, **engines: FunctionEngine) -> EnsembleEngine:
    composed = ComposedEnsemble(
        steps=tuple(steps),
        inputs=(TensorSpec(name="x", dtype="float32", shape=(-1, 2)),),
        outputs={"y": output},
        gives=(TensorSpec(name="y", dtype="float32", shape=(-1, 2)),),
    )
    return EnsembleEngine(FILE, composed, engines)


ROWS = np.arange(6, dtype=np.float32).reshape(3, 2)


def test_steps_run_after_what_they_need_whatever_their_order() -> None:
    made = engine(
        [step("last", "middle.y"), step("middle", "first.y"), step("first", "request.x")],
        "last.y",
        first=FunctionEngine(lambda x: x + 1),
        middle=FunctionEngine(lambda x: x * 10),
        last=FunctionEngine(lambda x: x - 3),
    )

    (found,) = made.run([ROWS])

    np.testing.assert_array_equal(found, (ROWS + 1) * 10 - 3)
    assert made.model.platform == "ensemble"


def test_long_steps_that_do_not_need_each_other_run_side_by_side() -> None:
    meeting = threading.Barrier(2, timeout=PATIENCE_S)

    def meet(rows: Array) -> Array:
        meeting.wait()  # breaks unless both are here at once
        return rows

    slow = RunCost(0.01, rows=32, inline_rows=0)
    made = engine(
        [step("one", "request.x"), step("two", "request.x"), step("sum", "one.y")],
        "sum.y",
        one=FunctionEngine(meet, slow),
        two=FunctionEngine(meet, slow),
        sum=FunctionEngine(lambda x: x),
    )

    made.run([ROWS])

    assert not meeting.broken
    assert made.cost.seconds == pytest.approx(0.0101)


def test_short_steps_stay_in_the_thread_of_the_run() -> None:
    threads = []

    def note(rows: Array) -> Array:
        threads.append(threading.current_thread())
        return rows

    made = engine(
        [step("one", "request.x"), step("two", "request.x"), step("last", "two.y")],
        "last.y",
        one=FunctionEngine(note),
        two=FunctionEngine(note),
        last=FunctionEngine(note),
    )

    made.run([ROWS])

    assert set(threads) == {threading.current_thread()}


def test_requests_share_runs_only_if_all_steps_let_them() -> None:
    steps = [step("one", "request.x"), step("two", "one.y")]
    whole = FunctionEngine(lambda x: x, RunCost(0.001, rows=1, inline_rows=0))
    batched = FunctionEngine(lambda x: x, RunCost(0.002, rows=16, inline_rows=16, more_seconds=0.001))

    mixed = engine(steps, "two.y", one=batched, two=whole)
    shared = engine(steps, "two.y", one=batched, two=batched)

    assert (mixed.cost.rows, shared.cost.rows) == (1, 16)
    assert not shared.cost.inline
    assert (shared.cost.seconds, shared.cost.more_seconds) == (0.004, 0.002)


@pytest.mark.parametrize(
    ("raised", "kind", "words"),
    [
        (InvalidInput("a bad value"), InvalidInput, r"^step two \(m@1\): a bad value$"),
        (Unavailable("it ended"), Unavailable, r"^step two \(m@1\): it ended$"),
        (TooLarge("too much memory"), TooLarge, r"^step two \(m@1\): too much memory$"),
        (RuntimeError("boom"), RuntimeError, r"^step two \(m@1\): boom$"),
    ],
)
def test_an_error_keeps_its_kind_and_names_the_step(
    raised: Exception, kind: type[Exception], words: str
) -> None:
    def fail(rows: Array) -> Array:
        raise raised

    made = engine(
        [step("one", "request.x"), step("two", "one.y")],
        "two.y",
        one=FunctionEngine(lambda x: x),
        two=FunctionEngine(fail),
    )

    with pytest.raises(kind, match=words) as found:
        made.run([ROWS])

    assert type(found.value) is kind
    assert (made.runs.failures, made.steps["one"].failures, made.steps["two"].failures) == (1, 0, 1)


def test_the_error_of_a_step_waits_for_those_beside_it() -> None:
    ended = threading.Event()

    def fail(rows: Array) -> Array:
        raise InvalidInput("no")

    def go_on(rows: Array) -> Array:
        ended.wait(A_MOMENT_S)
        ended.set()
        return rows

    slow = RunCost(0.01, rows=32, inline_rows=0)
    made = engine(
        [step("one", "request.x"), step("two", "request.x"), step("last", "two.y")],
        "last.y",
        one=FunctionEngine(fail, slow),
        two=FunctionEngine(go_on, slow),
        last=FunctionEngine(lambda x: x),
    )

    with pytest.raises(InvalidInput, match="step one"):
        made.run([ROWS])

    assert ended.is_set()


def test_steps_share_the_time_limit_of_the_run() -> None:
    def rest(rows: Array) -> Array:
        let_pass(0.05)
        return rows

    first, second = FunctionEngine(rest), FunctionEngine(lambda x: x)
    made = engine([step("one", "request.x"), step("two", "one.y")], "two.y", one=first, two=second)

    made.run([ROWS], limit_s=PATIENCE_S)
    with pytest.raises(Unavailable, match=r"step two \(m@1\): the time limit of 0.02 s was over"):
        made.run([ROWS], limit_s=0.02)

    assert 0 < second.limits[0] < PATIENCE_S - 0.04
    assert len(second.limits) == 1


def test_a_step_that_leaves_out_rows_is_refused() -> None:
    made = engine(
        [step("one", "request.x"), step("two", "one.y")],
        "two.y",
        one=FunctionEngine(lambda x: x[:-1]),
        two=FunctionEngine(lambda x: x),
    )

    with pytest.raises(
        InvalidInput, match=r"step one \(m@1\): it answered y with the shape \[2, 2\] for 3 rows"
    ):
        made.run([ROWS])


def test_a_step_that_answers_another_width_is_refused_by_the_next() -> None:
    free = (Tensor(name="y", datatype=Datatype.FP32, shape=(-1, -1)),)
    made = engine(
        [step("one", "request.x"), step("two", "one.y")],
        "two.y",
        one=FunctionEngine(lambda x: np.concatenate([x, x], axis=1), outputs=free),
        two=FunctionEngine(lambda x: x),
    )

    with pytest.raises(
        InvalidInput, match=r"step two .* got the shape \[3, 4\] from one.y; allowed \[-1, 2\]"
    ):
        made.run([ROWS])


def test_a_version_whose_file_has_other_tensors_is_not_opened() -> None:
    other = (Tensor(name="z", datatype=Datatype.FP32, shape=(-1, 2)),)

    with pytest.raises(InvalidInput, match=r"step one \(m@1\) outputs"):
        engine([step("one", "request.x")], "one.y", one=FunctionEngine(lambda x: x, outputs=other))


def test_closing_ends_every_step() -> None:
    one, two = FunctionEngine(lambda x: x), FunctionEngine(lambda x: x)
    made = engine([step("one", "request.x"), step("two", "one.y")], "two.y", one=one, two=two)

    made.close()

    assert (one.closed, two.closed) == (1, 1)
