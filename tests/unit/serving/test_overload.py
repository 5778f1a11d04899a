"""Overload: how long requests may wait, whose turn it is, and what is dropped before it runs."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from falaj.errors import DeadlineExceeded, FalajError, Overloaded
from falaj.records.serving.tensors import Datatype, ServedModel, Tensor
from falaj.serving.runtime.batch_queue import BatchQueue
from falaj.serving.runtime.probe import RunCost
from falaj.serving.runtime.queue_limit import QueueLimit
from falaj.serving.runtime.waiting_requests import Waiting, WaitingRequests
from polling import PATIENCE_S


class StubRequest:
    """A request that notes how it was answered."""

    def __init__(
        self,
        name: str = "",
        *,
        caller: str = "vera",
        priority: int = 0,
        deadline: float | None = None,
        rows: int = 1,
    ) -> None:
        self.name = name
        self.caller, self.priority, self.deadline = caller, priority, deadline
        self.inputs = [np.full((rows, 2), 1, np.float32)]
        self.cancelled = False
        self.error: FalajError | None = None
        self.done = asyncio.Event()

    def render(self, outputs: Sequence[Any]) -> None: ...

    def complete(self, error: FalajError | None) -> None:
        self.error = error
        self.done.set()


class HeldEngine:
    """An engine whose runs end when the test says so."""

    in_process = True

    def __init__(self, *, seconds: float = 0.002, rows: int = 1) -> None:
        tensor = Tensor(name="x", datatype=Datatype.FP32, shape=(-1, 2))
        self.model = ServedModel(name="m", version="1", platform="stub", inputs=(tensor,), outputs=(tensor,))
        self.cost = RunCost(seconds, rows=rows, inline_rows=0)
        self.may_end = threading.Semaphore(0)
        self.runs: list[int] = []

    def run(self, inputs: Sequence[Any], *, limit_s: float = 60) -> list[Any]:
        self.runs.append(len(inputs[0]))
        assert self.may_end.acquire(timeout=PATIENCE_S)
        return list(inputs)

    def close(self) -> None: ...


def on_a_queue(
    engine: HeldEngine, act: Callable[[BatchQueue], Coroutine[Any, Any, None]], **options: Any
) -> None:
    """Run `act` with a queue of one thread, whose runs all end afterwards."""

    async def main() -> None:
        with ThreadPoolExecutor(1) as pool:
            queue = BatchQueue(engine, pool=pool, threads=1, **options)
            try:
                await asyncio.wait_for(act(queue), PATIENCE_S)
            finally:
                engine.may_end.release(10_000)

    asyncio.run(main())


# -------------------------------------------------------------------------------------- whose turn it is


def order(*requests: StubRequest) -> list[str]:
    waiting: WaitingRequests[StubRequest] = WaitingRequests()
    for request in requests:
        waiting.add(Waiting(request, len(request.inputs[0]), 0.001 * len(request.inputs[0]), 0.0))
    return [item.request.name for item in waiting.remove_all()]


def test_requests_of_one_caller_keep_their_order() -> None:
    assert order(*(StubRequest(str(n)) for n in range(5))) == ["0", "1", "2", "3", "4"]


def test_callers_take_turns() -> None:
    flood = [StubRequest(f"f{n}", caller="flood") for n in range(4)]
    few = [StubRequest(f"v{n}") for n in range(2)]

    assert order(*flood, *few) == ["f0", "v0", "f1", "v1", "f2", "f3"]


def test_turns_go_by_work_not_by_requests() -> None:
    large = [StubRequest(f"L{n}", caller="large", rows=10) for n in range(3)]
    small = [StubRequest(f"s{n}") for n in range(12)]

    found = order(*large, *small)

    assert found.index("L1") == 11  # after ten small ones
    assert found.index("L2") > found.index("s10")


def test_lower_numbers_run_first_and_none_overtakes_the_default() -> None:
    requests = [
        *(StubRequest("batch", priority=7), StubRequest("later", priority=2)),
        *(StubRequest("default"), StubRequest("first", priority=1)),
    ]

    assert order(*requests) == ["default", "first", "later", "batch"]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.integers(1, 5)), max_size=60))
def test_what_waits_is_what_was_added(drawn: list[tuple[str, int, int]]) -> None:
    waiting: WaitingRequests[StubRequest] = WaitingRequests()
    random, taken = Random(len(drawn)), []
    for number, (caller, priority, rows) in enumerate(drawn):
        request = StubRequest(str(number), caller=caller, priority=priority)
        waiting.add(Waiting(request, rows, rows * 0.001, 0.0))
        if random.random() < 0.4:
            taken.append(waiting.take().request.name)
        assert waiting.work_s == pytest.approx(sum(item.work_s for item in waiting))

    taken += [item.request.name for item in waiting.remove_all()]

    assert sorted(taken) == sorted(str(n) for n in range(len(drawn)))
    assert (len(waiting), waiting.work_s) == (0, 0.0)


# --------------------------------------------------------------------------------- how long it may wait


class SimulatedModel:
    """Two instances that take 2 ms a request, and the queue before them, in simulated time."""

    run_s = 0.002

    def __init__(self, seed: int = 1, **options: Any) -> None:
        self.limit = QueueLimit(run_s=self.run_s, instances=2, **options)
        self.now = 0.0
        self.random = Random(seed)
        self.waiting: list[float] = []
        self.free_at = [0.0, 0.0]
        self.waits: list[tuple[float, float]] = []
        self.refused: list[float] = []

    def arrive(self, seconds: float, *, per_second: float) -> None:
        """Let requests arrive at random for some seconds."""
        until = self.now + seconds
        while self.now < until:
            self.now += self.random.expovariate(per_second)
            self.work()
            self.submit()

    def submit(self) -> None:
        waiting_s = len(self.waiting) * self.run_s
        if waiting_s > self.limit.work_s:
            self.limit.judge(waiting_s, self.now)
        if waiting_s > self.limit.work_s:
            self.limit.refused(self.run_s, self.now)
            self.refused.append(self.now)
        else:
            self.waiting.append(self.now)

    def work(self) -> None:
        while self.waiting and min(self.free_at) <= self.now:
            instance = self.free_at.index(min(self.free_at))
            since = self.waiting.pop(0)
            start = max(self.free_at[instance], since)
            if start - since > self.limit.max_wait_s:
                self.limit.refused(self.run_s, start)
                self.refused.append(start)
                continue
            self.waits.append((start, start - since))
            self.free_at[instance] = start + self.run_s
            self.limit.ran(self.run_s, expected_s=self.run_s, took_s=self.run_s)
            self.limit.judge(len(self.waiting) * self.run_s, start)

    def p99(self, since: float = 0.0) -> float:
        found = sorted(wait for at, wait in self.waits if at >= since)
        return found[len(found) * 99 // 100]


def test_accepted_requests_keep_their_latency_in_overload() -> None:
    model = SimulatedModel()
    model.arrive(5, per_second=600)
    assert not model.refused
    normal_s = model.p99() + model.run_s

    model.arrive(20, per_second=3000)

    assert model.p99(since=5) + model.run_s < 3 * normal_s
    assert len(model.refused) == pytest.approx(20 * 2000, rel=0.05)
    assert len([at for at, _ in model.waits if at > 5]) == pytest.approx(20 * 1000, rel=0.02)


def test_it_recovers_at_once_after_overload() -> None:
    model = SimulatedModel()
    model.arrive(10, per_second=3000)
    model.refused.clear()

    model.arrive(0.1, per_second=700)
    model.refused.clear()
    model.arrive(5, per_second=700)

    assert not model.refused
    assert not model.limit.is_overloaded


def test_a_burst_is_answered_whole() -> None:
    model = SimulatedModel()

    for _ in range(200):
        model.submit()
    model.arrive(2, per_second=500)

    assert not model.refused


def test_clients_that_wait_for_their_answers_are_never_refused() -> None:
    """64 of them keep 62 requests waiting; the queue is long, but it does not grow."""
    model = SimulatedModel()
    for _ in range(64):
        model.submit()

    for _ in range(5000):
        model.now += model.run_s
        answered = len(model.waits)
        model.work()
        for _ in range(len(model.waits) - answered):
            model.submit()

    assert not model.refused
    assert not model.limit.is_overloaded


@pytest.mark.parametrize("load", [1.05, 1.3, 10])
def test_any_overload_is_noticed_in_the_end(load: float) -> None:
    model = SimulatedModel()

    model.arrive(40, per_second=1000 * load)

    assert model.p99() < 1.0
    assert model.limit.is_overloaded or model.refused


def test_the_limit_of_the_operator_holds_always() -> None:
    model = SimulatedModel(max_queue_s=0.2)

    model.arrive(20, per_second=3000)

    assert max(wait for _, wait in model.waits) <= 0.2
    assert model.p99() > 0.1


def test_a_model_that_becomes_slower_gets_a_shorter_queue() -> None:
    limit = QueueLimit(run_s=0.002, instances=2, max_queue_s=0.1)
    before = limit.work_s

    for _ in range(100):
        limit.ran(0.002, expected_s=0.002, took_s=0.02)

    assert limit.work_s == pytest.approx(before / 10, rel=0.01)
    assert limit.retry_after_s(2.0) == 10


# ------------------------------------------------------------------------------------ the batch queue


def fill(queue: BatchQueue, *, caller: str = "vera") -> tuple[int, Overloaded]:
    """Submit requests until one is refused; return how many were accepted, and the refusal."""
    for accepted in range(1000):
        try:
            queue.submit(StubRequest(caller=caller))
        except Overloaded as refused:
            return accepted, refused
    raise AssertionError("nothing was refused")


def test_what_cannot_be_answered_in_time_is_refused_at_once() -> None:
    engine = HeldEngine(seconds=0.01)

    async def act(queue: BatchQueue) -> None:
        accepted, refused = fill(queue)

        assert 5 <= accepted <= 12  # a tenth of a second
        assert f"m@1 is overloaded: {accepted} requests wait for it" in refused.message
        assert refused.details == {"retry_after_s": 1}
        assert (queue.refused, queue.waiting) == (1, accepted)

    on_a_queue(engine, act, max_queue_s=0.1)


def test_a_caller_who_floods_does_not_keep_others_out() -> None:
    engine = HeldEngine(seconds=0.01)

    async def act(queue: BatchQueue) -> None:
        fill(queue, caller="flood")

        queue.submit(first := StubRequest(caller="vera"))
        engine.may_end.release(3)
        await first.done.wait()

        assert first.error is None
        assert len(engine.runs) <= 4

    on_a_queue(engine, act, max_queue_s=0.1)


@pytest.mark.parametrize("rows", [1, 32])
def test_expired_requests_are_answered_and_not_run(rows: int) -> None:
    engine = HeldEngine(rows=rows)

    async def act(queue: BatchQueue) -> None:
        now = asyncio.get_running_loop().time()
        queue.submit(StubRequest())
        await asyncio.sleep(0)
        late = StubRequest(deadline=now + 0.01)
        queue.submit(late)
        queue.submit(patient := StubRequest(deadline=now + PATIENCE_S))

        await late.done.wait()  # although the model still runs
        assert isinstance(late.error, DeadlineExceeded)
        assert "it was not run" in late.error.message
        engine.may_end.release(2)
        await patient.done.wait()

        assert patient.error is None
        assert engine.runs == [1, 1]
        assert queue.expired == 1

    on_a_queue(engine, act)


def test_nobody_waits_for_a_model_that_hangs() -> None:
    engine = HeldEngine()

    async def act(queue: BatchQueue) -> None:
        requests = [StubRequest() for _ in range(10)]
        for request in requests:
            queue.submit(request)
            await asyncio.sleep(0)

        await asyncio.gather(*(request.done.wait() for request in requests[1:]))

        assert {type(request.error) for request in requests[1:]} == {Overloaded}
        assert not requests[0].done.is_set()

    on_a_queue(engine, act, max_queue_s=0.05)


def test_urgent_requests_run_first() -> None:
    engine, answered = HeldEngine(), []

    async def act(queue: BatchQueue) -> None:
        requests = [StubRequest(str(n), priority=n) for n in (5, 3, 0, 4)]
        queue.submit(StubRequest("running"))
        await asyncio.sleep(0)
        for request in requests:
            queue.submit(request)
        engine.may_end.release(5)
        await asyncio.gather(*(request.done.wait() for request in requests))

    def note(queue: BatchQueue, batch: Sequence[Any], *_: object) -> None:
        answered.extend(request.name for request in batch)

    on_a_queue(engine, act, answered=note)
    assert answered == ["running", "0", "3", "4", "5"]


def test_a_batch_delay_collects_requests() -> None:
    engine = HeldEngine(rows=8)
    engine.may_end.release(10)

    async def act(queue: BatchQueue) -> None:
        requests = [StubRequest() for _ in range(4)]
        for request in requests:
            queue.submit(request)
            await asyncio.sleep(0)
        await asyncio.gather(*(request.done.wait() for request in requests))
        assert engine.runs == [4]

    on_a_queue(engine, act, batch_delay_s=1.0)


def test_a_full_batch_is_not_delayed() -> None:
    engine = HeldEngine(rows=8)
    engine.may_end.release(10)

    async def act(queue: BatchQueue) -> None:
        for request in (full := [StubRequest() for _ in range(8)]):
            queue.submit(request)
        await asyncio.gather(*(request.done.wait() for request in full))
        assert engine.runs == [8]

    on_a_queue(engine, act, batch_delay_s=2 * PATIENCE_S)


def test_callers_share_a_batch() -> None:
    engine = HeldEngine(rows=4)
    engine.may_end.release(10)
    seen: list[Counter[str]] = []

    async def act(queue: BatchQueue) -> None:
        requests = [StubRequest(caller="flood") for _ in range(12)] + [StubRequest() for _ in range(2)]
        for request in requests:
            queue.submit(request)
        await asyncio.gather(*(request.done.wait() for request in requests))

    def note(queue: BatchQueue, batch: Sequence[Any], *_: object) -> None:
        seen.append(Counter(request.caller for request in batch))

    on_a_queue(engine, act, answered=note)
    assert seen[0] == {"flood": 2, "vera": 2}
