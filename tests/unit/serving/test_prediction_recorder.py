"""The server's side of the prediction log: what it hands over, what waits for it, and a log that dies or hangs."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from falaj.apps.model_server.platform import log_channel
from falaj.apps.model_server.platform.log_channel import RunningLog
from falaj.apps.model_server.platform.log_frames import BatchClosed, FrameReader, ToLog, frame
from falaj.apps.model_server.platform.log_process import LogReceiver, LogThread
from falaj.apps.model_server.platform.recorder import PredictionRecorder, PredictionSource, VersionKey
from falaj.errors import FalajError, NotFound, Unavailable
from falaj.records.serving.tensors import Datatype, ServedModel, Tensor
from falaj.serving.dependencies import PredictedBatch
from polling import eventually_async

KEY: VersionKey = ("endpoint", "1")
MODEL = ServedModel(
    name="m",
    version="1",
    platform="onnx",
    inputs=(Tensor(name="x", datatype=Datatype.FP32, shape=(-1, 2)),),
    outputs=(Tensor(name="y", datatype=Datatype.BYTES, shape=(-1,)),),
)


class Store:
    """Counts the rows of stored batches, or fails as configured."""

    def __init__(self) -> None:
        self.rows: dict[str, int] = {}
        self.error: FalajError | None = None
        self.refused = 0

    def __call__(
        self, key: VersionKey, batch: str, content: bytes, rows: int, source: PredictionSource
    ) -> None:
        if self.error is not None:
            self.refused += 1
            raise self.error
        self.rows[batch] = rows


class Logs:
    """Starts logs in threads, and can end the newest."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.started: list[RunningLog] = []

    def __call__(self, connection: socket.socket) -> RunningLog:
        self.started.append(LogThread(LogReceiver(connection, self._store, every_s=0.05), connection))
        return self.started[-1]


class Deaf:
    """A log that reads nothing."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def wait(self, timeout_s: float) -> bool:
        self.kill()
        return True

    def kill(self) -> None:
        self._connection.close()


def recording(
    start: Any, work: Callable[[PredictionRecorder], Awaitable[None]], *, every_s: float = 60
) -> PredictionRecorder:
    """Run `work` with a recorder, and stop it."""

    async def main() -> PredictionRecorder:
        recorder = PredictionRecorder(start, every_s=every_s)
        recorder.sources = {KEY: PredictionSource("version", (), ())}
        recorder.start()
        await work(recorder)
        await recorder.stop()
        return recorder

    return asyncio.run(main())


def answer(recorder: PredictionRecorder, rows: int = 1) -> str:
    """Record a request with that many rows, and return its id."""
    ident = recorder.next_id(*KEY)
    block, texts = np.zeros((rows, 2), np.float32), np.array(["yes"] * rows, np.object_)
    now, facts = datetime.now(UTC), ([ident], [rows], ["vera"], [""])
    recorder.add(PredictedBatch(MODEL, now, "endpoint", *facts, [block], [texts]))
    return ident


def test_everything_is_stored_when_the_server_stops() -> None:
    store = Store()

    async def work(recorder: PredictionRecorder) -> None:
        for _ in range(200):
            answer(recorder, 3)

    recorder = recording(Logs(store), work)

    assert (sum(store.rows.values()), dict(recorder.lost)) == (600, {})


def test_batches_are_stored_while_the_server_runs() -> None:
    store = Store()

    async def work(recorder: PredictionRecorder) -> None:
        first = answer(recorder)
        await eventually_async(lambda: first.rpartition("-")[0] in store.rows)
        assert answer(recorder).rpartition("-")[0] != first.rpartition("-")[0]

    recording(Logs(store), work, every_s=0.05)


def test_responses_that_wait_are_told_when_they_are_stored_together() -> None:
    store, told = Store(), []

    async def work(recorder: PredictionRecorder) -> None:
        for _ in range(20):
            recorder.when_stored(answer(recorder), lambda stored: told.append((stored, dict(store.rows))))
        await eventually_async(lambda: len(told) == 20)

    recording(Logs(store), work)

    assert all(stored and sum(rows.values()) == 20 for stored, rows in told)
    assert len(store.rows) == 1


@pytest.mark.parametrize("error", [NotFound("there is no endpoint"), Unavailable("the disk is full")])
def test_a_response_is_not_told_that_it_is_stored_if_it_is_not(
    error: FalajError, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("falaj.apps.model_server.platform.recorder.MAX_COMMIT_S", 0.2)
    store, told = Store(), list[bool]()
    store.error = error

    async def work(recorder: PredictionRecorder) -> None:
        recorder.when_stored(answer(recorder), told.append)
        await eventually_async(lambda: told)
        store.error = None

    recorder = recording(Logs(store), work)

    assert told == [False]
    assert recorder.lost[KEY] == (1 if isinstance(error, NotFound) else 0)


def test_a_log_that_dies_is_started_again_and_what_it_had_is_counted() -> None:
    store, told = Store(), list[bool]()
    store.error = Unavailable("the disk is full")
    logs = Logs(store)

    async def work(recorder: PredictionRecorder) -> None:
        recorder.when_stored(answer(recorder, 5), told.append)
        await eventually_async(lambda: store.refused)
        logs.started[0].kill()
        await eventually_async(lambda: len(logs.started) == 2)
        store.error = None
        answer(recorder, 2)

    recorder = recording(logs, work)

    assert told == [False]
    assert recorder.lost[KEY] == 5
    assert 2 in store.rows.values()


def test_memory_is_bounded_while_the_log_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_channel, "MAX_UNSENT_BYTES", 100_000)
    monkeypatch.setattr(log_channel, "SOCKET_BYTES", 10_000)
    monkeypatch.setattr(log_channel, "STOP_S", 0.2)
    sent = 0

    async def work(recorder: PredictionRecorder) -> None:
        nonlocal sent
        for _ in range(300):
            answer(recorder, 100)
            sent += 100
            await asyncio.sleep(0)
        assert 0 < recorder.lost[KEY] < sent

    recorder = recording(Deaf, work)

    assert recorder.lost[KEY] == sent  # all of it, once nobody is left to store it


def test_a_log_that_cannot_be_started_loses_nothing_but_what_is_counted() -> None:
    refused: list[str] = []

    def refuse(_connection: socket.socket) -> RunningLog:
        refused.append("now")
        raise OSError("no more processes")

    async def work(recorder: PredictionRecorder) -> None:
        answer(recorder, 3)
        await eventually_async(lambda: refused)

    assert recording(refuse, work).lost[KEY] == 3


def test_ids_are_unique_however_many_threads_ask() -> None:
    found: list[str] = []

    async def work(recorder: PredictionRecorder) -> None:
        def ask() -> None:
            found.extend(recorder.next_id(*KEY) for _ in range(500))

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        await asyncio.gather(*(asyncio.to_thread(thread.join) for thread in threads))

    recording(Logs(Store()), work)

    assert len(set(found)) == 4000


@given(st.lists(st.integers(0, 50), max_size=20), st.integers(1, 17))
def test_messages_are_found_however_the_bytes_are_cut(sizes: list[int], step: int) -> None:
    sent = [BatchClosed("x" * size, size) for size in sizes]
    data = b"".join(map(frame, sent))
    reader = FrameReader(ToLog)

    found = [each for at in range(0, len(data), step) for each in reader.feed(data[at : at + step])]

    assert found == sent


@given(st.binary(max_size=200))
def test_bytes_that_are_no_message_are_refused_with_a_value_error(data: bytes) -> None:
    with suppress(ValueError):
        list(FrameReader(ToLog).feed(data))
