"""Requests that are answered together in one turn of the event loop: each as if it were alone."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random
from typing import Any, cast

import numpy as np
import pytest

from falaj.apps.model_server.http.connection import Connection
from falaj.apps.model_server.server import ModelServer
from falaj.records.serving.settings import ServingSettings
from falaj.serving.dependencies import PredictedBatch
from model_servers import OTHER_TOKEN, TOKEN, KnownTokens, constant, deployment, mlp, request
from polling import eventually, eventually_async

WIDTH = 3
CONNECTIONS = 5


class Transport:
    """Keeps what a connection writes."""

    def __init__(self) -> None:
        self.written = b""
        self.is_closed = False

    def write(self, data: bytes) -> None:
        self.written += data

    def get_extra_info(self, name: str) -> Any:
        return None

    def can_write_eof(self) -> bool:
        return False

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...

    def close(self) -> None:
        self.is_closed = True

    abort = close


class CountingTokens(KnownTokens):
    """Counts calls, and keeps the bytes of the bodies."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.data = b""
        self.expired = False

    def admit(self, credential: str, endpoint: str | None, data: bytes, *, calls: int = 1) -> str | None:
        found = None if self.expired else super().admit(credential, endpoint, data)
        if found is not None:
            self.calls += calls
            self.data += data
        return found

    def decide(self, credential: str, endpoint: str | None) -> None:
        self.expired = False
        super().decide(credential, endpoint)


class Log:
    """Numbers predictions, and keeps their batches."""

    def __init__(self) -> None:
        self.batches: list[PredictedBatch] = []
        self._given = 0

    def next_id(self, endpoint: str, version: str) -> str:
        self._given += 1
        return f"id-{self._given}"

    def add(self, batch: PredictedBatch) -> None:
        self.batches.append(batch)


class Turns:
    """Connections to a server without sockets, so that a test decides what arrives in one turn."""

    def __init__(self, folder: Path, *, sink: Log | None = None) -> None:
        self.tokens = CountingTokens()
        self.server = ModelServer(self.tokens, sink=sink)
        self.folder = folder
        self.transports = [Transport() for _ in range(CONNECTIONS)]
        self.connections = [Connection(self.server) for _ in self.transports]

    async def start(self, *, output: int = 1, **settings_: Any) -> None:
        mlp(self.folder / "m.onnx", widths=(WIDTH, output))
        wanted = deployment(("m", "1", self.folder / "m.onnx"))
        endpoint = wanted.endpoints[0].model_copy(update={"settings": ServingSettings(**settings_)})
        await self.server.apply(wanted.model_copy(update={"endpoints": (endpoint,)}))
        for connection, transport in zip(self.connections, self.transports, strict=True):
            connection.connection_made(cast(asyncio.Transport, transport))

    async def ask(self, *sent: bytes) -> list[bytes]:
        """Give each connection its bytes in one turn, and return what each wrote."""
        for transport in self.transports:
            transport.written = b""
        for connection, data in zip(self.connections, sent, strict=False):
            if data:
                connection.data_received(data)
        asked = list(zip(self.transports, sent, strict=False))
        await asyncio.sleep(0)
        await eventually_async(lambda: all(each.written or each.is_closed for each, data in asked if data))
        await asyncio.sleep(0)
        return [transport.written for transport, _ in asked]

    async def warm_up(self, *tokens: str) -> None:
        """Let every connection send twice, so that its next requests are known."""
        for _ in range(3):
            await self.ask(*(request(body=body(0, 0, 0), token=t) for t in tokens or [TOKEN] * CONNECTIONS))

    @property
    def batches(self) -> int:
        return self.server._dispatcher.served["m"].queues["1"].batches


def played(
    folder: Path,
    play: Callable[[Turns], Awaitable[None]],
    *,
    sink: Log | None = None,
    output: int = 1,
    **settings_: Any,
) -> None:
    async def main() -> None:
        turns = Turns(folder, sink=sink)
        await turns.start(output=output, **settings_)
        try:
            await play(turns)
        finally:
            for connection in list(turns.server.connections):
                cast(Connection, connection).connection_lost(None)
            await turns.server.stop()

    asyncio.run(main())


