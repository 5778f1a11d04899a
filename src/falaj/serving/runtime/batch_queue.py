"""Lanes: the queue of one model version. Requests that arrive in one turn of the event loop run as one batch."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Executor
from functools import partial
from itertools import islice
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from falaj.errors import FalajError, InvalidInput, Unavailable
from falaj.serving.runtime.engine import ModelEngine
from falaj.serving.signatures import Signature

Array = npt.NDArray[Any]

LONGEST_WAIT_S = 2.0
"""More work than can be done in this time is refused rather than queued."""
FEWEST_WAITING, MOST_WAITING = 16, 4096

_log = logging.getLogger(__name__)


class QueuedRequest(Protocol):
    """A request in a lane."""

    inputs: Sequence[Array]
    cancelled: bool
    """Nobody waits for the answer any more."""

    def render(self, outputs: Sequence[Array]) -> None:
        """Make the answer; may run in a thread."""

    def complete(self, error: FalajError | None) -> None:
        """Hand out the answer, or the error; runs on the event loop."""


class OnBatchAnswered(Protocol):
    """Is told of each batch that was answered, with its arrays; runs on the event loop."""

    def __call__(
        self,
        queue: BatchQueue,
        requests: Sequence[QueuedRequest],
        inputs: Sequence[Array],
        outputs: Sequence[Array],
    ) -> None: ...


Batch = list[QueuedRequest]
Result = tuple[list[Array], list[Array]]
"""What went into the model, and what came out."""


class BatchQueue:
    """The queue of one model version. A quick model runs on the event loop, a heavy one in the pool's threads."""

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
        self._free = 1 if engine.cost.inline else threads
        affordable = int(LONGEST_WAIT_S * self._free / max(engine.cost.seconds, 1e-6))
        self._room = most_waiting or min(max(affordable, FEWEST_WAITING), MOST_WAITING)
        self._waiting: deque[QueuedRequest] = deque()
        self._woken = False

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def submit(self, request: QueuedRequest) -> None:
        """Queue `work` for the end of this turn of the loop; Unavailable if too much waits already."""
        if len(self._waiting) >= self._room:
            raise Unavailable(
                f"{self.model.name}@{self.model.version} has {self._room} requests waiting; try again later"
            )
        self._waiting.append(request)
        if not self._woken:
            self._woken = True
            self._loop.call_soon(self._wake)

    def _wake(self) -> None:
        self._woken = False
        if self.engine.cost.inline:
            while self._waiting:
                batch = self._next()
                self._done(batch, *_attempt(self.engine, batch))
        else:
            while self._waiting and self._free:
                self._free -= 1
                batch = self._next()
                future = self._pool.submit(_attempt, self.engine, batch)
                future.add_done_callback(partial(self._returned, batch))

    def _next(self) -> Batch:
        """Works from the front that may share a run: within the limit of rows, and of one shape."""
        waiting, most = self._waiting, self.engine.cost.rows
        if most == 1:
            return [waiting.popleft()]
        first = waiting[0]
        taken, rows, tails = 1, len(first.inputs[0]), _tails(first)
        for request in islice(waiting, 1, most):
            rows += len(request.inputs[0])
            if rows > most or _tails(request) != tails:
                break
            taken += 1
        return [waiting.popleft() for _ in range(taken)]

    def _returned(self, batch: Batch, future: Any) -> None:
        """A thread is done: hand its outcome to the loop, unless that has ended."""
        try:
            self._loop.call_soon_threadsafe(self._arrived, batch, *future.result())
        except RuntimeError:
            _log.warning("an answer of %s came after the server had stopped", self.model.name)

    def _arrived(self, batch: Batch, results: list[Result], errors: dict[int, FalajError]) -> None:
        self._free += 1
        self._wake()
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


def _tails(request: QueuedRequest) -> list[tuple[int, ...]]:
    return [array.shape[1:] for array in request.inputs]


def _attempt(engine: ModelEngine, batch: Batch) -> tuple[list[Result], dict[int, FalajError]]:
    """Run a batch and render its answers; if it fails, each work on its own, so that one spoils no other."""
    try:
        return [_run(engine, batch)], {}
    except Exception as error:
        if len(batch) == 1:
            return [], {0: _explained(engine, error)}
    results: list[Result] = []
    errors: dict[int, FalajError] = {}
    for number, request in enumerate(batch):
        try:
            results.append(_run(engine, [request]))
        except Exception as error:
            errors[number] = _explained(engine, error)
    return results, errors


def _run(engine: ModelEngine, batch: Batch) -> Result:
    if len(batch) == 1:
        request = batch[0]
        inputs = list(request.inputs)
        outputs = [] if request.cancelled else engine.run(inputs)
        if not request.cancelled:
            request.render(outputs)
        return inputs, outputs
    columns = zip(*(request.inputs for request in batch), strict=True)
    inputs = [np.concatenate(column) for column in columns]
    outputs = engine.run(inputs)
    at = 0
    for request in batch:
        end = at + len(request.inputs[0])
        request.render([array[at:end] for array in outputs])
        at = end
    return inputs, outputs


def _explained(engine: ModelEngine, error: Exception) -> FalajError:
    """What the caller is told: a model that refuses values was given the wrong ones, as far as anyone can tell."""
    if isinstance(error, FalajError):
        return error
    _log.warning("%s@%s failed on a request: %s", engine.model.name, engine.model.version, error)
    return InvalidInput(f"the model {engine.model.name}@{engine.model.version} refuses these values: {error}")
