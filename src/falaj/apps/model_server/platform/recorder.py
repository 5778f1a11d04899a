"""The server's side of the prediction log: assigns ids, collects batches and writes them from one thread.

Guarantees: a prediction that `endpoints.prediction` finds is on disk. Batches that are not written yet exist in memory
only: if the server is killed, the predictions of the last few seconds are lost and their ids stay unknown. If the log
fails, responses are not affected; predictions that exceed the memory limits meanwhile are dropped and counted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple, Protocol

from falaj.errors import (
    AlreadyExists,
    Conflict,
    Denied,
    FalajError,
    InvalidInput,
    KeyUnavailable,
    NotFound,
)
from falaj.governance.operations.caller import start_thread
from falaj.records.monitoring.sketches import ColumnRole
from falaj.records.names import new_id
from falaj.serving.dependencies import ColumnCollector, PredictedBatch, PredictedRequest
from falaj.serving.prediction_batches import BatchRows, encode_batch

VersionKey = tuple[str, str]
"""The id of an endpoint, and a version."""

BATCH_ROWS = 20_000
"""Rows after which a batch is written; encoding more would block the event loop for too long."""
MAX_PENDING_ROWS = 400_000
"""Rows that may wait in memory; more are dropped."""
MAX_PENDING_BYTES = 128 * 2**20
"""Bytes of arrays that may wait, and of encoded batches that could not be written."""
PERMANENT_ERRORS = (NotFound, Denied, Conflict, InvalidInput, KeyUnavailable)
"""Errors that a retry cannot fix, such as a removed endpoint."""
GRACE_S = 0.02
MAX_RESPONSE_WAIT_S = 2.0
"""How long a closed batch waits for responses that already have ids, after a grace period for ids in progress."""

_log = logging.getLogger(__name__)


class PredictionSource(NamedTuple):
    """Lineage of a version's predictions: its id, the views that it reads, and its column names."""

    version: str
    views: tuple[str, ...]
    features: tuple[str, ...]


class StoreBatch(Protocol):
    """Stores a batch: the operation `endpoints.record` as the model server's account."""

    def __call__(
        self, key: VersionKey, batch: str, content: bytes, rows: int, source: PredictionSource
    ) -> None: ...


class EncodedBatch(NamedTuple):
    """An encoded batch that is not stored yet."""

    key: VersionKey
    batch: str
    content: bytes
    rows: int
    source: PredictionSource


class OpenBatch:
    """Prediction numbers and responses of one version, until the batch is closed."""

    __slots__ = ("ident", "key", "noted", "numbers", "prefix", "rows")

    def __init__(self, key: VersionKey) -> None:
        self.key = key
        self.ident = str(new_id("predictions"))
        self.prefix = f"{self.ident}-"
        self.numbers = count()
        self.noted = 0
        self.rows: BatchRows | None = None