def body(*values: float) -> bytes:
    return around(json.dumps(values).encode())


def around(data: bytes) -> bytes:
    return b'{"inputs":[{"name":"x","shape":[1,3],"datatype":"FP32","data":%b}]}' % data


def binary(*values: float, size: int = 12) -> bytes:
    raw = struct.pack(f"<{len(values)}f", *values)
    tensor = {"name": "x", "shape": [1, 3], "datatype": "FP32", "parameters": {"binary_data_size": size}}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    return request(body=head + raw, Inference_Header_Content_Length=str(len(head)))


def parts(answer: bytes) -> tuple[int, bytes, Any]:
    """Return status, head and outputs of a response."""
    head, _, content = answer.partition(b"\r\n\r\n")
    found = json.loads(content)
    return int(head.split()[1]), head, found.get("outputs", found)


def expected(folder: Path, *rows: tuple[float, ...]) -> list[float]:
    import onnxruntime as ort

    session = ort.InferenceSession(folder / "m.onnx")
    return [float(session.run(None, {"x": np.array([row], np.float32)})[0][0, 0]) for row in rows]


def test_requests_of_one_turn_run_as_one_batch_and_get_their_own_answers(tmp_path: Path) -> None:
    rows = [(float(n), n / 3, -n * 1.5) for n in range(CONNECTIONS)]

    async def play(turns: Turns) -> None:
        await turns.warm_up()
        before, calls = turns.batches, turns.tokens.calls

        answers = await turns.ask(*(request(body=body(*row)) for row in rows))

        assert (turns.batches - before, turns.tokens.calls - calls) == (1, CONNECTIONS)
        assert turns.tokens.data.endswith(b"".join(body(*row) for row in rows))
        found = [parts(answer)[2][0]["data"][0] for answer in answers]
        assert found == pytest.approx(expected(tmp_path, *rows), rel=1e-5)
        assert turns.server.in_flight == turns.server.metrics.held_bytes == 0

    played(tmp_path, play)


@pytest.mark.parametrize("output", [1, 2])
@pytest.mark.parametrize("logged", [True, False])
@pytest.mark.parametrize("is_binary", [True, False])
def test_the_response_has_the_bytes_that_it_would_have_alone(
    tmp_path: Path, output: int, logged: bool, is_binary: bool
) -> None:
    async def play(turns: Turns) -> None:
        sent = binary(1, 2, 3) if is_binary else request(body=body(1, 2, 3))
        first = [(await turns.ask(sent))[0] for _ in range(2)]
        before = turns.batches

        *_, repeated = [await turns.ask(sent, sent) for _ in range(3)]

        assert (
            turns.batches - before == 4
        )  # the second connection was new: only the last two turns were shared
        plain = [without_ids(each) for each in (*first, *repeated)]
        assert plain == plain[:1] * 4
        assert (b"Falaj-Prediction: id-" in repeated[0]) is logged

    def without_ids(answer: bytes) -> bytes:
        head, _, content = answer.partition(b"\r\n\r\n")
        ident = next((line[18:] for line in head.split(b"\r\n") if line.startswith(b"Falaj-Prediction")), b"")
        assert content.count(ident) >= 1
        return answer.replace(ident, b"", 2) if ident else answer

    played(tmp_path, play, sink=Log() if logged else None, output=output)


def test_answered_rows_reach_the_log_with_their_caller_values_and_ids(tmp_path: Path) -> None:
    log = Log()

    async def play(turns: Turns) -> None:
        await turns.warm_up(TOKEN, TOKEN, OTHER_TOKEN)
        log.batches.clear()

        sent = [request(body=body(n, n, n), token=t) for n, t in enumerate((TOKEN, TOKEN, OTHER_TOKEN))]
        answers = await turns.ask(*sent)

        assert [(list(batch.callers), batch.inputs[0].tolist()) for batch in log.batches] == [
            (["tester", "tester"], [[0, 0, 0], [1, 1, 1]]),
            (["other"], [[2, 2, 2]]),
        ]
        names = [name for batch in log.batches for name in batch.predictions]
        assert all(name.encode() in answer for name, answer in zip(names, answers, strict=True))

    played(tmp_path, play, sink=log)


