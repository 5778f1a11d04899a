"""A malicious ONNX model cannot harm the process that opens it."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from onnx import ModelProto, TensorProto, helper

from falaj.assembly.parsing import find_sandboxes
from falaj.errors import InvalidInput, TooLarge, Unavailable
from falaj.ports.sandbox import Sandbox, UserCode
from falaj.records.serving.endpoints import ServedFile
from falaj.serving.runtime import worker as workers
from falaj.serving.runtime.engine import ModelEngine
from falaj.serving.runtime.loading import open_model
from model_servers import counting, filling, model, outer_sum
from polling import eventually

SECRET = b"a secret of ours"
MB = 2**20


@pytest.fixture(scope="module")
def counter() -> Iterator[ModelEngine]:
    engine = open_model(ServedFile(model="m", version="1"), counting().SerializeToString())
    yield engine
    engine.close()


def workers_now() -> set[int]:
    """Return the process ids of all workers of this process."""
    found = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    children = [int(ident) for each in found for ident in each.read_text().split()]
    return {child for child in children if b"worker_process" in Path(f"/proc/{child}/cmdline").read_bytes()}


def reading(tensor: TensorProto, *, as_constant: bool) -> ModelProto:
    """Return a model that adds the bytes of `tensor` to its input."""
    tensor.name = "w"
    nodes = [helper.make_node("Constant", [], ["w"], value=tensor)] if as_constant else []
    nodes += [
        helper.make_node("Cast", ["w"], ["c"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["x", "c"], ["y"]),
    ]
    shape = ["n", len(SECRET)]
    graph = helper.make_graph(
        nodes,
        "reads",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        [] if as_constant else [tensor],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def in_file(location: str) -> TensorProto:
    tensor = TensorProto(data_type=TensorProto.UINT8, dims=[len(SECRET)], data_location=TensorProto.EXTERNAL)
    for key, value in {"location": location, "offset": "0", "length": str(len(SECRET))}.items():
        tensor.external_data.add(key=key, value=value)
    return tensor


def test_a_model_in_the_other_format_of_the_runtime_is_not_opened(tmp_path: Path) -> None:
    """A file can be both: its operators were read as ONNX, and other ones would run."""
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "m.ort")
    options.add_session_config_entry("session.save_model_format", "ORT")
    ort.InferenceSession(filling().SerializeToString(), options, providers=["CPUExecutionProvider"])

    with pytest.raises(InvalidInput, match="not an ONNX model"):
        open_model(ServedFile(model="m", version="1"), (tmp_path / "m.ort").read_bytes())


@pytest.mark.parametrize("as_constant", [False, True], ids=["initializer", "constant"])
@pytest.mark.parametrize("above", ["", "../", "/"])
def test_a_model_cannot_read_files_of_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, above: str, as_constant: bool
) -> None:
    (tmp_path / "secret.key").write_bytes(SECRET)
    monkeypatch.chdir(tmp_path)
    location = (
        f"{tmp_path}/secret.key" if above == "/" else f"{above}{above and tmp_path.name + '/'}secret.key"
    )
    content = reading(in_file(location), as_constant=as_constant).SerializeToString()

    with pytest.raises(InvalidInput, match="not an ONNX model that can be opened"):
        open_model(ServedFile(model="m", version="1"), content)


def test_weights_inside_the_model_are_read(tmp_path: Path) -> None:
    inside = TensorProto(data_type=TensorProto.UINT8, dims=[len(SECRET)], raw_data=SECRET)

    engine = open_model(
        ServedFile(model="m", version="1"), reading(inside, as_constant=False).SerializeToString()
    )

    (answer,) = engine.run([np.zeros((1, len(SECRET)), np.float32)])
    assert bytes(answer[0].astype(np.uint8)) == SECRET


def test_a_model_that_never_ends_is_stopped(counter: ModelEngine) -> None:
    with pytest.raises(Unavailable, match=r"exceeded its time limit of 0\.2 s"):
        counter.run([np.array([2**62])], limit_s=0.2)

    assert counter.run([np.array([3])])[0].tolist() == [3]


def test_a_model_that_is_quick_on_trial_values_only_does_not_run_on_the_event_loop(
    counter: ModelEngine,
) -> None:
    assert not counter.cost.inline
    assert not counter.in_process


# --------------------------------------------------------------------------------------------- memory


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.fixture(scope="module")
def filler() -> Iterator[ModelEngine]:
    engine = open_model(
        ServedFile(model="m", version="1"), filling().SerializeToString(), memory_bytes=128 * MB
    )
    yield engine
    engine.close()


@pytest.mark.parametrize("count", [10**8, 10**9, 10**12])
def test_values_that_ask_for_too_much_memory_are_refused(filler: ModelEngine, count: int) -> None:
    before = resident_bytes()

    with pytest.raises(TooLarge, match="more memory"):
        filler.run([np.array([count])])

    assert filler.run([np.array([3])])[0].tolist() == 0
    assert resident_bytes() - before < 32 * MB


def test_outputs_are_limited(filler: ModelEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_model(
        ServedFile(model="m", version="1"),
        filling(summed=False).SerializeToString(),
        memory_bytes=1024 * MB,
    )
    try:
        with pytest.raises(TooLarge):
            engine.run([np.array([20_000_000])])
    finally:
        engine.close()


def test_a_run_in_this_process_has_a_memory_limit_too_and_keeps_nothing() -> None:
    engine = open_model(ServedFile(model="m", version="1"), outer_sum().SerializeToString())
    assert engine.in_process
    engine.run([np.ones((100, 1), np.float32)])
    before = resident_bytes()

    (total,) = engine.run([np.ones((8000, 1), np.float32)])  # 256 MB on the way
    kept = resident_bytes() - before
    with pytest.raises(TooLarge, match="more memory"):
        engine.run([np.ones((20_000, 1), np.float32)])  # 1.6 GB

    assert total == 128_000_000
    assert kept < 32 * MB


# -------------------------------------------------------------------------------------------- workers


def test_a_worker_that_was_killed_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    before = workers_now()
    engine = open_model(ServedFile(model="m", version="1"), counting().SerializeToString())
    assert isinstance(engine, workers.WorkerEngine)
    try:
        (worker,) = workers_now() - before
        assert engine._worker is not None
        with monkeypatch.context() as unnoticed:
            unnoticed.setattr(engine._worker.process, "poll", lambda: None)
            os.kill(worker, signal.SIGKILL)
            with pytest.raises(Unavailable, match="started again"):
                engine.run([np.array([3])])

        assert engine.run([np.array([3])])[0].tolist() == [3]
    finally:
        engine.close()
    assert workers_now() == before


def test_a_worker_whose_end_was_noticed_is_started_again_without_an_error() -> None:
    before = workers_now()
    engine = open_model(ServedFile(model="m", version="1"), counting().SerializeToString())
    assert isinstance(engine, workers.WorkerEngine)
    try:
        (worker,) = workers_now() - before
        assert engine._worker is not None
        process = engine._worker.process
        os.kill(worker, signal.SIGKILL)
        eventually(lambda: process.poll() is not None)

        assert engine.run([np.array([3])])[0].tolist() == [3]
    finally:
        engine.close()


@pytest.mark.slow
def test_requests_that_kill_their_worker_neither_end_the_server_nor_start_worker_after_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The CPU refuses the smallest whole number divided by -1, and the process that asked ends."""
    dividing = model([helper.make_node("Div", ["a", "b"], ["y"])], {"a": ["n"], "b": ["n"]}, {"y": ["n"]})
    engine = open_model(ServedFile(model="m", version="1"), dividing.SerializeToString())
    deadly, harmless = [np.array([-(2**63)]), np.array([-1])], [np.array([6]), np.array([3])]
    monkeypatch.setattr(workers, "MIN_BACKOFF_S", 3600.0)
    monkeypatch.setattr(workers, "MAX_BACKOFF_S", 3600.0)
    try:
        with pytest.raises(Unavailable, match="started again"):
            engine.run(deadly)
        assert engine.run(harmless)[0].tolist() == [2]

        with pytest.raises(Unavailable, match="started again"):
            engine.run(deadly)
        with pytest.raises(Unavailable, match="waits to be started"):
            engine.run(harmless)
    finally:
        engine.close()


