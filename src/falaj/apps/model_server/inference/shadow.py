"""Shadow traffic: versions that get copies of answered requests, and whose outputs are compared and never sent.

Copies are taken after the answers are written, and run in one thread, while no request waits. Those that cannot run
soon are dropped and counted: a shadow costs answers nothing but the processor time of its runs.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from random import Random
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from falaj.errors import shorten
from falaj.records.serving.endpoints import SHADOW
from falaj.records.serving.shadows import OutputDifference, ShadowCounts
from falaj.records.serving.statistics import BOUNDS_S
from falaj.serving.dependencies import PredictedBatch, PredictionSink
from falaj.serving.deployment_state import ServedEndpoint
from falaj.serving.runtime.batch_queue import BatchQueue
from falaj.serving.scores import LARGEST, merge_counts

Array = npt.NDArray[Any]

MAX_COPIES, MAX_COPIED_BYTES = 1024, 32 * 2**20
"""Batches whose copies may wait, and the bytes of their arrays; more are dropped."""
MAX_AGE_S = 1.0
"""A copy that has waited for longer is dropped."""
GATHER_S = 0.01
"""How long the thread lets copies gather, to run them together."""
PAUSE_S = 0.005
"""How long the thread waits where requests wait."""
RUN_LIMIT_S = 10.0

_log = logging.getLogger(__name__)


class CopiedRequest(Protocol):
    """A request that was answered."""

    inputs: Sequence[Array]
    request_facts: tuple[str, str, str]
    """The endpoint, the request id and the caller."""
    name: str
    """The id of the prediction."""


class ShadowPlan(NamedTuple):
    """A shadow of an endpoint, and its share of the requests."""

    endpoint: str
    share: float
    queue: BatchQueue
    served: ServedEndpoint

    @property
    def version(self) -> str:
        return self.queue.model.version


class CopiedBatch(NamedTuple):
    """Requests of an answered batch that a shadow is to answer too; `rows` are theirs in the arrays."""

    plan: ShadowPlan
    against: BatchQueue
    inputs: Sequence[Array]
    outputs: Sequence[Array]
    rows: list[slice]
    facts: list[tuple[str, str]]
    """The predictions that answered them, and their callers."""
    run_s: tuple[float, ...]
    """How long the version that answered took, for each of its runs."""
    at: float

    @property
    def row_shapes(self) -> list[tuple[int, ...]]:
        return [array.shape[1:] for array in (*self.inputs, *self.outputs)]

    @property
    def size_bytes(self) -> int:
        return sum(array.nbytes for array in (*self.inputs, *self.outputs))


class ShadowRunner:
    """Runs shadows in a thread, and counts how their outputs differ. `offer` and `update` run on the event loop."""

    def __init__(
        self, sink: PredictionSink, outcomes: Counter[tuple[str, str, str]], *, random: Random | None = None
    ) -> None:
        """`outcomes` counts copies by endpoint, version, and what became of them: compared, failed or dropped."""
        self._sink = sink
        self._outcomes = outcomes
        self._random = (random or Random()).random  # noqa: S311 - a sample
        self._loop = asyncio.get_running_loop()
        self._copies: deque[CopiedBatch] = deque()
        self._bytes = 0
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, str, str], ShadowCounts] = {}
        self._wakeup = threading.Event()
        self._stopped = False
        self._thread: threading.Thread | None = None
        self._answering: Sequence[BatchQueue] = ()
        self.plans: Mapping[str, Sequence[ShadowPlan]] = {}
        """The shadows by endpoint; usually none."""

    def update(self, served: Mapping[str, ServedEndpoint]) -> None:
        """Copy requests as the routes of `served` say."""
        plans: dict[str, list[ShadowPlan]] = {}
        for found in served.values():
            known = found.endpoint.id or found.endpoint.name
            for route in found.endpoint.routes:
                if route.shadow:
                    plan = ShadowPlan(known, route.shadow / 100, found.queues[route.version], found)
                    plans.setdefault(known, []).append(plan)
        queues = {id(queue): queue for found in served.values() for queue in found.queues.values()}
        self._answering = tuple(queues.values())
        self.plans = plans
        if plans and self._thread is None:
            self._thread = threading.Thread(target=self._work, name="shadows", daemon=True)
            self._thread.start()

    def offer(
        self,
        queue: BatchQueue,
        requests: Sequence[CopiedRequest],
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        run_s: float,
    ) -> None:
        """Copy a share of an answered batch."""
        chosen: dict[int, CopiedBatch] = {}
        at, now = 0, time.monotonic()
        for request in requests:
            end = at + (len(request.inputs[0]) if request.inputs[0].ndim else 1)
            endpoint, _, caller = request.request_facts
            for plan in self.plans.get(endpoint, ()):
                if plan.share >= 1 or self._random() < plan.share:
                    copy = chosen.get(id(plan))
                    if copy is None:
                        copy = CopiedBatch(plan, queue, inputs, outputs, [], [], (run_s,), now)
                        chosen[id(plan)] = copy
                    copy.rows.append(slice(at, end))
                    copy.facts.append((request.name, caller))
            at = end
        for copy in chosen.values():
            self._enqueue(copy)

    def take_counts(self, endpoint: str) -> list[ShadowCounts]:
        """Return the counts of an endpoint since the last call."""
        with self._lock:
            return [self._counts.pop(key) for key in list(self._counts) if key[0] == endpoint]

    def give_back(self, endpoint: str, counts: Sequence[ShadowCounts]) -> None:
        """Keep counts that could not be reported for the next call of `take_counts`."""
        for each in counts:
            self._add(endpoint, each)

    def stop(self) -> None:
        """End the thread after its current run."""
        self._stopped = True
        self._wakeup.set()
        if self._thread is not None:
            self._thread.join(RUN_LIMIT_S)

    def _enqueue(self, copy: CopiedBatch) -> None:
        if len(self._copies) >= MAX_COPIES or self._bytes + copy.size_bytes > MAX_COPIED_BYTES:
            self._drop(copy)
            return
        with self._lock:
            self._bytes += copy.size_bytes
        self._copies.append(copy)
        if not self._wakeup.is_set():
            self._wakeup.set()

    def _drop(self, copy: CopiedBatch) -> None:
        self._count(copy, "dropped", ShadowCounts(**_pair(copy), dropped=len(copy.rows)))

    def _count(self, copy: CopiedBatch, outcome: str, counts: ShadowCounts) -> None:
        with self._lock:
            self._outcomes[copy.plan.endpoint, copy.plan.version, outcome] += len(copy.rows)
        self._add(copy.plan.endpoint, counts)

    def _add(self, endpoint: str, counts: ShadowCounts) -> None:
        key = endpoint, counts.version, counts.against
        with self._lock:
            known = self._counts.get(key)
            self._counts[key] = counts if known is None else merge_counts(known, counts)

    # ------------------------------------------------------------------------------------ the one thread

    def _work(self) -> None:
        while not self._stopped:
            self._wakeup.wait()
            time.sleep(GATHER_S)
            self._wakeup.clear()
            while self._copies and not self._stopped:
                if any(queue.waiting for queue in self._answering) and not self._is_late(self._copies[0]):
                    time.sleep(PAUSE_S)
                    continue
                try:
                    self._take(self._gathered())
                except Exception:
                    _log.exception("copies of requests for a shadow are lost")

    def _gathered(self) -> CopiedBatch:
        """Return the oldest copies that the shadow can take in one run."""
        first = self._popped()
        most, rows = first.plan.queue.engine.cost.rows, sum(map(_length, first.rows))
        taken, arrays = [first], (*first.inputs, *first.outputs)
        has_rows = all(array.ndim and len(array) == len(arrays[0]) for array in arrays)
        if most == 1 or rows >= most or not has_rows:
            return first
        while self._copies:
            other = self._copies[0]
            rows += sum(map(_length, other.rows))
            is_alike = other.plan is first.plan and other.against is first.against
            if not is_alike or rows > most or other.row_shapes != first.row_shapes:
                break
            taken.append(self._popped())
        return first if len(taken) == 1 else _merged(taken)

    def _popped(self) -> CopiedBatch:
        copy = self._copies.popleft()
        with self._lock:
            self._bytes -= copy.size_bytes
        return copy

    def _is_late(self, copy: CopiedBatch) -> bool:
        return time.monotonic() - copy.at > MAX_AGE_S

    def _take(self, copy: CopiedBatch) -> None:
        if self._is_late(copy):
            self._drop(copy)
            return
        try:
            _require_alike(copy)
            for rows, facts, inputs, outputs in _parts(copy):
                self._run(copy, rows, facts, inputs, outputs)
        except Exception as error:
            problem = shorten(str(error), limit=900)
            failed = ShadowCounts(**_pair(copy), errors=len(copy.rows), problem=problem)
            self._count(copy, "failed", failed)

    def _run(
        self,
        copy: CopiedBatch,
        rows: Sequence[slice],
        facts: Sequence[tuple[str, str]],
        inputs: list[Array],
        answered: list[Array],
    ) -> None:
        began = time.perf_counter()
        outputs = copy.plan.queue.engine.run(inputs, limit_s=RUN_LIMIT_S)
        seconds = time.perf_counter() - began
        counts = ShadowCounts(
            **_pair(copy),
            requests=len(rows),
            rows=sum(each.stop - each.start for each in rows),
            latency=_buckets((seconds,)),
            against_latency=_buckets(copy.run_s),
            outputs=tuple(_compare(copy, outputs, answered)),
        )
        part = copy._replace(rows=list(rows))
        self._count(part, "compared", counts)
        self._log(copy, rows, facts, inputs, outputs)

    def _log(
        self,
        copy: CopiedBatch,
        rows: Sequence[slice],
        facts: Sequence[tuple[str, str]],
        inputs: list[Array],
        outputs: list[Array],
    ) -> None:
        """Log what the shadow predicted, under a version of its own."""
        plan, version = copy.plan, copy.plan.version + SHADOW
        idents = [self._sink.next_id(plan.endpoint, version) for _ in facts]
        if not all(idents):
            return
        answered, callers = zip(*facts, strict=True)
        counts = [each.stop - each.start for each in rows]
        model = plan.queue.model.model_copy(update={"version": version})
        now = datetime.now(UTC)
        batch = PredictedBatch(model, now, plan.endpoint, idents, counts, callers, answered, inputs, outputs)
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._sink.add, batch)


def _pair(copy: CopiedBatch) -> dict[str, Any]:
    return {"version": copy.plan.version, "against": copy.against.model.version}


def _require_alike(copy: CopiedBatch) -> None:
    """Raise ValueError unless the shadow takes the arrays that the other version took."""
    one, other = copy.against.model, copy.plan.queue.model
    if one.inputs != other.inputs:
        given = ", ".join(map(str, other.inputs))
        raise ValueError(f"its inputs are {given}; {one.version} takes {', '.join(map(str, one.inputs))}")
    joins = copy.plan.served.joins
    if joins.get(one.version) != joins.get(other.version):
        raise ValueError(f"its looked up columns are others than those of {one.version}")


Part = tuple[list[slice], list[tuple[str, str]], list[Array], list[Array]]


def _parts(copy: CopiedBatch) -> Iterator[Part]:
    """Yield the copied requests in parts that the shadow takes in one run, with their own arrays."""
    most = copy.plan.queue.engine.cost.rows
    is_whole = len(copy.rows) == 1 and copy.rows[0].start == 0  # arrays of a lone request may have no rows
    if is_whole and all(not each.ndim or len(each) == copy.rows[0].stop for each in copy.inputs):
        yield copy.rows, copy.facts, list(copy.inputs), list(copy.outputs)
        return
    start = 0
    while start < len(copy.rows):
        stop, rows = start + 1, _length(copy.rows[start])
        while most > 1 and stop < len(copy.rows) and rows + _length(copy.rows[stop]) <= most:
            rows += _length(copy.rows[stop])
            stop += 1
        taken = copy.rows[start:stop]
        arrays = [
            [
                array[taken[0]] if len(taken) == 1 else np.concatenate([array[each] for each in taken])
                for array in side
            ]
            for side in (copy.inputs, copy.outputs)
        ]
        yield list(_renumbered(taken)), copy.facts[start:stop], arrays[0], arrays[1]
        start = stop


def _length(rows: slice) -> int:
    return int(rows.stop - rows.start)


def _renumbered(rows: Sequence[slice]) -> Iterator[slice]:
    at = 0
    for each in rows:
        yield slice(at, at + _length(each))
        at += _length(each)


def _compare(
    copy: CopiedBatch, outputs: Sequence[Array], answered: Sequence[Array]
) -> Iterator[OutputDifference]:
    """Yield the differences of the outputs that both versions have. Raise ValueError if there is none."""
    names = [tensor.name for tensor in copy.against.model.outputs]
    known = dict(zip(names, answered, strict=True))
    found = False
    for tensor, array in zip(copy.plan.queue.model.outputs, outputs, strict=True):
        if tensor.name in known:
            found = True
            yield compare_output(tensor.name, known[tensor.name], array)
    if not found:
        raise ValueError(f"it has none of the outputs {', '.join(names)}")


def _merged(copies: Sequence[CopiedBatch]) -> CopiedBatch:
    """Return copies of the same shadow as one, with the rows that were copied alone."""
    first, sides = copies[0], []
    for side in ("inputs", "outputs"):
        columns = zip(*(getattr(copy, side) for copy in copies), strict=True)
        rows = [copy.rows for copy in copies]
        sides.append(
            [
                np.concatenate([array[each] for array, own in zip(column, rows, strict=True) for each in own])
                for column in columns
            ]
        )
    return first._replace(
        inputs=sides[0],
        outputs=sides[1],
        rows=list(_renumbered([each for copy in copies for each in copy.rows])),
        facts=[each for copy in copies for each in copy.facts],
        run_s=tuple(run_s for copy in copies for run_s in copy.run_s),
    )


def _buckets(seconds: Sequence[float]) -> tuple[int, ...]:
    found = [0] * (len(BOUNDS_S) + 1)
    for each in seconds:
        found[bisect_left(BOUNDS_S, each)] += 1
    return tuple(found)


def compare_output(output: str, one: Array, other: Array) -> OutputDifference:
    """Return the difference of two arrays. Raise ValueError unless they have the same shape and kind."""
    if one.shape != other.shape or (one.dtype.kind in "OSU") != (other.dtype.kind in "OSU"):
        raise ValueError(
            f"output '{output}': {other.dtype} {list(other.shape)}, where {one.dtype} {list(one.shape)} was answered"
        )
    found = {"output": output} | _classes(one, other)
    return OutputDifference(**found if one.dtype.kind in "OSU" else found | _numbers(one, other))


def _numbers(one: Array, other: Array) -> dict[str, Any]:
    a, b = one.astype(np.float64).ravel(), other.astype(np.float64).ravel()
    finite = np.isfinite(a) & np.isfinite(b)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(over="ignore"):
        apart = np.minimum(np.abs(a[finite] - b[finite]), LARGEST)
        total = float(apart.sum())
    return {
        "values": int(finite.sum()),
        "sum_difference": min(total, LARGEST),
        "max_difference": float(apart.max(initial=0.0)),
        "not_finite": int((~finite & ~same).sum()),
    }


def _classes(one: Array, other: Array) -> dict[str, Any]:
    """Return how many classes were compared and differ; none where an output is a plain number."""
    if one.dtype.kind != "f":
        differs = one != other
    elif one.ndim > 1 and one.shape[-1] > 1:
        differs = one.argmax(axis=-1) != other.argmax(axis=-1)
    elif one.size and all(((each >= 0) & (each <= 1)).all() for each in (one, other)):
        differs = (one >= 0.5) != (other >= 0.5)
    else:
        return {}
    return {"classes": int(differs.size), "disagreeing": int(differs.sum())}
