"""The prediction log on the server: ids now, batches a little later, counters with them, all from one thread.

What is promised: an id that `endpoints.prediction` finds is on disk. Answered requests whose batch is not written yet
are in memory only: if the server is killed, those of the last window (a few seconds) are lost, and their ids stay
unknown. A log that cannot be written costs no answer; what does not fit into memory meanwhile is dropped and counted.
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
"""An endpoint's object and a version."""

BATCH_ROWS = 20_000
"""More rows are not gathered: to encode them would hold up the event loop for too long at a time."""
MAX_PENDING_ROWS = 400_000
"""Rows that may wait in memory; more are dropped."""
MAX_PENDING_BYTES = 128 * 2**20
"""Bytes of arrays that may wait, and as many of batches that could not be written."""
FINAL = (NotFound, Denied, Conflict, InvalidInput, KeyUnavailable)
"""What does not get better by trying again: the endpoint is gone, or the rules say no."""
GRACE_S = 0.02
MAX_RESPONSE_WAIT_S = 2.0
"""How long a closed batch waits for answers that have their ids already; at first a moment for ids being given."""

_log = logging.getLogger(__name__)


class PredictionSource(NamedTuple):
    """What predictions of a version come from: its object, the views that are read, and its columns' names."""

    version: str
    views: tuple[str, ...]
    features: tuple[str, ...]


class StoreBatch(Protocol):
    """Where batches go: the operation `endpoints.record`, as the model server's account."""

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
    """Numbers for the predictions of one version and the answers themselves, until the batch is closed."""

    __slots__ = ("ident", "key", "noted", "numbers", "prefix", "rows")

    def __init__(self, key: VersionKey) -> None:
        self.key = key
        self.ident = str(new_id("predictions"))
        self.prefix = f"{self.ident}-"
        self.numbers = count()
        self.noted = 0
        self.rows: BatchRows | None = None


