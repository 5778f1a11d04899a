"""Models that are Python code: what they can do, and that nothing they do harms the server or other models."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest

from falaj.assembly.parsing import find_sandboxes
from falaj.errors import FalajError, InvalidInput, IsolationRefused, TooLarge, Unavailable
from falaj.records.registry import FileFormat
from falaj.records.serving.endpoints import ServedFile
from falaj.records.serving.settings import ServingSettings
from falaj.records.serving.tensors import Datatype, Tensor
from falaj.serving.runtime import worker as workers
from falaj.serving.runtime.engine import ModelEngine
from falaj.serving.runtime.engines.opened import ModelContents
from falaj.serving.runtime.loading import open_model
from model_servers import RawClient, constant, deployment, request, serving
from polling import eventually, let_pass

X = Tensor(name="x", datatype=Datatype.FP32, shape=(-1, 2))
Y = Tensor(name="y", datatype=Datatype.FP32, shape=(-1,))
FILE = ServedFile(model="m", version="1", format=FileFormat.PYTHON, inputs=(X,), outputs=(Y,))
ROW = np.array([[1, 2]], np.float32)
SEPARATING = [sandbox for sandbox in find_sandboxes() if sandbox.name != "same-uid"]

pytestmark = pytest.mark.skipif(not SEPARATING, reason="no sandbox works on this machine")


@contextmanager
def opened(source: str, *, files: dict[str, bytes] | None = None, **options: Any) -> Iterator[ModelEngine]:
    file = options.pop("file", FILE)
    starter = workers.WorkerStarter(lambda: SEPARATING, hidden=options.pop("hidden", ()))
    contents = ModelContents(dedent(source).encode(), files or {})
    engine = open_model(file, contents, starter=starter, **options)
    try:
        yield engine
    finally:
        engine.close()


def fault(engine: ModelEngine, kind: type[FalajError] | type[Exception] = Exception, **limits: Any) -> str:
    with pytest.raises(kind) as found:
        engine.run([ROW], **limits)
    return str(found.value)


# --------------------------------------------------------------------------------------------- what it can do


def test_functions_get_arrays_by_name_and_the_files_of_the_version() -> None:
    source = """
        import json
        WEIGHTS = None
        def load(files):
            global WEIGHTS
            WEIGHTS = json.loads(files["weights.json"])
        def predict(inputs):
            return {"y": inputs["x"] @ WEIGHTS}
    """
    with opened(source, files={"weights.json": b"[10, 1]"}) as engine:
        assert engine.run([np.array([[1, 2], [3, 4]], np.float32)])[0].tolist() == [12.0, 34.0]
        assert engine.cost.rows > 1  # its rows are independent, so requests share runs


def test_a_class_is_made_once_and_can_run_an_onnx_file_of_its_version(tmp_path: Path) -> None:
    source = """
        import numpy as np, onnxruntime as ort
        class Model:
            def __init__(self, files):
                self.session = ort.InferenceSession(files["inner.onnx"], providers=["CPUExecutionProvider"])
            def predict(self, inputs):
                (score,) = self.session.run(None, {"x": np.clip(inputs["x"], 0, 1)})
                return {"y": score[:, 0].round(2)}
    """
    inner = constant(tmp_path / "inner.onnx", 7.126).read_bytes()

    with opened(source, files={"inner.onnx": inner}) as engine:
        assert engine.run([ROW])[0].tolist() == [pytest.approx(7.13)]


def test_texts_in_and_out() -> None:
    text = Tensor(name="t", datatype=Datatype.BYTES, shape=(-1,))
    file = FILE.model_copy(update={"inputs": (text,), "outputs": (text,)})
    source = "def predict(inputs): return {'t': [each.upper() for each in inputs['t']]}"

    with opened(source, file=file) as engine:
        assert engine.run([np.array(["é", "b"], object)])[0].tolist() == ["É", "B"]


# --------------------------------------------------------------------------------------- what it cannot do


def test_it_has_no_network_no_environment_and_no_file_of_the_platform(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        source = f"""
            import os, socket
            def attempt(what):
                try:
                    return what() and 1.0
                except OSError:
                    return 0.0
            def predict(inputs):
                reached = [
                    attempt(lambda: socket.create_connection(("127.0.0.1", {listener.getsockname()[1]}), 1)),
                    attempt(lambda: open({str(tmp_path / "key")!r}).read()),
                    attempt(lambda: open({str(Path(__file__).resolve())!r}).read()),
                    float(any("SECRET" in name for name in os.environ)),
                    attempt(lambda: open("/etc/falaj-was-here", "w")),
                ]
                return {{"y": reached}}
        """
        os.environ["A_SECRET"] = "1"
        try:
            with opened(source, hidden=[tmp_path]) as engine:
                assert engine.run([ROW])[0].tolist() == [0, 0, 0, 0, 0]
        finally:
            del os.environ["A_SECRET"]


def test_it_is_refused_where_no_sandbox_keeps_it_apart() -> None:
    starter = workers.WorkerStarter()

    with pytest.raises(IsolationRefused, match=r"runs only where a sandbox keeps it apart.*'falaj doctor'"):
        open_model(FILE, b"def predict(inputs): return {}", starter=starter)


@pytest.mark.parametrize(
    ("source", "kind", "words"),
    [
        (
            "import nowhere_to_be_found",
            Unavailable,
            "m@1 imports nowhere_to_be_found, which is not installed",
        ),
        ("def predict(:", InvalidInput, "m@1 cannot be loaded: SyntaxError"),
        (
            "import sys; sys.exit(3)",
            InvalidInput,
            r"m@1 cannot be loaded: SystemExit: 3 \(model.py, line 1\)",
        ),
        ("import os; os._exit(3)", Unavailable, "m@1 cannot be opened within its limits"),
        ("x = bytearray(1 << 40)", Unavailable, "m@1 needs more memory to be opened"),
        ("def other(): pass", InvalidInput, "defines neither a function predict"),
        ("def load(files): files['no.json']\ndef predict(inputs): pass", InvalidInput, "KeyError: .*line 1"),
    ],
    ids=["import", "syntax", "exit", "crash", "memory", "nothing", "file"],
)
def test_one_that_cannot_be_loaded_says_why(source: str, kind: type[FalajError], words: str) -> None:
    with pytest.raises(kind, match=words), opened(source):
        pass


def test_one_that_hangs_while_it_is_loaded_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "START_S", 3.0)

    with (
        pytest.raises(Unavailable, match=r"within its limits of memory and time .*TimeoutError"),
        opened("while True: pass"),
    ):
        pass


@pytest.mark.parametrize(
    ("body", "kind", "words"),
    [
        (
            "raise ValueError('no such rider')",
            RuntimeError,
            r"ValueError: no such rider \(model.py, line 2\)",
        ),
        ("import sys; sys.exit()", RuntimeError, "SystemExit"),
        ("return 5", InvalidInput, "returned int; allowed a dict with y"),
        ("return {'z': [1.0]}", InvalidInput, r"returned \['z'\]; allowed a dict with y"),
        (
            "return {'y': [[1.0]]}",
            InvalidInput,
            r"answered y with the shape \[1, 1\] where it declares \[-1\]",
        ),
        ("return {'y': ['a']}", InvalidInput, "returned y with the type <U1 where it declares FP32"),
        ("return {'y': [float(__import__('os').fork())]}", RuntimeError, "PermissionError|BlockingIOError"),
        ("__import__('subprocess').run(['true'])", RuntimeError, "PermissionError|BlockingIOError"),
        ("return {'y': bytearray(1 << 40)}", TooLarge, "more memory than a run may use"),
    ],
    ids=["raises", "exits", "number", "name", "shape", "type", "forks", "starts", "memory"],
)
def test_one_that_fails_on_a_request_says_why_and_goes_on(body: str, kind: Any, words: str) -> None:
    source = f"def predict(inputs):\n    if len(inputs['x']) == 1 and inputs['x'][0, 0] == 1: {body}\n"
    source += "    return {'y': inputs['x'][:, 0]}"
    with opened(source) as engine:
        with pytest.raises(kind, match=words):
            engine.run([ROW])

        assert answered(engine, [ROW * 5]) == [5.0]


def answered(engine: ModelEngine, inputs: list[Any]) -> Any:
    """Return the answer, after the process was started again if it has ended."""

    def answer() -> Any:
        with suppress(Unavailable):
            return engine.run(inputs)[0].tolist()

    return eventually(answer)


def test_one_that_ends_its_process_is_started_again() -> None:
    source = """
        import os
        def predict(inputs):
            if inputs["x"][0, 0] == 1:
                os._exit(0)
            return {"y": inputs["x"][:, 0]}
    """
    with opened(source) as engine:
        assert "ended during a run" in fault(engine, Unavailable)
        assert answered(engine, [ROW * 5]) == [5.0]


def test_one_that_hangs_is_killed_at_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "GRACE_S", 0.5)
    source = """
        def predict(inputs):
            while inputs["x"][0, 0] == 1:
                pass
            return {"y": inputs["x"][:, 0]}
    """
    with opened(source) as engine:
        assert "did not stop at the time limit of 0.5 s" in fault(engine, Unavailable, limit_s=0.5)
        assert answered(engine, [ROW * 5]) == [5.0]


def test_one_that_leaks_memory_starts_afresh_when_there_is_no_more() -> None:
    source = """
        KEPT = []
        def predict(inputs):
            if inputs["x"][0, 0] == 1:
                KEPT.append(bytearray(40 << 20))
            return {"y": [float(len(KEPT))]}
    """
    with opened(source, memory_bytes=128 << 20) as engine:
        with pytest.raises(TooLarge, match="more memory than a run may use"):
            [engine.run([ROW]) for _ in range(10)]

        assert answered(engine, [ROW * 5]) == [0.0]


def test_it_cannot_raise_its_limit_of_memory() -> None:
    source = """
        import resource
        def predict(inputs):
            resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            return {"y": [1.0]}
    """
    with opened(source) as engine:
        assert "ValueError" in fault(engine, RuntimeError) or "not allowed" in fault(engine, RuntimeError)


# ---------------------------------------------------------------------------------- beside other models


def test_the_server_and_other_models_stay_up_beside_one_that_misbehaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "GRACE_S", 0.5)
    source = """
        import os, threading
        def predict(inputs):
            what = inputs["x"][0, 0]
            if what == 1:
                os._exit(1)
            while what == 2:
                pass
            if what == 3:
                threads = [threading.Thread(target=lambda: bytearray(64 << 20)) for _ in range(10_000)]
                [each.start() for each in threads]
            return {"y": inputs["x"][:, 0]}
    """
    settings = ServingSettings(timeout_ms=500)
    bad = FILE.model_copy(update={"model": "bad", "path": tmp_path / "model.py", "settings": settings})
    bad.path.write_text(dedent(source))  # type: ignore[union-attr]
    plain = deployment(("m", "1", constant(tmp_path / "m.onnx", 7)), ("bad", "1", tmp_path / "m.onnx"))
    endpoints = tuple(
        each.model_copy(update={"settings": settings}) if each.name == "bad" else each
        for each in plain.endpoints
    )
    wanted = plain.model_copy(update={"models": (plain.models[0], bad), "endpoints": endpoints})
    starter = workers.WorkerStarter(lambda: SEPARATING)

    def load(file: ServedFile) -> ModelEngine:
        return open_model(file, file.path.read_bytes(), starter=starter)  # type: ignore[union-attr]

    def ask(client: RawClient, model: str, value: float) -> int:
        tensor = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [value, 0]}
        body = json.dumps({"inputs": [tensor]}).encode()
        return client.ask(request(path=f"/v2/models/{model}/infer", body=body))[0]

    with (
        serving(wanted, load=load) as running,
        RawClient(running.port) as good,
        RawClient(running.port) as other,
    ):
        assert ask(other, "bad", 5) == 200
        statuses: list[int] = []
        asking = threading.Thread(
            target=lambda: statuses.extend(ask(other, "bad", value) for value in (1, 2, 3, 1))
        )
        asking.start()
        answers = []
        while asking.is_alive():
            answers.append(ask(good, "m", 1))
            let_pass(0.01)
        asking.join()

        assert set(answers) == {200}
        assert all(400 <= status < 600 for status in statuses)
        assert len(statuses) == 4