LYING = [
    b"[1,2,3],[4,5,6]",
    b"[1,2,3],[4,5",
    b"6]",
    b"[1,2",
    b"[1,2,3,4]",
    b"[1,2]",
    b"[]",
    b"",
    b"[1,2,1e39]",
    b"[1,2,null]",
    b'[1,2,"3"]',
    b"[1,2,NaN]",
    b"[[1,2,3]]",
    b"[1,2,3] ",
    b" [1,2,3]",
    b"[1,2,3]}],[{",
    b"[1,2,-]",
    b"[01,2,3]",
]


def test_values_that_lie_change_no_answer_but_their_own(tmp_path: Path) -> None:
    random, honest = Random(0), (0.25, -4.0, 9.0)

    async def alone(turns: Turns, sent: bytes) -> tuple[int, Any]:
        connection, transport = Connection(turns.server), Transport()
        connection.connection_made(cast(asyncio.Transport, transport))
        connection.data_received(sent)
        while not transport.written:
            await asyncio.sleep(0)
        connection.connection_lost(None)
        status, _, found = parts(transport.written)
        return status, found

    async def play(turns: Turns) -> None:
        answers = {lie: await alone(turns, request(body=around(lie))) for lie in LYING}
        (right,) = expected(tmp_path, honest)
        for _ in range(200):
            await turns.warm_up()
            lies = random.choices(LYING, k=CONNECTIONS - 1)
            place = random.randrange(CONNECTIONS)
            sent = [request(body=around(lie)) for lie in lies]
            sent.insert(place, request(body=body(*honest)))

            found = [(status, outputs) for status, _, outputs in map(parts, await turns.ask(*sent))]

            status, (output,) = found.pop(place)
            assert (status, output["data"]) == (200, [pytest.approx(right, rel=1e-5)])
            assert found == [answers[lie] for lie in lies]

    played(tmp_path, play)


def test_binary_rows_of_another_size_are_refused_alone(tmp_path: Path) -> None:
    async def play(turns: Turns) -> None:
        for _ in range(3):
            await turns.ask(*[binary(1, 2, 3)] * CONNECTIONS)

        answers = await turns.ask(binary(1, 2, 3), binary(1, 2), binary(1, 2, 3, 4), binary(4, 5, 6))

        assert [int(answer.split()[1]) for answer in answers] == [200, 400, 400, 200]

    played(tmp_path, play)


def test_a_decision_that_has_expired_is_made_again_and_counted_once(tmp_path: Path) -> None:
    async def play(turns: Turns) -> None:
        await turns.warm_up()
        turns.tokens.expired = True
        calls = turns.tokens.calls

        answers = await turns.ask(*[request(body=body(1, 2, 3))] * CONNECTIONS)

        assert [parts(answer)[0] for answer in answers] == [200] * CONNECTIONS
        assert turns.tokens.calls - calls == CONNECTIONS

    played(tmp_path, play)


def test_rows_that_need_a_closer_look_are_counted_once(tmp_path: Path) -> None:
    async def play(turns: Turns) -> None:
        await turns.warm_up()
        calls = turns.tokens.calls

        answers = await turns.ask(request(body=body(1, 2, 3)), request(body=around(b"[1,2,1e39]")))

        assert [parts(answer)[0] for answer in answers] == [200, 400]
        assert turns.tokens.calls - calls == 2

    played(tmp_path, play)


def test_a_client_that_left_within_the_turn_is_not_answered(tmp_path: Path) -> None:
    async def play(turns: Turns) -> None:
        await turns.warm_up()
        turns.connections[0].data_received(request(body=body(1, 2, 3)))
        turns.connections[0].connection_lost(None)
        turns.transports[0].written = b""

        answers = await turns.ask(b"", request(body=body(4, 5, 6)))

        assert (turns.transports[0].written, parts(answers[1])[0]) == (b"", 200)
        assert turns.server.in_flight == 0

    played(tmp_path, play)