def test_a_worker_that_does_not_stop_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "GRACE_S", -0.5)  # impatient enough not to wait for the worker's own limit
    engine = open_model(ServedFile(model="m", version="1"), counting().SerializeToString())
    try:
        with pytest.raises(Unavailable, match="did not stop"):
            engine.run([np.array([2**62])], limit_s=1.0)

        assert engine.run([np.array([3])], limit_s=30)[0].tolist() == [3]
    finally:
        engine.close()


@pytest.mark.slow
def test_a_worker_ends_with_its_engine_and_holds_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET", "of the platform")
    before = workers_now()
    engine = open_model(ServedFile(model="m", version="1"), counting().SerializeToString())
    (worker,) = workers_now() - before
    environment = Path(f"/proc/{worker}/environ").read_bytes()
    files = [os.readlink(each) for each in Path(f"/proc/{worker}/fd").iterdir() if each.name != "2"]

    del engine
    gc.collect()

    assert workers_now() == before
    assert b"A_SECRET" not in environment
    assert all(file.startswith(("socket:", "/dev/null")) for file in files)


@pytest.mark.parametrize("sandbox", find_sandboxes(), ids=lambda sandbox: sandbox.name)
def test_a_worker_runs_in_the_sandbox(sandbox: Sandbox, tmp_path: Path) -> None:
    starter = workers.WorkerStarter(lambda: [Refusing(), sandbox], hidden=[tmp_path])
    (tmp_path / "secret").write_bytes(SECRET)
    content = counting().SerializeToString()
    before = runtimes_now()

    engine = open_model(ServedFile(model="m", version="1"), content, starter=starter)

    try:
        assert engine.run([np.array([3])])[0].tolist() == [3]
        (inner,) = runtimes_now() - before
        status = dict(line.split(":\t") for line in Path(f"/proc/{inner}/status").read_text().splitlines())
        if sandbox.name != "same-uid":
            assert status["Seccomp"].strip() == "2"
            assert status["NoNewPrivs"].strip() == "1"
        if sandbox.name == "bubblewrap":
            assert not Path(f"/proc/{inner}/root{tmp_path}/secret").exists()
    finally:
        engine.close()
    eventually(lambda: runtimes_now() == before)


