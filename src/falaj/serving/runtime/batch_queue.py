"""Dynamic batching: a queue per model version. Requests of one event loop iteration run as one batch."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from math import prod
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt

from falaj.errors import DeadlineExceeded, FalajError, InvalidInput, Overloaded, Unavailable
from falaj.records.serving.endpoints import ServedFile
from falaj.records.serving.settings import MeasuredVersion
from falaj.records.serving.tensors import DYNAMIC, Datatype, Tensor
from falaj.serving.runtime.engine import LONGEST_S, QUICK_S, ModelEngine
from falaj.serving.runtime.probe import DYNAMIC_SIZE
from falaj.serving.runtime.queue_limit import QueueLimit
from falaj.serving.runtime.waiting_requests import Waiting, WaitingRequests
from falaj.serving.signatures import Signature

Array = npt.NDArray[Any]
T = TypeVar("T")

MAX_WAITING = 4096
"""Requests that may wait for one model version, however quick it is."""
MAX_INLINE_S = 0.25
"""A model that has blocked the event loop for longer never runs there again."""
INLINE_CHARACTERS = 8192
"""Characters in the texts of a batch on the event loop."""

_log = logging.getLogger(__name__)


class QueuedRequest(Protocol):
    """A request in a batch queue."""

    inputs: Sequence[Array]
    cancelled: bool
    """The client no longer waits for the response."""
    caller: str
    """Callers take turns when requests have to wait."""
    priority: int
    """Lower numbers run first. 0 is the default, and stands for 1."""
    deadline: float | None
    """Event loop time after which the request is answered with an error and not run; None: no such time."""

    def render(self, outputs: Sequence[Array]) -> None:
        """Encode the response; may run in a thread."""

    def complete(self, error: FalajError | None) -> None:
        """Send the response or the error; runs on the event loop."""


@runtime_checkable
class BatchRenderer(Protocol):
    """A request that can encode the responses of a whole batch, whose first request it is."""

    def render_batch(self, batch: Sequence[Any], outputs: Sequence[Array]) -> bool:
        """Encode all responses at once; false if each must be rendered. May run in a thread."""


class OnBatchAnswered(Protocol):
    """Called with each answered batch and its arrays; runs on the event loop."""

    def __call__(
        self,
        queue: BatchQueue,
        requests: Sequence[QueuedRequest],
        inputs: Sequence[Array],
        outputs: Sequence[Array],
    ) -> None: ...


Batch = list[QueuedRequest]
Result = tuple[list[Array], list[Array]]
"""Inputs and outputs of a run."""


class BatchQueue:
    """The queue of one model version. A fast model runs on the event loop, a slow one in the thread pool."""

    def __init__(
        self,
        engine: ModelEngine,
        *,
        pool: Executor,
        threads: int,
        answered: OnBatchAnswered | None = None,
        most_waiting: int | None = None,
        max_queue_s: float | None = None,
        batch_delay_s: float = 0.0,
        timeout_s: float = LONGEST_S,
    ) -> None:
        """`threads` run at a time; a batch that is not full waits `batch_delay_s` for more requests."""
        self.engine = engine
        self.model = engine.model
        self.signature = Signature(engine.model)
        self.batches = 0
        self.rows = 0
        self.refused = 0
        """Requests that were refused because of too many others."""
        self.expired = 0
        """Requests whose deadline had passed before they could run."""
        self.queued_s = 0.0
        """How long requests have waited for a thread, together; what runs on the event loop waits for no more than one
        iteration of it."""
        self._loop = asyncio.get_running_loop()
        self._pool = pool
        self._answered = answered
        self._free_threads = self._instances = threads
        self._inline_rows = engine.cost.inline_rows
        self._inline_limits = [_inline_limit(tensor) for tensor in engine.model.inputs]
        self._has_texts = any(tensor.datatype is Datatype.BYTES for tensor in engine.model.inputs)
        self._only_rows = (
            self._inline_limits == [0]
            and engine.model.inputs[0].shape[:1] == (DYNAMIC,)
            and not self._has_texts
        )
        """A request chooses the rows of one input, and nothing else: the usual case, checked the fastest."""
        self._delay_s = batch_delay_s
        self._timeout_s = timeout_s
        self._limit = QueueLimit(
            run_s=engine.cost.seconds,
            instances=1 if engine.cost.inline else threads,
            max_queue_s=max_queue_s,
            now=self._loop.time(),
        )
        self._row_work_s = engine.cost.of_request(1)
        self._capacity = most_waiting or MAX_WAITING
        self._new: deque[tuple[QueuedRequest, int]] = deque()
        """Requests of this iteration of the event loop, with their rows; those that have to wait take turns."""
        self._new_s = 0.0
        self._waiting: WaitingRequests[QueuedRequest] = WaitingRequests()
        self._scheduled = False
        self._delayed: asyncio.TimerHandle | None = None
        self._check: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> int:
        return len(self._waiting) + len(self._new)

    @property
    def is_overloaded(self) -> bool:
        return self._limit.is_overloaded

    def measured(self, file: ServedFile) -> MeasuredVersion:
        """Return how the model runs, and what was measured when it was loaded."""
        cost = self.engine.cost
        return MeasuredVersion(
            version=file.version,
            run_ms=round(1000 * cost.seconds, 4),
            row_ms=round(1000 * cost.more_seconds, 4),
            batch_rows=cost.rows,
            instances=self._instances,
            threads=min(file.settings.threads or 1, os.cpu_count() or 1),
            max_queue_ms=round(1000 * self._limit.max_wait_s, 3),
            place="process" if not self.engine.in_process else "event loop" if cost.inline else "threads",
        )

    @property
    def is_idle(self) -> bool:
        """Return whether a quick batch would run now: nothing waits, and the model runs on the event loop."""
        return bool(self._inline_rows) and not self._waiting.size and not self._delay_s

    def run_now(self, inputs: list[Array]) -> list[Array] | None:
        """Return the outputs for rows of an idle queue, run on the event loop; None if they are to be submitted."""
        rows = len(inputs[0])
        if not self.is_idle or not self._only_rows or rows > self.engine.cost.rows:
            return None
        try:
            outputs = self._timed(partial(self.engine.run, inputs, limit_s=QUICK_S))
        except Exception:  # whose rows failed, and why, is found by running each request alone
            return None
        if any(len(array) != rows for array in outputs):
            return None
        self.batches += 1
        self.rows += rows
        return outputs

    def submit(self, request: QueuedRequest) -> None:
        """Queue `request` for the next batch. Raise Overloaded if it would have to wait for too long."""
        first = request.inputs[0]
        rows = len(first) if first.ndim else 1
        work_s = self._row_work_s if rows == 1 else self.engine.cost.of_request(rows)
        waiting, new = self._waiting, self._new
        if waiting.work_s + self._new_s > self._limit.work_s or waiting.size + len(new) >= self._capacity:
            self._require_place(request, work_s)
        new.append((request, rows))
        self._new_s += work_s
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._run_waiting)

    def close(self) -> None:
        """End the threads and the process of the model, if it has one; what still runs there fails."""
        for timer in (self._check, self._delayed):
            if timer is not None:
                timer.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self.engine.close()

    def _require_place(self, request: QueuedRequest, work_s: float) -> None:
        """Raise Overloaded, unless the caller has used less than its share of the queue."""
        now = self._loop.time()
        self._queue_new()
        self._limit.judge(self._waiting.work_s, now)
        before_s = self._waiting.work_before(request)
        if before_s <= self._limit.work_s and len(self._waiting) < self._capacity:
            return
        self._limit.refused(work_s, now)
        self.refused += 1
        raise self._overloaded(before_s)

    def _overloaded(self, before_s: float) -> Overloaded:
        return Overloaded(
            f"{self.model.name}@{self.model.version} is overloaded: {len(self._waiting)} requests wait for it, for "
            f"{self._limit.expected_s(before_s):.3g} s; try again later",
            details={"retry_after_s": self._limit.retry_after_s(before_s)},
        )

    def _run_waiting(self, *, has_run: bool = False) -> None:
        self._scheduled = False
        if self._inline_rows and not self._waiting.size and not self._delay_s:
            self._run_new()
        self._queue_new()
        has_waited = (
            has_run or self._free_threads < self._instances
        )  # else only the event loop kept them waiting
        while self._waiting and self._free_threads:
            if self._delay_s and (left_s := self._left_s()) > 0:
                self._delayed = self._delayed or self._loop.call_later(left_s, self._run_delayed)
                return
            if batch := self._next(has_waited=has_waited):
                self._start(batch)
        if self._waiting and self._check is None:
            self._check = self._loop.call_later(self._limit.interval_s, self._check_waiting)

    def _run_new(self) -> None:
        """Run new requests on the event loop in the order of their arrival, as long as they are quick."""
        new, now = self._new, self._loop.time()
        while new:
            taken = self._next_new(now)
            batch = [request for request, _ in taken]
            if not batch:
                continue
            if not self._inline_rows or not self._is_quick(batch):
                new.extendleft(reversed(taken))
                return
            self._run_inline(batch)

    def _next_new(self, now: float) -> list[tuple[QueuedRequest, int]]:
        """Take the next new requests that may share a run, without those of clients that have gone."""
        new, most = self._new, self.engine.cost.rows
        batch: list[tuple[QueuedRequest, int]] = []
        total, row_shapes = 0, None
        while new:
            request, rows = new[0]
            if request.cancelled or (request.deadline is not None and request.deadline <= now):
                new.popleft()
                self._drop(Waiting(request, rows, 0.0, now), now)
                continue
            total += rows
            if batch and (total > most or not self._fits(request, row_shapes)):
                break
            batch.append(new.popleft())
            if most == 1:
                break
            if not self._only_rows and row_shapes is None:
                row_shapes = _row_shapes(request)
        return batch

    def _queue_new(self) -> None:
        """Let the new requests wait for their turns."""
        now, cost = self._loop.time(), self.engine.cost
        for request, rows in self._new:
            self._waiting.add(Waiting(request, rows, cost.of_request(rows), now))
        self._new.clear()
        self._new_s = 0.0

    def _run_delayed(self) -> None:
        self._delayed = None
        self._run_waiting()

    def _start(self, batch: Sequence[Waiting[QueuedRequest]]) -> None:
        """Run a batch: in a thread, or on the event loop if it is quick."""
        requests = [waiting.request for waiting in batch]
        if self._inline_rows and self._is_quick(requests):
            self._run_inline(requests)
            return
        self._free_threads -= 1
        began = self._loop.time()
        self.queued_s += len(batch) * began - sum(waiting.since for waiting in batch)
        work_s = sum(waiting.work_s for waiting in batch)
        expected_s = self.engine.cost.of_run(sum(waiting.rows for waiting in batch))
        future = self._pool.submit(_attempt, self.engine, requests, self._timeout_s)
        future.add_done_callback(partial(self._returned, requests, (began, work_s, expected_s)))

    def _check_waiting(self) -> None:
        """Judge the queue while requests wait, and answer those that have waited for too long."""
        self._check, now = None, self._loop.time()
        self._limit.judge(self._waiting.work_s, now)
        late = [waiting for waiting in self._waiting if self._is_late(waiting, now)]
        if late:
            for waiting in self._waiting.remove_all():
                if self._is_late(waiting, now):
                    self._drop(waiting, now)
                else:
                    self._waiting.add(waiting)
        if self._waiting:
            self._check = self._loop.call_later(self._limit.interval_s, self._check_waiting)

    def _is_late(self, waiting: Waiting[QueuedRequest], now: float, *, has_waited: bool = True) -> bool:
        request, deadline = waiting.request, waiting.request.deadline
        return (
            request.cancelled
            or (has_waited and now - waiting.since > self._limit.max_wait_s)
            or (deadline is not None and deadline <= now)
        )

    def _drop(self, waiting: Waiting[QueuedRequest], now: float) -> None:
        """Answer a request that is not run: its client has gone, its deadline has passed, or it waited too long."""
        request = waiting.request
        if request.cancelled:
            return
        if request.deadline is not None and request.deadline <= now:
            self.expired += 1
            request.complete(
                DeadlineExceeded(
                    f"the deadline of the request passed after {now - waiting.since:.3g} s in the queue of "
                    f"{self.model.name}@{self.model.version}; it was not run"
                )
            )
            return
        self.refused += 1
        self._limit.refused(waiting.work_s, now)
        request.complete(self._overloaded(self._waiting.work_s))

    def _left_s(self) -> float:
        """Return how long the next batch may still wait for more requests."""
        first = self._waiting.first()
        if sum(waiting.rows for waiting in self._waiting) >= self.engine.cost.rows:
            return 0.0
        return first.since + self._delay_s - self._loop.time()

    def _run_inline(self, batch: Batch) -> None:
        self._done(batch, *self._timed(partial(_attempt, self.engine, batch, QUICK_S)))

    def _timed(self, run: Callable[[], T]) -> T:
        """Return what `run` returns. A model that takes too long runs in threads from now on."""
        began = time.perf_counter()
        try:
            return run()
        finally:
            if time.perf_counter() - began > MAX_INLINE_S:
                self._inline_rows = 0
                _log.warning(
                    "%s@%s blocked the event loop and runs in threads from now on",
                    self.model.name,
                    self.model.version,
                )

    def _is_quick(self, batch: Batch) -> bool:
        """Return whether a batch is no larger than what was measured when the model was loaded.

        Requests of a batch have the same row shapes, and together no more rows than were measured.
        """
        rows = self._inline_rows
        if self._only_rows:
            return len(batch[0].inputs[0]) <= rows
        for array, most in zip(batch[0].inputs, self._inline_limits, strict=True):
            if array.ndim and (len(array) > rows or (most and array.size > most * len(array))):
                return False
        return not self._has_texts or sum(map(_characters, batch)) <= INLINE_CHARACTERS

    def _next(self, *, has_waited: bool) -> list[Waiting[QueuedRequest]]:
        """Take the next requests that may share a run: within the row limit and of equal row shapes.

        Those of clients that have gone are dropped, those that are late are answered with an error.
        """
        waiting, most, now = self._waiting, self.engine.cost.rows, self._loop.time()
        batch: list[Waiting[QueuedRequest]] = []
        rows, row_shapes = 0, None
        while waiting:
            following = waiting.first()
            if self._is_late(following, now, has_waited=has_waited):
                self._drop(waiting.take(), now)
                continue
            rows += following.rows
            if batch and (rows > most or not self._fits(following.request, row_shapes)):
                break
            batch.append(waiting.take())
            if most == 1:
                break
            if len(batch) == 1 and not self._only_rows:
                row_shapes = _row_shapes(following.request)
        return batch

    def _fits(self, request: QueuedRequest, row_shapes: list[tuple[int, ...]] | None) -> bool:
        return row_shapes is None or _row_shapes(request) == row_shapes

    def _returned(self, batch: Batch, run: tuple[float, float, float], future: Any) -> None:
        """Pass the result of a thread to the event loop, unless the loop has ended."""
        try:
            self._loop.call_soon_threadsafe(self._arrived, batch, run, *future.result())
        except RuntimeError:
            _log.warning("dropped a response of %s: the server has stopped", self.model.name)

    def _arrived(
        self,
        batch: Batch,
        run: tuple[float, float, float],
        results: list[Result],
        errors: dict[int, FalajError],
    ) -> None:
        self._free_threads += 1
        began, work_s, expected_s = run
        now = self._loop.time()
        self._limit.ran(work_s, expected_s=expected_s, took_s=now - began)
        self._limit.judge(self._waiting.work_s, now)
        self._run_waiting(has_run=True)
        self._done(batch, results, errors)

    def _done(self, batch: Batch, results: list[Result], errors: dict[int, FalajError]) -> None:
        self.batches += 1
        self.rows += sum(len(request.inputs[0]) if request.inputs[0].ndim else 1 for request in batch)
        for number, request in enumerate(batch):
            request.complete(errors.get(number))
        if self._answered is not None and results:
            good = [request for number, request in enumerate(batch) if number not in errors]
            groups = [good] if len(results) == 1 else [[request] for request in good]
            for group, (inputs, outputs) in zip(groups, results, strict=True):
                self._answered(self, group, inputs, outputs)


def _row_shapes(request: QueuedRequest) -> list[tuple[int, ...]]:
    return [array.shape[1:] for array in request.inputs]


def _inline_limit(tensor: Tensor) -> int:
    """Return how many values a row may have on the event loop; 0 if the model fixes them."""
    if DYNAMIC not in tensor.shape[1:]:
        return 0
    return prod(DYNAMIC_SIZE if size == DYNAMIC else size for size in tensor.shape[1:])


def _characters(request: QueuedRequest) -> int:
    texts = (array for array in request.inputs if array.dtype == object)
    return sum(len(text) for array in texts for text in array.ravel().tolist())


def _attempt(engine: ModelEngine, batch: Batch, limit_s: float) -> tuple[list[Result], dict[int, FalajError]]:
    """Run a batch and encode its responses; if it fails, run each request alone to isolate the failure."""
    try:
        return [_run(engine, batch, limit_s)], {}
    except Unavailable as error:  # alone they would take as long again
        return [], dict.fromkeys(range(len(batch)), error)
    except Exception as error:
        if len(batch) == 1:
            return [], {0: _explained(engine, error)}
    results: list[Result] = []
    errors: dict[int, FalajError] = {}
    for number, request in enumerate(batch):
        try:
            results.append(_run(engine, [request], limit_s))
        except Exception as error:
            errors[number] = _explained(engine, error)
    return results, errors


def _run(engine: ModelEngine, batch: Batch, limit_s: float) -> Result:
    if len(batch) == 1:
        request = batch[0]
        inputs = list(request.inputs)
        outputs = engine.run(inputs, limit_s=limit_s)
        request.render(outputs)
        return inputs, outputs
    columns = zip(*(request.inputs for request in batch), strict=True)
    inputs = [np.concatenate(column) for column in columns]
    outputs = engine.run(inputs, limit_s=limit_s)
    if any(len(array) != len(inputs[0]) for array in outputs):  # whose rows are whose?
        raise ValueError("a batch was answered with another number of rows; its requests run alone")
    if isinstance(batch[0], BatchRenderer) and batch[0].render_batch(batch, outputs):
        return inputs, outputs
    at = 0
    for request in batch:
        end = at + len(request.inputs[0])
        request.render([array[at:end] for array in outputs])
        at = end
    return inputs, outputs


def _explained(engine: ModelEngine, error: Exception) -> FalajError:
    """Return the error for the caller: a failure of the model counts as invalid input."""
    if isinstance(error, FalajError):
        return error
    _log.warning("%s@%s failed on a request: %s", engine.model.name, engine.model.version, error)
    return InvalidInput(
        f"the model {engine.model.name}@{engine.model.version} failed on these values: {error}"
    )
