"""Routing, batching and reloading: version choice, shared runs, and changes without failed requests."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from pydantic import ValidationError

from falaj.apps.model_server.server import listen
from falaj.errors import Damaged, FalajError, InvalidInput, NotFound
from falaj.records.serving.endpoints import Deployment, Endpoint, Route, ServedFile
from falaj.records.serving.tensors import Datatype, ServedModel, Tensor
from falaj.serving.routing import WeightedRouter, weighted_round_robin
from falaj.serving.runtime import batch_queue
from falaj.serving.runtime.batch_queue import BatchQueue
from falaj.serving.runtime.loading import load
from falaj.serving.runtime.probe import RunCost
from model_servers import (
    RawClient,
    RunningServer,
    centred,
    constant,
    counting,
    deployment,
    filling,
    mlp,
    request,
    serving,
    tabular,
    widened,
)
from polling import PATIENCE_S, eventually, let_pass

BODY = b'{"inputs":[{"name":"x","shape":[1,2],"datatype":"FP32","data":[1,2]}]}'
INFER = request(body=BODY)


def version(answer: tuple[int, dict[str, str], bytes]) -> str:
    assert answer[0] == 200, answer
    return str(json.loads(answer[2])["model_version"])


# ---------------------------------------------------------------------------------------------- routing


def test_weights_are_kept_exactly_and_spread_evenly() -> None:
    pattern = weighted_round_robin([Route(version="1", weight=90), Route(version="2", weight=10)])

    assert Counter(pattern) == {"1": 9, "2": 1}
    assert Counter(weighted_round_robin([Route(version=v, weight=1) for v in "123"])) == {
        "1": 1,
        "2": 1,
        "3": 1,
    }


def test_weighted_routing_continues_after_a_change() -> None:
    routes = [Route(version="1", weight=1), Route(version="2", weight=1)]
    first = WeightedRouter(routes)
    assert first.choose("") == "1"

    assert WeightedRouter(routes, counter=first.counter).choose("") == "2"


def test_ids_spread_by_weight() -> None:
    router = WeightedRouter([Route(version="1", weight=80), Route(version="2", weight=20)])

    chosen = Counter(router.choose(f"customer-{n}") for n in range(5000))

    assert 0.17 < chosen["2"] / 5000 < 0.23


@pytest.mark.parametrize(
    "routes", [[], [{"version": "1", "weight": 0}], [{"version": "1"}] * 2, [{"version": "9"}]]
)
def test_routes_to_unknown_versions_are_refused(routes: list[dict[str, object]]) -> None:
    files = [{"model": "m", "version": "1", "path": "m.onnx"}]
    endpoint = {"name": "m", "model": "m", "routes": routes}

    with pytest.raises(ValidationError):
        Deployment.model_validate({"models": files, "endpoints": [endpoint]})


# ---------------------------------------------------------------------------------------------- loading


def test_a_quick_model_shares_runs_on_the_loop(tmp_path: Path) -> None:
    cost = load(ServedFile(model="m", version="1", path=mlp(tmp_path / "m.onnx"))).cost

    assert (cost.rows, cost.inline) == (32, True)


def test_a_heavy_model_goes_to_a_thread(tmp_path: Path) -> None:
    path = mlp(tmp_path / "m.onnx", widths=(2, 2000, 2000, 1))

    assert not load(ServedFile(model="m", version="1", path=path)).cost.inline


def test_rows_that_depend_on_each_other_never_share_a_run(tmp_path: Path) -> None:
    assert load(ServedFile(model="m", version="1", path=centred(tmp_path / "m.onnx"))).cost.rows == 1


def test_a_fixed_first_dimension_is_never_shared(tmp_path: Path) -> None:
    assert load(ServedFile(model="m", version="1", path=mlp(tmp_path / "m.onnx", rows=4))).cost.rows == 1


def test_a_file_that_was_changed_is_refused(tmp_path: Path) -> None:
    path = constant(tmp_path / "m.onnx", 1)

    with pytest.raises(Damaged, match="m@1 differs from the registered one"):
        load(ServedFile(model="m", version="1", path=path, sha256="0" * 64))
    path.write_bytes(b"not a model")
    with pytest.raises(InvalidInput, match="m@1 is not an ONNX model"):
        load(ServedFile(model="m", version="1", path=path))
    path.unlink()
    with pytest.raises(NotFound, match="cannot be read"):
        load(ServedFile(model="m", version="1", path=path))


def test_listening_beyond_loopback_needs_tls() -> None:
    with pytest.raises(ValidationError, match="without TLS is refused"):
        listen("0.0.0.0", 0)


# --------------------------------------------------------------------------------------------- batching


def test_requests_of_one_loop_iteration_run_as_one_batch(tmp_path: Path) -> None:
    with serving(deployment(("t", "1", tabular(tmp_path / "t.onnx")))) as server:
        queue = server.server._deployment_state.served["t"].queues["1"]
        with RawClient(server.port) as client:
            client.ask(ask_scores([0.0]))
            before = queue.batches
            client.send(b"".join(ask_scores([float(n)] * (1 + n % 3)) for n in range(60)))
            answers = [json.loads(client.answer()[2])["outputs"][0]["data"] for _ in range(60)]

        assert answers == [[2.0 * n] * (1 + n % 3) for n in range(60)]
        assert 4 <= queue.batches - before <= 30  # 120 rows, at most 32 a batch
        assert queue.rows == 121


def test_a_request_with_many_rows_runs_alone(tmp_path: Path) -> None:
    with serving(deployment(("t", "1", tabular(tmp_path / "t.onnx")))) as server, RawClient(server.port) as c:
        c.send(ask_scores([1.0]) + ask_scores([3.0] * 100) + ask_scores([2.0]))

        found = [json.loads(c.answer()[2])["outputs"][0]["data"] for _ in range(3)]

    assert found == [[2.0], [6.0] * 100, [4.0]]


def test_the_loop_stays_free_while_a_heavy_model_runs(tmp_path: Path) -> None:
    wanted = deployment(("m", "1", mlp(tmp_path / "m.onnx", widths=(2, 2000, 2000, 1))))
    with serving(wanted) as server, RawClient(server.port) as busy, RawClient(server.port) as other:
        busy.send(INFER * 30)

        lived = [other.ask(request("GET", "/v2/health/live"))[0] for _ in range(5)]
        statuses = [busy.answer()[0] for _ in range(30)]

    assert lived == [200] * 5
    assert statuses == [200] * 30


def test_a_large_body_is_read_in_a_thread(tmp_path: Path) -> None:
    rows = 40_000
    tensor = {
        "name": "x",
        "shape": [rows, 2],
        "datatype": "FP32",
        "parameters": {"binary_data_size": rows * 8},
    }
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    body = head + np.zeros((rows, 2), np.float32).tobytes()

    wanted = deployment(("m", "1", constant(tmp_path / "m.onnx", 3)))
    with serving(wanted) as server, RawClient(server.port) as client:
        status, headers, answer = client.ask(
            request(body=body, Inference_Header_Content_Length=str(len(head)))
        )

    values = np.frombuffer(answer[int(headers["inference-header-content-length"]) :], np.float32)
    assert (status, len(values), set(values.tolist())) == (200, rows, {3.0})


# -------------------------------------------------------------------------------------------- reloading


def test_weights_change_while_it_serves(tmp_path: Path) -> None:
    files = [("m", str(n), constant(tmp_path / f"{n}.onnx", n)) for n in (1, 2)]
    with serving(deployment(*files, weights={"1": 100, "2": 0})) as server, RawClient(server.port) as client:
        assert {version(client.ask(INFER)) for _ in range(10)} == {"1"}

        server.apply(deployment(*files, weights={"1": 90, "2": 10}))

        assert Counter(version(client.ask(INFER)) for _ in range(100)) == {"1": 90, "2": 10}


def test_reloading_under_load_fails_no_request(tmp_path: Path) -> None:
    files = [("m", str(n), constant(tmp_path / f"{n}.onnx", n)) for n in range(6)]
    with serving(deployment(files[0])) as server:
        over = threading.Event()
        seen: list[Counter[tuple[int, str]]] = [Counter() for _ in range(4)]
        threads = [threading.Thread(target=keep_requesting, args=(server, over, s)) for s in seen]
        for thread in threads:
            thread.start()

        reloads, everything = count(1), {str(n) for n in range(6)}

        def reload() -> bool:
            number = next(reloads)
            server.apply(deployment(files[number % 6], files[(number + 1) % 6]))
            return number > 10 and {found for _, found in sum(map(Counter, seen), Counter())} == everything

        eventually(reload)
        over.set()
        for thread in threads:
            thread.join()

    total = sum(seen, Counter())
    assert {status for status, _ in total} == {200}


def test_a_model_that_does_not_load_changes_nothing(tmp_path: Path) -> None:
    good = ("m", "1", constant(tmp_path / "m.onnx", 1))
    with serving(deployment(good)) as server, RawClient(server.port) as client:
        with pytest.raises(FalajError):
            server.apply(deployment(good, ("m", "2", tmp_path / "missing.onnx")))

        assert version(client.ask(INFER)) == "1"
        _, _, metrics = client.ask(request("GET", "/metrics"))
        assert b'falaj_serving_reloads_total{outcome="refused"} 1.0' in metrics


def keep_requesting(server: RunningServer, over: threading.Event, seen: Counter[tuple[int, str]]) -> None:
    with RawClient(server.port) as client:
        while not over.is_set():
            try:
                status, _, body = client.ask(INFER)
            except (TimeoutError, OSError):
                status, body = 0, b"{}"
            seen[status, json.loads(body).get("model_version", "")] += 1
            if status == 0:
                return


def ask_scores(amounts: list[float]) -> bytes:
    shape = [len(amounts)]
    inputs = [
        {"name": "amount", "shape": shape, "datatype": "FP64", "data": amounts},
        {"name": "category", "shape": shape, "datatype": "INT64", "data": [0] * len(amounts)},
    ]
    return request(path="/v2/models/t/infer", body=json.dumps({"inputs": inputs}).encode())


def replace(path: Path, text: str) -> None:
    draft = path.with_suffix(".new")
    draft.write_text(text)
    draft.rename(path)


def test_endpoints_may_share_a_model(tmp_path: Path) -> None:
    file = ServedFile(model="m", version="1", path=constant(tmp_path / "m.onnx", 1))
    endpoints = tuple(Endpoint(name=n, model="m", routes=(Route(version="1"),)) for n in ("a", "b"))
    with serving(Deployment(models=(file,), endpoints=endpoints)) as server, RawClient(server.port) as client:
        for name in ("a", "b"):
            answer = client.ask(request(path=f"/v2/models/{name}/infer", body=BODY))
            assert json.loads(answer[2])["model_name"] == name


# --------------------------------------------------------------------- what may run on the event loop


class StubEngine:
    """An engine that is as slow as it is told, and notes the threads in which it runs."""

    def __init__(self, *, inline_rows: int = 32, shape: tuple[int, ...] = (-1, 2)) -> None:
        tensor = Tensor(name="x", datatype=Datatype.FP32, shape=shape)
        self.model = ServedModel(name="m", version="1", platform="stub", inputs=(tensor,), outputs=(tensor,))
        self.cost = RunCost(1e-5, rows=32, inline_rows=inline_rows)
        self.in_process = True
        self.seconds = 0.0
        self.threads: list[str] = []

    def run(self, inputs: Sequence[Any], *, limit_s: float = 60) -> list[Any]:
        self.threads.append(threading.current_thread().name)
        let_pass(self.seconds)
        return list(inputs)

    def close(self) -> None: ...


class StubRequest:
    def __init__(self, array: Any) -> None:
        self.inputs, self.cancelled = [array], False
        self.caller, self.priority, self.deadline = "vera", 0, None
        self.done = asyncio.Event()

    def render(self, outputs: Sequence[Any]) -> None: ...

    def complete(self, error: FalajError | None) -> None:
        self.done.set()


def threads_of(engine: StubEngine, *arrays: Any) -> list[str]:
    """Return the threads in which `engine` runs requests with these inputs, one after the other."""

    async def main() -> None:
        with ThreadPoolExecutor(2, thread_name_prefix="pool") as pool:
            queue = BatchQueue(engine, pool=pool, threads=2)
            for array in arrays:
                queue.submit(request := StubRequest(array))
                await asyncio.wait_for(request.done.wait(), PATIENCE_S)

    asyncio.run(main())
    return [name.partition("_")[0] for name in engine.threads]


@pytest.mark.parametrize("rows", [1, 32])
@pytest.mark.parametrize("gone", [{0}, {1, 2}, {3}, {0, 1, 2, 3}])
def test_requests_of_clients_that_have_gone_are_not_run(rows: int, gone: set[int]) -> None:
    engine = StubEngine()
    engine.cost = RunCost(1e-5, rows=rows, inline_rows=32)
    answered: list[Any] = []
    requests = []

    async def main() -> None:
        with ThreadPoolExecutor(1) as pool:
            queue = BatchQueue(engine, pool=pool, threads=1, answered=lambda *batch: answered.append(batch))
            for number in range(4):
                requests.append(StubRequest(np.full((1, 2), number, np.float32)))
                queue.submit(requests[-1])
                requests[-1].cancelled = number in gone
            queue.submit(last := StubRequest(np.zeros((1, 2), np.float32)))
            await asyncio.wait_for(last.done.wait(), PATIENCE_S)

    asyncio.run(main())
    assert {number for number, each in enumerate(requests) if each.done.is_set()} == set(range(4)) - gone
    assert sum(len(batch[3][0]) for batch in answered) == 5 - len(gone)


def test_requests_larger_than_the_trial_run_in_a_thread() -> None:
    small, large = np.zeros((32, 2), np.float32), np.zeros((33, 2), np.float32)

    assert threads_of(StubEngine(), small, large, small) == ["MainThread", "pool", "MainThread"]


def test_a_dimension_that_a_request_chooses_counts_too() -> None:
    small, wide = np.zeros((1, 4), np.float32), np.zeros((1, 4000), np.float32)

    assert threads_of(StubEngine(shape=(-1, -1)), small, wide) == ["MainThread", "pool"]


def test_a_model_that_has_blocked_the_event_loop_never_runs_there_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batch_queue, "MAX_INLINE_S", 0.01)
    row, engine = np.zeros((1, 2), np.float32), StubEngine()
    engine.seconds = 0.02

    assert threads_of(engine, row, row, row) == ["MainThread", "pool", "pool"]


def test_a_model_with_long_outputs_does_not_run_on_the_event_loop(tmp_path: Path) -> None:
    engine = load(ServedFile(model="m", version="1", path=widened(tmp_path / "m.onnx", 20_000)))

    assert not engine.cost.inline


@pytest.mark.slow
@pytest.mark.parametrize("make", [counting, filling])
def test_a_model_whose_work_depends_on_values_stops_nobody(
    tmp_path: Path, make: Callable[[], onnx.ModelProto]
) -> None:
    """Others are answered while it counts to a billion, or fills as much memory."""
    (tmp_path / "hostile.onnx").write_bytes(make().SerializeToString())
    wanted = deployment(
        ("hostile", "1", tmp_path / "hostile.onnx"), ("m", "1", constant(tmp_path / "m.onnx", 1))
    )
    body = b'{"inputs":[{"name":"x","shape":[1],"datatype":"INT64","data":[1000000000]}]}'
    with serving(wanted) as server, RawClient(server.port) as hostile, RawClient(server.port) as other:
        assert other.ask(INFER)[0] == 200
        for _ in range(8):
            hostile.send(request(path="/v2/models/hostile/infer", body=body))
        for _ in range(50):
            assert other.ask(INFER)[0] == 200
            let_pass(0.01)
        assert make is filling or not hostile.has_answer()  # those came first, and are still run