class Refusing:
    """A sandbox in which nothing starts."""

    name, gaps = "refusing", ()

    def start(self, code: UserCode, *, stdout: int, stderr: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["/bin/false"], stdout=stdout, stderr=stderr, start_new_session=True)


def descendants(process: int) -> set[int]:
    found: set[int] = set()
    for each in Path(f"/proc/{process}/task").glob("*/children"):
        for child in map(int, each.read_text().split()):
            found |= {child} | descendants(child)
    return found


def runtimes_now() -> set[int]:
    """Return the processes below this one that have loaded ONNX Runtime, also inside of sandboxes."""
    return {child for child in descendants(os.getpid()) if has_loaded_runtime(child)}


def has_loaded_runtime(process: int) -> bool:
    try:
        return "onnxruntime" in Path(f"/proc/{process}/maps").read_text()
    except OSError:  # it has ended
        return False


SERVES = """
import sys, time
from pathlib import Path
from falaj.records.serving.endpoints import ServedFile
from falaj.serving.runtime.loading import open_model
engine = open_model(ServedFile(model="m", version="1"), Path(sys.argv[1]).read_bytes())
print(engine._worker.process.pid, flush=True)
time.sleep(60)
"""


def test_a_worker_does_not_outlive_a_killed_server(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(counting().SerializeToString())
    with subprocess.Popen(
        [sys.executable, "-c", SERVES, tmp_path / "m.onnx"], stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        worker = Path("/proc", server.stdout.readline().strip())
        assert worker.exists()

        server.kill()

        eventually(lambda: not worker.exists() or "Z" in worker.joinpath("stat").read_text().split()[2])


def test_a_model_that_cannot_be_opened_says_why_wherever_it_is_opened() -> None:
    content = model([helper.make_node("NoSuchOperator", ["x"], ["y"])], {"x": [1]}, {"y": [1]})

    with pytest.raises(InvalidInput, match="not an ONNX model that can be opened"):
        open_model(ServedFile(model="m", version="1"), content.SerializeToString())


def test_texts_travel_to_a_worker_and_back() -> None:
    content = model(
        [helper.make_node("Unsqueeze", ["x", "zero"], ["y"])],
        {"x": [2]},
        {"y": [1, 2]},
        kind=TensorProto.STRING,
        weights={"zero": np.array([0])},
    ).SerializeToString()
    engine = open_model(ServedFile(model="m", version="1"), content, isolation="always")
    try:
        assert engine.run([np.array(["é", ""], object)])[0].tolist() == [["é", ""]]
    finally:
        engine.close()