def test_a_second_request_in_the_same_turn_is_answered_after_the_first(tmp_path: Path) -> None:
    async def play(turns: Turns) -> None:
        await turns.warm_up()
        turns.connections[0].data_received(request(body=body(1, 2, 3)))

        (answer,) = await turns.ask(request(body=body(4, 5, 6)))
        await eventually_async(lambda: turns.transports[0].written.count(b"HTTP/1.1") == 2)

        answers = [b"HTTP/1.1" + each for each in turns.transports[0].written.split(b"HTTP/1.1")[1:]]
        found = [parts(each)[2][0]["data"][0] for each in answers]
        assert found == pytest.approx(expected(tmp_path, (1, 2, 3), (4, 5, 6)), rel=1e-5)
        assert answer

    played(tmp_path, play)


def test_the_last_response_of_a_connection_that_closes_says_so(tmp_path: Path) -> None:
    async def play(turns: Turns) -> None:
        await turns.warm_up()
        turns.server.release_connections()

        answers = await turns.ask(*[request(body=body(1, 2, 3))] * 2)

        assert [b"\r\nConnection: close\r\n\r\n{" in answer for answer in answers] == [True, True]
        assert [parts(answer)[0] for answer in answers] == [200, 200]

    played(tmp_path, play)


def test_a_deployment_that_changes_answers_with_the_new_version_at_once(tmp_path: Path) -> None:
    async def play(turns: Turns) -> None:
        await turns.warm_up()
        constant(tmp_path / "c.onnx", 5.0)
        mlp(tmp_path / "n.onnx", widths=(WIDTH, 1), seed=7)
        turns.connections[0].data_received(request(body=body(1, 2, 3)))
        await turns.server.apply(deployment(("m", "2", tmp_path / "n.onnx")))

        answers = await turns.ask(*[request(body=body(1, 2, 3))] * CONNECTIONS)

        assert all(b'"model_version":"2"' in answer for answer in answers)

    played(tmp_path, play)


@pytest.mark.parametrize("rows", [2, 40_000])
def test_requests_with_more_rows_in_between_are_answered_as_ever(tmp_path: Path, rows: int) -> None:
    """A body of another shape is kept in place of the last one; a large one is read in a thread."""
    values = b"[%b]" % b",".join([b"1,2,3"] * rows)
    large = around(values).replace(b"[1,3]", b"[%d,3]" % rows)

    async def play(turns: Turns) -> None:
        await turns.warm_up()
        for _ in range(3):
            first = await turns.ask(*[request(body=large)] * 2, request(body=body(1, 2, 3)))
            again = await turns.ask(*[request(body=body(1, 2, 3))] * 3)

            sizes = [len(parts(answer)[2][0]["data"]) for answer in (*first, *again)]
            assert sizes == [rows, rows, 1, 1, 1, 1]

    played(tmp_path, play)


def test_limited_callers_are_limited_all_the_same(tmp_path: Path) -> None:
    async def play(turns: Turns) -> None:
        answers = [await turns.ask(*[request(body=body(1, 2, 3))] * CONNECTIONS) for _ in range(4)]

        found = [int(answer.split()[1]) for turn in answers for answer in turn]
        assert found.count(200) == 12
        assert found.count(429) == 8

    played(tmp_path, play, requests_per_second=0.001, burst=12)


def test_metrics_count_every_request(tmp_path: Path) -> None:
    async def play(turns: Turns) -> None:
        await turns.warm_up()
        await turns.ask(*[request(body=body(1, 2, 3))] * CONNECTIONS)

        counted = turns.server.metrics.of_version("m", "1")
        assert counted.statuses[200] == counted.rows == sum(counted.buckets) == 4 * CONNECTIONS
        assert eventually(lambda: turns.server.metrics.load().versions)[0].requests == 4 * CONNECTIONS

    played(tmp_path, play)