class PredictionRecorder:
    """Gives ids, gathers answers, and writes them every `every_s` seconds or when there are many."""

    def __init__(
        self, keeps: StoreBatch, *, every_s: float, collector: ColumnCollector | None = None
    ) -> None:
        self._keeps = keeps
        self._every_s = every_s
        self._collector = collector
        self._open: dict[VersionKey, OpenBatch] = {}
        self._batches: dict[str, OpenBatch] = {}
        """Those that answers may still come for, by their ids."""
        self._opening = threading.Lock()
        self._adding = threading.Lock()
        self._rows = 0
        self._bytes = 0
        self._unwritten: deque[EncodedBatch] = deque()
        self._many = threading.Event()
        self._stopped = False
        self._failing = False
        self._thread: threading.Thread | None = None
        self.lost: Counter[VersionKey] = Counter()
        self.sources: Mapping[VersionKey, PredictionSource] = {}
        self.after: Sequence[Callable[[], None]] = ()
        """Called every `every_s` seconds, after writing, in the same thread: for counters and sketches."""

    # ------------------------------------------------------------------------------- from the event loop

    def name(self, endpoint: str, version: str) -> str:
        batch = self._open.get((endpoint, version)) or self._begin((endpoint, version))
        return batch.prefix + str(next(batch.numbers))

    def add(self, batch: PredictedBatch) -> None:
        names = [requests.prediction for requests in batch.requests]
        prefix, _, _ = names[0].rpartition("-")
        start = len(prefix) + 1
        if len(names) == 1 or all(name.startswith(prefix) for name in names):
            self._add(prefix, batch, [int(name[start:]) for name in names])
            return
        for requests in batch.requests:
            prefix, _, number = requests.prediction.rpartition("-")
            self._add(prefix, _part(batch, requests), [int(number)])

    def _add(self, ident: str, response: PredictedBatch, numbers: Sequence[int]) -> None:
        """Put an answer to its batch, if that is not written yet and there is room."""
        rows = response.requests[-1].rows.stop
        with self._adding:
            batch = self._batches.get(ident)
            if batch is not None:
                batch.noted += len(numbers)
            if batch is None or self._rows + rows > MAX_PENDING_ROWS or self._bytes >= MAX_PENDING_BYTES:
                self.lost[response.requests[0].endpoint, response.model.version] += rows
                return
            kept = batch.rows
            if kept is None:
                kept = batch.rows = BatchRows(response.model)
            before = kept.size_bytes
            kept.add(response, numbers)
            self._rows += rows
            self._bytes += kept.size_bytes - before
        if self._rows >= BATCH_ROWS:
            self._many.set()

    def _begin(self, key: VersionKey) -> OpenBatch:
        with self._opening:
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
        """Write what is there, and end."""
        self._stopped = True
        self._many.set()
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        due = time.monotonic() + self._every_s
        while not self._stopped:
            self._many.wait(max(0.0, due - time.monotonic()))
            self._many.clear()
            steps: list[Callable[[], None]] = [self.flush]
            if self._stopped or time.monotonic() >= due:
                steps += self.after
                due = time.monotonic() + self._every_s
            for step in steps:
                try:
                    step()
                except Exception:
                    _log.exception("the prediction log failed; it goes on")

    def flush(self) -> None:
        """Close the open batches and write them, with what could not be written before."""
        with self._opening:
            closed, self._open = self._open, {}
        if closed and not self._stopped:
            _await_answers(list(closed.values()))
        for batch in closed.values():
            with self._adding:
                del self._batches[batch.ident]
            if batch.rows is not None:
                self._encode(batch.key, batch.ident, batch.rows)
                with self._adding:
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
            _log.exception("a batch of predictions could not be encoded")
            self.lost[key] += rows.rows
            return
        self._unwritten.append(EncodedBatch(key, ident, content, rows.rows, source))

    def _sketch(self, key: VersionKey, rows: BatchRows, source: PredictionSource) -> None:
        """Hand features and outputs to whoever looks for drift."""
        if self._collector is None:
            return
        inputs, outputs = rows.blocks()
        self._collector.add(*key, _named(inputs, source.features))
        self._collector.add(*key, _plain(outputs), role=ColumnRole.PREDICTION)

    def _write(self) -> None:
        """Store what is encoded, oldest first; what fails is tried again next time, as long as memory allows."""
        while self._unwritten:
            waiting = self._unwritten[0]
            try:
                self._keeps(*waiting)
            except AlreadyExists:
                pass
            except FINAL as error:
                _log.error("%s predictions were not logged: %s", waiting.rows, error)
                self.lost[waiting.key] += waiting.rows
            except FalajError as error:
                if not self._failing:
                    _log.error("predictions cannot be logged; they wait in memory: %s", error)
                self._failing = True
                break
            self._failing = False
            self._unwritten.popleft()
        while sum(len(waiting.content) for waiting in self._unwritten) > MAX_PENDING_BYTES:
            gone = self._unwritten.popleft()
            self.lost[gone.key] += gone.rows


def _await_answers(closed: Sequence[OpenBatch]) -> None:
    """Wait until all ids that were given out of closed batches have their answers, within limits."""
    time.sleep(GRACE_S)
    given = [(batch, next(batch.numbers)) for batch in closed]
    until = time.monotonic() + MAX_RESPONSE_WAIT_S
    while any(batch.noted < number for batch, number in given) and time.monotonic() < until:
        time.sleep(GRACE_S)


def _part(response: PredictedBatch, requests: PredictedRequest) -> PredictedBatch:
    """One request of an answered batch, on its own."""
    rows, size = requests.rows, response.requests[-1].rows.stop
    own = requests._replace(rows=slice(0, rows.stop - rows.start))
    inputs = [array[rows] if array.ndim and len(array) == size else array for array in response.inputs]
    outputs = [array[rows] if array.ndim and len(array) == size else array for array in response.outputs]
    return PredictedBatch(response.model, response.at, [own], inputs, outputs)


def _named(inputs: dict[str, Any], features: Sequence[str]) -> dict[str, Any]:
    """What went in: the columns of the one input if they have names, else whole tensors."""
    if len(inputs) == 1 and features:
        (block,) = inputs.values()
        if block.ndim == 2 and block.shape[1] == len(features):
            return {name: block[:, column] for column, name in enumerate(features)}
    return _plain(inputs)


def _plain(blocks: dict[str, Any]) -> dict[str, Any]:
    return {name: block for name, block in blocks.items() if block.ndim in (1, 2)}