class PredictionRecorder:
    """Assigns ids, collects responses, and writes them every `every_s` seconds or when a batch is full."""

    def __init__(
        self, store_batch: StoreBatch, *, every_s: float, collector: ColumnCollector | None = None
    ) -> None:
        self._store_batch = store_batch
        self._every_s = every_s
        self._collector = collector
        self._open: dict[VersionKey, OpenBatch] = {}
        self._batches: dict[str, OpenBatch] = {}
        """Batches that responses may still be added to, by id."""
        self._open_lock = threading.Lock()
        self._rows_lock = threading.Lock()
        self._rows = 0
        self._bytes = 0
        self._unwritten: deque[EncodedBatch] = deque()
        self._wakeup = threading.Event()
        self._stopped = False
        self._failing = False
        self._thread: threading.Thread | None = None
        self.lost: Counter[VersionKey] = Counter()
        self.sources: Mapping[VersionKey, PredictionSource] = {}
        self.periodic_tasks: Sequence[Callable[[], None]] = ()
        """Called every `every_s` seconds after writing, in the same thread."""

    # ------------------------------------------------------------------------------- from the event loop

    def next_id(self, endpoint: str, version: str) -> str:
        batch = self._open.get((endpoint, version)) or self._begin((endpoint, version))
        return batch.prefix + str(next(batch.numbers))

    def add(self, batch: PredictedBatch) -> None:
        names = [request.prediction for request in batch.requests]
        prefix, _, _ = names[0].rpartition("-")
        start = len(prefix) + 1
        if len(names) == 1 or all(name.startswith(prefix) for name in names):
            self._add(prefix, batch, [int(name[start:]) for name in names])
            return
        for request in batch.requests:
            prefix, _, number = request.prediction.rpartition("-")
            self._add(prefix, _part(batch, request), [int(number)])

    def _add(self, ident: str, answered: PredictedBatch, numbers: Sequence[int]) -> None:
        """Add responses to their batch, unless it is written already or memory is full."""
        rows = answered.requests[-1].rows.stop
        with self._rows_lock:
            batch = self._batches.get(ident)
            if batch is not None:
                batch.noted += len(numbers)
            if batch is None or self._rows + rows > MAX_PENDING_ROWS or self._bytes >= MAX_PENDING_BYTES:
                self.lost[answered.requests[0].endpoint, answered.model.version] += rows
                return
            kept = batch.rows
            if kept is None:
                kept = batch.rows = BatchRows(answered.model)
            before = kept.size_bytes
            kept.add(answered, numbers)
            self._rows += rows
            self._bytes += kept.size_bytes - before
        if self._rows >= BATCH_ROWS:
            self._wakeup.set()

    def _begin(self, key: VersionKey) -> OpenBatch:
        with self._open_lock:
            batch = self._open.get(key)
            if batch is None:
                batch = OpenBatch(key)
                self._batches[batch.ident] = batch
                self._open[key] = batch
            return batch

    # ------------------------------------------------------------------------------------ the one thread

    def start(self) -> None:
        self._thread = start_thread(self._work, name="prediction-log")

    def stop(self) -> None:
        """Write the pending batches and stop the thread."""
        self._stopped = True
        self._wakeup.set()
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        due = time.monotonic() + self._every_s
        while not self._stopped:
            self._wakeup.wait(max(0.0, due - time.monotonic()))
            self._wakeup.clear()
            steps: list[Callable[[], None]] = [self.flush]
            if self._stopped or time.monotonic() >= due:
                steps += self.periodic_tasks
                due = time.monotonic() + self._every_s
            for step in steps:
                try:
                    step()
                except Exception:
                    _log.exception("prediction log step failed")

    def flush(self) -> None:
        """Close the open batches, and write them and those that failed before."""
        with self._open_lock:
            closed, self._open = self._open, {}
        if closed and not self._stopped:
            _await_responses(list(closed.values()))
        for batch in closed.values():
            with self._rows_lock:
                del self._batches[batch.ident]
            if batch.rows is not None:
                self._encode(batch.key, batch.ident, batch.rows)
                with self._rows_lock:
                    self._rows -= batch.rows.rows
                    self._bytes -= batch.rows.size_bytes
        self._write()

    def _encode(self, key: VersionKey, ident: str, rows: BatchRows) -> None:
        source = self.sources.get(key)
        if source is None:
            self.lost[key] += rows.rows
            return
        try:
            self._sketch(key, rows, source)
            content = encode_batch(rows, features=source.features)
        except Exception:
            _log.exception("encoding a batch of predictions failed")
            self.lost[key] += rows.rows
            return
        self._unwritten.append(EncodedBatch(key, ident, content, rows.rows, source))

    def _sketch(self, key: VersionKey, rows: BatchRows, source: PredictionSource) -> None:
        """Pass features and outputs to the drift collector."""
        if self._collector is None:
            return
        inputs, outputs = rows.blocks()
        self._collector.add(*key, _named(inputs, source.features))
        self._collector.add(*key, _plain(outputs), role=ColumnRole.PREDICTION)

    def _write(self) -> None:
        """Store encoded batches, oldest first; failed ones are retried next time within the memory limit."""
        while self._unwritten:
            waiting = self._unwritten[0]
            try:
                self._store_batch(*waiting)
            except AlreadyExists:
                pass
            except PERMANENT_ERRORS as error:
                _log.error("dropped %s predictions: %s", waiting.rows, error)
                self.lost[waiting.key] += waiting.rows
            except FalajError as error:
                if not self._failing:
                    _log.error("storing predictions failed; they wait in memory: %s", error)
                self._failing = True
                break
            self._failing = False
            self._unwritten.popleft()
        while sum(len(waiting.content) for waiting in self._unwritten) > MAX_PENDING_BYTES:
            gone = self._unwritten.popleft()
            self.lost[gone.key] += gone.rows


def _await_responses(closed: Sequence[OpenBatch]) -> None:
    """Wait, up to a limit, until all assigned ids of closed batches have responses."""
    time.sleep(GRACE_S)
    given = [(batch, next(batch.numbers)) for batch in closed]
    until = time.monotonic() + MAX_RESPONSE_WAIT_S
    while any(batch.noted < number for batch, number in given) and time.monotonic() < until:
        time.sleep(GRACE_S)


def _part(answered: PredictedBatch, request: PredictedRequest) -> PredictedBatch:
    """Return one request of an answered batch as a batch of its own."""
    rows, size = request.rows, answered.requests[-1].rows.stop
    own = request._replace(rows=slice(0, rows.stop - rows.start))
    inputs = [array[rows] if array.ndim and len(array) == size else array for array in answered.inputs]
    outputs = [array[rows] if array.ndim and len(array) == size else array for array in answered.outputs]
    return PredictedBatch(answered.model, answered.at, [own], inputs, outputs)


def _named(inputs: dict[str, Any], features: Sequence[str]) -> dict[str, Any]:
    """Return the inputs by column if the only input has named columns, else by tensor."""
    if len(inputs) == 1 and features:
        (block,) = inputs.values()
        if block.ndim == 2 and block.shape[1] == len(features):
            return {name: block[:, column] for column, name in enumerate(features)}
    return _plain(inputs)


def _plain(blocks: dict[str, Any]) -> dict[str, Any]:
    return {name: block for name, block in blocks.items() if block.ndim in (1, 2)}
