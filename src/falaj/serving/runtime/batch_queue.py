"""Dynamic batching: a queue per model version. Requests of one event loop iteration run as one batch."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Executor
from functools import partial
from itertools import islice
from math import prod
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from falaj.errors import FalajError, InvalidInput, Unavailable
from falaj.records.serving import DYNAMIC, Datatype, Tensor
from falaj.serving.runtime.engine import LONGEST_S, QUICK_S, ModelEngine
from falaj.serving.runtime.probe import DYNAMIC_SIZE
from falaj.serving.signatures import Signature

Array = npt.NDArray[Any]

MAX_QUEUE_S = 2.0
"""Work beyond what can be done in this time is rejected instead of queued."""
MIN_CAPACITY, MAX_CAPACITY = 16, 4096
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
    ) -> None:
        self.engine = engine
        self.model = engine.model
        self.signature = Signature(engine.model)
        self.batches = 0
        self.rows = 0
        self._loop = asyncio.get_running_loop()
        self._pool = pool
        self._answered = answered
        self._free_threads = threads
        self._inline_rows = engine.cost.inline_rows
        self._inline_limits = [_inline_limit(tensor) for tensor in engine.model.inputs]
        self._has_texts = any(tensor.datatype is Datatype.BYTES for tensor in engine.model.inputs)
        self._only_rows = (
            self._inline_limits == [0]
            and engine.model.inputs[0].shape[:1] == (DYNAMIC,)
            and not self._has_texts
        )
        """A request chooses the rows of one input, and nothing else: the usual case, checked the fastest."""
        parallel = 1 if engine.cost.inline else threads
        affordable = int(MAX_QUEUE_S * parallel / max(engine.cost.seconds, 1e-6))
        self._capacity = most_waiting or min(max(affordable, MIN_CAPACITY), MAX_CAPACITY)
        self._waiting: deque[QueuedRequest] = deque()
        self._scheduled = False

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def submit(self, request: QueuedRequest) -> None:
        """Queue `request` for the next batch. Raise Unavailable if the queue is full."""
        if len(self._waiting) >= self._capacity:
            raise Unavailable(
                f"{self.model.name}@{self.model.version} has {self._capacity} queued requests; try again later"
            )
        self._waiting.append(request)
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._run_waiting)

    def close(self) -> None:
        """End the process of the model, if it has one; what still runs there fails."""
        self.engine.close()

    def _run_waiting(self) -> None:
        self._scheduled = False
        while batch := self._next():
            if self._inline_rows and self._is_quick(batch):
                self._run_inline(batch)
            elif self._free_threads:
                self._free_threads -= 1
                future = self._pool.submit(_attempt, self.engine, batch, LONGEST_S)
                future.add_done_callback(partial(self._returned, batch))
            else:
                self._waiting.extendleft(reversed(batch))
                return

    def _run_inline(self, batch: Batch) -> None:
        began = time.perf_counter()
        results, errors = _attempt(self.engine, batch, QUICK_S)
        if time.perf_counter() - began > MAX_INLINE_S:
            self._inline_rows = 0
            _log.warning(
                "%s@%s blocked the event loop and runs in threads from now on",
                self.model.name,
                self.model.version,
            )
        self._done(batch, results, errors)

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

    def _next(self) -> Batch:
        """Return requests from the front that may share a run: within the row limit and of equal row shapes.

        Those of clients that have gone are dropped.
        """
        waiting, most = self._waiting, self.engine.cost.rows
        while waiting and waiting[0].cancelled:
            waiting.popleft()
        if most == 1 or not waiting:
            return [waiting.popleft()] if waiting else []
        first = waiting[0]
        taken, rows, row_shapes = 1, len(first.inputs[0]), _row_shapes(first)
        for request in islice(waiting, 1, most):
            if not request.cancelled:
                rows += len(request.inputs[0])
                if rows > most or _row_shapes(request) != row_shapes:
                    break
            taken += 1
        batch = [waiting.popleft() for _ in range(taken)]
        return [request for request in batch if not request.cancelled]

    def _returned(self, batch: Batch, future: Any) -> None:
        """Pass the result of a thread to the event loop, unless the loop has ended."""
        try:
            self._loop.call_soon_threadsafe(self._arrived, batch, *future.result())
        except RuntimeError:
            _log.warning("dropped a response of %s: the server has stopped", self.model.name)

    def _arrived(self, batch: Batch, results: list[Result], errors: dict[int, FalajError]) -> None:
        self._free_threads += 1
        self._run_waiting()
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
