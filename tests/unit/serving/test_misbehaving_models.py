"""Models that answer otherwise than declared, crash or hang: an error with a sentence; others keep their latency."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from falaj.errors import InvalidInput
from falaj.records.serving.endpoints import ServedFile
from falaj.records.serving.tensors import Datatype, ServedModel, Tensor
from falaj.serving.dependencies import PredictedBatch
from falaj.serving.runtime.engine import MODEL_MEMORY_BYTES, ModelEngine
from falaj.serving.runtime.engines.opened import ModelContents
from falaj.serving.runtime.loading import load
from falaj.serving.runtime.probe import RunCost
from falaj.serving.runtime.worker import WorkerEngine
from model_servers import RawClient, constant, deployment, request, save, serving
from polling import PATIENCE_S, eventually, let_pass

BODY = b'{"inputs":[{"name":"x","shape":[1,2],"datatype":"FP32","data":[1,2]}]}'


def ask(*rows: tuple[float, float], path: str = "/v2/models/m/infer") -> bytes:
    tensor = {"name": "x", "shape": [len(rows), 2], "datatype": "FP32", "data": [v for r in rows for v in r]}
    return request(path=path, body=json.dumps({"inputs": [tensor]}).encode())


def dropping(path: Path, *, declared: list[Any]) -> Path:
    """Write a model that leaves out rows whose first value is negative, and declares its output as `declared`."""
    return save(
        path,
        [
            helper.make_node("Gather", ["x", "zero"], ["first"], axis=1),
            helper.make_node("Less", ["first", "limit"], ["is_less"]),
            helper.make_node("Not", ["is_less"], ["kept"]),
            helper.make_node("Compress", ["x", "kept"], ["y"], axis=0),
        ],
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, declared)],
        {"zero": np.array(0, np.int64), "limit": np.array(0, np.float32)},
    )


# ------------------------------------------------------------------------------ answers otherwise than declared


def test_rows_that_are_left_out_are_nobody_elses(tmp_path: Path) -> None:
    """On trial values the model answers each row, so that requests share runs; on others it does not."""
    wanted = deployment(("m", "1", dropping(tmp_path / "m.onnx", declared=["m", 2])))
    with serving(wanted) as server, RawClient(server.port) as client:
        queue = server.server._deployment_state.served["m"].queues["1"]
        assert queue.engine.cost.rows > 1

        client.send(b"".join(ask((n if n % 3 else -n, n)) for n in range(1, 13)))
        answers = [json.loads(client.answer()[2])["outputs"][0]["data"] for _ in range(12)]

    assert answers == [[n, n] if n % 3 else [] for n in range(1, 13)]


def test_an_answer_of_another_shape_is_not_passed_on(tmp_path: Path) -> None:
    wanted = deployment(("m", "1", dropping(tmp_path / "m.onnx", declared=[3, 2])))
    with serving(wanted) as server, RawClient(server.port) as client:
        status, _, body = client.ask(ask((1, 1), (-1, 1), (2, 2)))
        good = client.ask(ask((1, 1), (1, 1), (2, 2)))[0]

    assert status == 400
    assert json.loads(body)["error"] == (
        "the model m@1 answered y with the shape [2, 2] where it declares [3, 2]; its answer is not passed on"
    )
    assert good == 200


def test_a_worker_cannot_answer_with_other_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = ServedFile(model="m", version="1", path=constant(tmp_path / "m.onnx", 1))
    engine = WorkerEngine(
        file, ModelContents((tmp_path / "m.onnx").read_bytes()), memory_bytes=MODEL_MEMORY_BYTES, threads=1
    )
    try:
        worker: Any = engine._worker
        row = np.zeros((1, 2), np.float32)
        assert engine.run([row])[0].tolist() == [[1.0]]

        for lie, words in (
            (np.zeros((1, 1), np.float64), "with the type float64 where it declares FP32"),
            (np.zeros((2,), np.float32), r"with the shape \[2\] where it declares \[-1, 1\]"),
        ):
            monkeypatch.setattr(worker, "run", lambda *_, answer=lie, **__: [answer])
            with pytest.raises(InvalidInput, match=words):
                engine.run([row])
        monkeypatch.setattr(worker, "run", lambda *_, **__: [])
        with pytest.raises(InvalidInput, match="with 0 outputs where it declares 1"):
            engine.run([row])
    finally:
        engine.close()


# --------------------------------------------------------------------------------------------- hang and crash


class SleepingEngine:
    """A model in this process whose runs take as long as `rest` does, in threads."""

    in_process = True

    def __init__(self, file: ServedFile, rest: Callable[[], object]) -> None:
        tensor = Tensor(name="x", datatype=Datatype.FP32, shape=(-1, 2))
        self.model = ServedModel(
            name=file.model, version=file.version, platform="stub", inputs=(tensor,), outputs=(tensor,)
        )
        self.cost = RunCost(0.001, rows=1, inline_rows=0)
        self._rest = rest

    def run(self, inputs: Sequence[Any], *, limit_s: float = 60) -> list[Any]:
        self._rest()
        return list(inputs)

    def close(self) -> None: ...


def test_a_model_that_hangs_delays_no_other(tmp_path: Path) -> None:
    """Its runs occupy threads of its own."""

    runs, may_end = threading.Event(), threading.Event()

    def hang() -> None:
        runs.set()
        assert may_end.wait(PATIENCE_S)

    def open_engine(file: ServedFile) -> ModelEngine:
        return SleepingEngine(file, hang if file.model == "hangs" else partial(let_pass, 0.001))

    wanted = deployment(("hangs", "1", tmp_path), ("good", "1", tmp_path))
    with (
        serving(wanted, load=open_engine) as server,
        RawClient(server.port) as stuck,
        RawClient(server.port) as client,
    ):
        good = ask((1, 2), path="/v2/models/good/infer")
        stuck.send(ask((1, 2), path="/v2/models/hangs/infer") * 20)
        assert runs.wait(PATIENCE_S)
        for _ in range(50):
            assert client.ask(good)[0] == 200
        may_end.set()


@pytest.mark.slow
def test_a_worker_that_crashes_again_and_again_delays_no_other(tmp_path: Path) -> None:
    paths = {name: constant(tmp_path / f"{name}.onnx", n) for n, name in enumerate(("good", "crashes"))}
    engines: list[WorkerEngine] = []

    def open_engine(file: ServedFile) -> ModelEngine:
        if file.model == "good":
            return load(file)
        content = paths["crashes"].read_bytes()
        engines.append(WorkerEngine(file, ModelContents(content), memory_bytes=MODEL_MEMORY_BYTES, threads=2))
        return engines[0]

    wanted = deployment(*((name, "1", path) for name, path in paths.items()))
    with serving(wanted, load=open_engine) as server, ThreadPoolExecutor(1) as thread:
        over, starts, may_start = threading.Event(), threading.Event(), threading.Event()
        start = engines[0]._start

        def start_slowly() -> Any:
            starts.set()
            assert may_start.wait(PATIENCE_S)
            return start()

        engines[0]._start = start_slowly  # type: ignore[method-assign]
        crashing = thread.submit(keep_crashing, server.port, engines[0], over)
        assert starts.wait(PATIENCE_S)
        with RawClient(server.port) as client:
            for _ in range(300):
                assert client.ask(ask((1, 2), path="/v2/models/good/infer"))[0] == 200
        may_start.set()
        over.set()
        answers = crashing.result(PATIENCE_S)

    assert {status for status, _ in answers} <= {200, 503}
    errors = [json.loads(body)["error"] for status, body in answers if status == 503]
    assert any("ended during a run" in error or "waits to be started again" in error for error in errors)


def keep_crashing(port: int, engine: WorkerEngine, over: threading.Event) -> list[tuple[int, bytes]]:
    """Kill the process of a model whenever it has one, and ask it."""
    answers = []
    with RawClient(port) as client:
        while not over.is_set() or len(answers) < 3:
            worker = engine._worker
            if worker is not None:
                with suppress(ProcessLookupError):
                    os.killpg(worker.process.pid, signal.SIGKILL)
            status, _, body = client.ask(ask((1, 2), path="/v2/models/crashes/infer"))
            answers.append((status, body))
            let_pass(0.01)
    return answers


# ------------------------------------------------------------------------------------- clients that are gone


class NumberedPredictions:
    """A prediction log that takes only ids that it gave out."""

    def __init__(self) -> None:
        self._numbers = count()
        self.logged: set[int] = set()

    def next_id(self, endpoint: str, version: str) -> str:
        return f"prediction-{next(self._numbers)}"

    def add(self, batch: PredictedBatch) -> None:
        self.logged |= {int(ident.removeprefix("prediction-")) for ident in batch.predictions}


def test_a_client_that_resets_its_connection_does_not_fail_the_prediction_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = NumberedPredictions()

    def open_engine(file: ServedFile) -> ModelEngine:
        return SleepingEngine(file, partial(let_pass, 0.02))

    with serving(deployment(("m", "1", tmp_path)), load=open_engine, sink=log) as server:
        for wait_s in (0.0, 0.005, 0.01, 0.02, 0.03):
            with RawClient(server.port) as client:
                client.send(ask((1, 2)) * 4)
                let_pass(wait_s)
                client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with RawClient(server.port) as client:
            assert client.ask(ask((1, 2)))[0] == 200
        queue = server.server._deployment_state.served["m"].queues["1"]
        eventually(lambda: not queue.waiting)

        assert server.server.metrics.unlogged == 0
        assert server.server.metrics.held_bytes == 0

    assert log.logged
    assert not [each for each in caplog.records if each.levelname == "ERROR"]
