"""The writer of the prediction log: collects answered requests in batches, sketches them, and stores them.

It runs in the process of the log (`log_process.py`), fed by the model server (`recorder.py`). A batch is stored when it
is closed and all its ids were answered, or did not get an answer in time. If storing fails, batches wait in memory;
what exceeds the memory limits is dropped and counted.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
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
from falaj.records.monitoring.sketches import ColumnRole
from falaj.records.serving.tensors import ServedModel
from falaj.serving.dependencies import ColumnCollector, PredictedBatch
from falaj.serving.prediction_batches import BatchRows, encode_batch

VersionKey = tuple[str, str]
"""The id of an endpoint, and a version."""

MAX_PENDING_ROWS = 400_000
"""Rows that may wait in memory; more are dropped."""
MAX_PENDING_BYTES = 128 * 2**20
"""Bytes of arrays that may wait, and of encoded batches that could not be written."""
PERMANENT_ERRORS = (NotFound, Denied, Conflict, InvalidInput, KeyUnavailable)
"""Errors that a retry cannot fix, such as a removed endpoint."""
MAX_RESPONSE_WAIT_S = 2.0
"""How long a closed batch waits for answers that already have ids."""

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


class LogEvents(Protocol):
    """Is told what became of batches."""

    def stored(self, ident: str) -> None: ...
    def lost(self, key: VersionKey, rows: int, ident: str = "") -> None: ...


class EncodedBatch(NamedTuple):
    """An encoded batch that is not stored yet."""

    key: VersionKey
    batch: str
    content: bytes
    rows: int
    source: PredictionSource


class OpenBatch:
    """Answered requests of one version, until the batch is stored."""

    __slots__ = ("given", "key", "model", "noted", "rows", "source", "until")

    def __init__(self, key: VersionKey, model: ServedModel, source: PredictionSource) -> None:
        self.key = key
        self.model = model
        self.source = source
        self.noted = 0
        self.rows: BatchRows | None = None
        self.given: int | None = None
        """The number of ids given out, once the batch is closed."""
        self.until = float("inf")


class PredictionWriter:
    """Collects answered requests and stores them. Used by one thread."""

    def __init__(
        self,
        store_batch: StoreBatch,
        *,
        events: LogEvents,
        collector: ColumnCollector | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store_batch = store_batch
        self._events = events
        self._collector = collector
        self._clock = clock
        self._batches: dict[str, OpenBatch] = {}
        self._rows = 0
        self._bytes = 0
        self._unwritten: deque[EncodedBatch] = deque()
        self._failing = False

    @property
    def has_unwritten(self) -> bool:
        return bool(self._unwritten)

    def open(self, ident: str, key: VersionKey, model: ServedModel, source: PredictionSource) -> None:
        self._batches.setdefault(ident, OpenBatch(key, model, source))

    def model_of(self, ident: str) -> ServedModel | None:
        found = self._batches.get(ident)
        return None if found is None else found.model

    def close(self, ident: str, given: int) -> None:
        """Store the batch once its `given` ids were answered, or after a while."""
        batch = self._batches.get(ident)
        if batch is not None and batch.given is None:
            batch.given = given
            batch.until = self._clock() + MAX_RESPONSE_WAIT_S

    def add(self, ident: str, numbers: Sequence[int], answered: PredictedBatch) -> None:
        """Add the requests with these numbers to their batch, unless it is written already or memory is full."""
        rows = answered.rows
        batch = self._batches.get(ident)
        if batch is not None:
            batch.noted += len(numbers)
        if batch is None or self._rows + rows > MAX_PENDING_ROWS or self._bytes >= MAX_PENDING_BYTES:
            self._events.lost((answered.endpoint, answered.model.version), rows)
            return
        kept = batch.rows
        if kept is None:
            kept = batch.rows = BatchRows(answered.model)
        before = kept.size_bytes
        kept.add(answered, numbers)
        self._rows += rows
        self._bytes += kept.size_bytes - before

    # ------------------------------------------------------------------------------------------- storing

    def next_due(self) -> float:
        """Return the time by which `write` has something to do; now, if a batch is complete."""
        closed = [batch for batch in self._batches.values() if batch.given is not None]
        if any(batch.noted >= (batch.given or 0) for batch in closed):
            return self._clock()
        return min((batch.until for batch in closed), default=float("inf"))

    def finish(self) -> None:
        """Store all batches as they are: there will be no more answers."""
        for batch in self._batches.values():
            batch.given = 0
        self.write()

    def write(self) -> None:
        """Store the batches that are closed and complete, and those that failed before."""
        now = self._clock()
        done = [
            ident
            for ident, batch in self._batches.items()
            if batch.given is not None and (batch.noted >= batch.given or now >= batch.until)
        ]
        for ident in done:
            batch = self._batches.pop(ident)
            if batch.rows is None:
                self._events.stored(ident)
            else:
                self._encode(batch, ident, batch.rows)
                self._rows -= batch.rows.rows
                self._bytes -= batch.rows.size_bytes
        self._store()

    def _encode(self, batch: OpenBatch, ident: str, rows: BatchRows) -> None:
        try:
            self._sketch(batch.key, rows, batch.source)
            content = encode_batch(rows, features=batch.source.features)
        except Exception:
            _log.exception("encoding a batch of predictions failed")
            self._events.lost(batch.key, rows.rows, ident)
            return
        self._unwritten.append(EncodedBatch(batch.key, ident, content, rows.rows, batch.source))

    def _sketch(self, key: VersionKey, rows: BatchRows, source: PredictionSource) -> None:
        """Pass features and outputs to the drift collector."""
        if self._collector is None:
            return
        inputs, outputs = rows.blocks()
        self._collector.add(*key, _named(inputs, source.features))
        self._collector.add(*key, _plain(outputs), role=ColumnRole.PREDICTION)

    def _store(self) -> None:
        """Store encoded batches, oldest first; failed ones are retried next time within the memory limit."""
        while self._unwritten:
            waiting = self._unwritten[0]
            try:
                self._store_batch(*waiting)
            except AlreadyExists:
                self._events.stored(waiting.batch)
            except PERMANENT_ERRORS as error:
                _log.error("dropped %s predictions: %s", waiting.rows, error)
                self._events.lost(waiting.key, waiting.rows, waiting.batch)
            except FalajError as error:
                if not self._failing:
                    _log.error("storing predictions failed; they wait in memory: %s", error)
                self._failing = True
                break
            else:
                self._events.stored(waiting.batch)
            self._failing = False
            self._unwritten.popleft()
        while sum(len(waiting.content) for waiting in self._unwritten) > MAX_PENDING_BYTES:
            gone = self._unwritten.popleft()
            self._events.lost(gone.key, gone.rows, gone.batch)


def _named(inputs: dict[str, Any], features: Sequence[str]) -> dict[str, Any]:
    """Return the inputs by column if the only input has named columns, else by tensor."""
    if len(inputs) == 1 and features:
        (block,) = inputs.values()
        if block.ndim == 2 and block.shape[1] == len(features):
            return {name: block[:, column] for column, name in enumerate(features)}
    return _plain(inputs)


def _plain(blocks: dict[str, Any]) -> dict[str, Any]:
    return {name: block for name, block in blocks.items() if block.ndim in (1, 2)}
