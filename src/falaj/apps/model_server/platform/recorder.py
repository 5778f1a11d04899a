"""The server's side of the prediction log: assigns ids, and hands every answered batch to the process of the log.

Guarantees:
- A prediction that `endpoints.prediction` finds is on disk, and so is one whose response says `Falaj-Logged: true`.
- What was handed over is stored even if the server is killed. It is handed over within `HAND_OVER_S` of its response.
- If the log process is killed, what it has not stored is lost and counted; it is started again at once.
- Responses never wait for the log, except those of requests that asked to be logged first. If the log fails or cannot
  keep up, predictions that exceed the memory limits are dropped and counted.
- When the server stops, everything is stored.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count

from falaj.apps.model_server.platform.log_channel import LogChannel, RunningLog, StartLog
from falaj.apps.model_server.platform.log_frames import (
    BatchClosed,
    BatchOpened,
    BatchStored,
    FromLog,
    frame,
    rows_answered,
)
from falaj.apps.model_server.platform.prediction_writer import PredictionSource, VersionKey
from falaj.governance.operations.caller import start_thread
from falaj.records.names import new_id
from falaj.serving.dependencies import PredictedBatch

__all__ = ["PredictionRecorder", "PredictionSource", "VersionKey"]

BATCH_ROWS = 20_000
"""Rows after which a batch is closed."""
GRACE_S = 0.02
"""Time for ids in progress in other threads, after which a closed batch has given out its last id."""
COMMIT_S = 0.01
"""Responses that wait for the log within this time are stored together."""
MAX_COMMIT_S = 5.0
"""How long a response waits to be logged; then it is sent without saying that it was."""

_log = logging.getLogger(__name__)


class RecordedBatch:
    """A batch of one version: its ids, and the responses that wait until it is stored."""

    __slots__ = ("given", "ident", "is_announced", "key", "numbers", "prefix", "rows", "waiting")

    def __init__(self, key: VersionKey) -> None:
        self.key = key
        self.ident = str(new_id("predictions"))
        self.prefix = f"{self.ident}-"
        self.numbers = count()
        self.given: int | None = None
        self.is_announced = False
        self.rows = 0
        self.waiting: list[Callable[[bool], None]] = []


class PredictionRecorder:
    """Assigns ids and hands over responses; closes batches every `every_s` seconds, or when they are full."""

    def __init__(self, start_log: StartLog | None, *, every_s: float) -> None:
        """Without `start_log`, nothing is logged: only the periodic tasks run."""
        self._every_s = every_s
        self._starts = start_log is not None
        self._channel = LogChannel(start_log or _no_log, received=self._received, restarted=self._restarted)
        self._open: dict[VersionKey, RecordedBatch] = {}
        self._batches: dict[str, RecordedBatch] = {}
        """Batches that are not known to be stored, by id."""
        self._open_lock = threading.Lock()
        self._commit_due: asyncio.TimerHandle | None = None
        self._close_due: asyncio.TimerHandle | None = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self.lost: Counter[VersionKey] = Counter()
        self.sources: Mapping[VersionKey, PredictionSource] = {}
        self.periodic_tasks: Sequence[Callable[[], None]] = ()
        """Called every `every_s` seconds in a thread, and at the end."""

    def next_id(self, endpoint: str, version: str) -> str:
        batch = self._open.get((endpoint, version)) or self._begin((endpoint, version))
        return batch.prefix + str(next(batch.numbers))

    def _begin(self, key: VersionKey) -> RecordedBatch:
        with self._open_lock:
            batch = self._open.get(key)
            if batch is None:
                batch = RecordedBatch(key)
                self._batches[batch.ident] = batch
                self._open[key] = batch
            return batch

    # ---------------------------------------------------------------------------------- on the event loop

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        if self._starts:
            self._channel.start()
            self._close_due = self._loop.call_later(self._every_s, self._close_all)
        self._thread = start_thread(self._work, name="reports")

    async def stop(self) -> None:
        """Have everything stored, and end the process of the log."""
        if self._close_due is not None:
            self._close_due.cancel()
        batches, self._open = list(self._open.values()), {}
        for batch in batches:
            self._send_close(batch, given=0)
        await self._channel.stop()
        for batch in list(self._batches.values()):
            self._forget(batch)
        self._ended.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    def add(self, batch: PredictedBatch) -> None:
        names = batch.predictions
        ident, _, _ = names[0].rpartition("-")
        start = len(ident) + 1  # ids of batches are of one length
        if len(names) > 1 and not all(name.startswith(ident) for name in names):
            for part in _single_requests(batch):
                self.add(part)
            return
        numbers = [int(name[start:]) for name in names]
        rows = batch.rows
        if not self._announce(ident, batch) or not self._channel.send(
            frame(rows_answered(ident, numbers, batch))
        ):
            self.lost[batch.endpoint, batch.model.version] += rows
            return
        recorded = self._batches[ident]
        recorded.rows += rows
        self._close_late(recorded)
        if recorded.rows >= BATCH_ROWS and recorded.given is None:
            self._close([recorded.key])

    def _close_late(self, batch: RecordedBatch) -> None:
        """Close a batch again whose first rows came after its end: only now does the log know it."""
        if batch.given is not None:
            self._send_close(batch, given=batch.given)

    def when_stored(self, prediction: str, done: Callable[[bool], None]) -> None:
        """Call `done` once the prediction is on disk, with true; with false if it will not be, or not soon."""
        batch = self._batches.get(prediction.rpartition("-")[0])
        if batch is None:
            done(False)
            return
        if not batch.waiting:
            self._loop.call_later(MAX_COMMIT_S, self._give_up, batch)
        batch.waiting.append(done)
        if self._commit_due is None:
            self._commit_due = self._loop.call_later(COMMIT_S, self._commit)

    def _announce(self, ident: str, answered: PredictedBatch) -> bool:
        """Describe a batch to the log before its first rows; false if it is stored, or its lineage is not known."""
        batch = self._batches.get(ident)
        if batch is None or batch.is_announced:
            return batch is not None
        source = self.sources.get(batch.key)
        if source is None:
            return False
        model = answered.model.model_dump_json().encode()
        opened = BatchOpened(ident, *batch.key, model, source.version, source.views, source.features)
        batch.is_announced = self._channel.send(frame(opened))
        return batch.is_announced

    def _commit(self) -> None:
        """Close the batches that responses wait for."""
        self._commit_due = None
        self._close([key for key, batch in self._open.items() if batch.waiting])

    def _close_all(self) -> None:
        self._close(list(self._open))
        self._close_due = self._loop.call_later(self._every_s, self._close_all)

    def _close(self, keys: Sequence[VersionKey]) -> None:
        """Give out no more ids of the open batches of `keys`, and have them stored."""
        with self._open_lock:
            closed = [self._open.pop(key) for key in keys if key in self._open]
        if closed:
            self._loop.call_later(GRACE_S, self._closed, closed)

    def _closed(self, closed: Sequence[RecordedBatch]) -> None:
        for batch in closed:
            self._send_close(batch, given=next(batch.numbers))

    def _send_close(self, batch: RecordedBatch, *, given: int) -> None:
        batch.given = given
        if batch.is_announced:
            self._channel.send(frame(BatchClosed(batch.ident, given)), always=True)
        elif not given:
            self._batches.pop(batch.ident, None)

    def _received(self, message: FromLog) -> None:
        if isinstance(message, BatchStored):
            batch = self._batches.pop(message.ident, None)
            _answer(batch, True)
            return
        self.lost[message.endpoint, message.version] += message.rows
        _answer(self._batches.pop(message.ident, None), False)

    def _restarted(self) -> None:
        """Count what the ended process of the log has not stored."""
        with self._open_lock:
            batches, self._batches, self._open = self._batches, {}, {}
        for batch in batches.values():
            self.lost[batch.key] += batch.rows
            _answer(batch, False)

    def _forget(self, batch: RecordedBatch) -> None:
        self._batches.pop(batch.ident, None)
        self.lost[batch.key] += batch.rows
        _answer(batch, False)

    def _give_up(self, batch: RecordedBatch) -> None:
        _answer(batch, False)

    # -------------------------------------------------------------------------------------- in the thread

    def _work(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._ended.wait(self._every_s)
            for task in self.periodic_tasks:
                try:
                    task()
                except Exception:
                    _log.exception("a report to the platform failed")


def _single_requests(batch: PredictedBatch) -> Iterator[PredictedBatch]:
    """Yield each request of an answered batch as a batch of its own."""
    at, rows = 0, batch.rows
    facts = zip(batch.predictions, batch.counts, batch.callers, batch.requests, strict=True)
    for prediction, size, caller, request in facts:
        own = slice(at, at + size)
        inputs, outputs = (
            [array[own] if array.ndim and len(array) == rows else array for array in arrays]
            for arrays in (batch.inputs, batch.outputs)
        )
        yield PredictedBatch(
            batch.model, batch.at, batch.endpoint, [prediction], [size], [caller], [request], inputs, outputs
        )
        at += size


def _no_log(_connection: socket.socket) -> RunningLog:
    raise OSError("predictions are not logged")


def _answer(batch: RecordedBatch | None, is_stored: bool) -> None:
    """Answer the responses that wait for a batch."""
    if batch is not None:
        waiting, batch.waiting = batch.waiting, []
        for done in waiting:
            done(is_stored)
