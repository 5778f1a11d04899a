"""Shadow traffic: copies of requests that are compared, logged apart, dropped under load, and never answered."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from falaj.apps.model_server.inference import shadow
from falaj.apps.model_server.inference.shadow import compare_output
from falaj.records.serving.endpoints import Deployment, Route
from falaj.records.serving.shadows import OutputDifference, ShadowCounts
from falaj.serving.dependencies import PredictedBatch
from falaj.serving.scores import merge_counts
from inference_clients import PROTOCOLS, GrpcClient, InferenceClient, connect
from model_servers import RawClient, RunningServer, constant, deployment, mlp, request, serving
from polling import eventually


class Kept:
    """A log that keeps batches."""

    def __init__(self) -> None:
        self.batches: list[PredictedBatch] = []
        self._lock = threading.Lock()
        self._number = 0

    def next_id(self, endpoint: str, version: str) -> str:
        with self._lock:
            self._number += 1
            return f"{endpoint}:{version}-{self._number}"

    def add(self, batch: PredictedBatch) -> None:
        self.batches.append(batch)

    def of(self, version: str) -> list[PredictedBatch]:
        return [batch for batch in self.batches if batch.model.version == version]


SHADED = (Route(version="1"), Route(version="2", weight=0, shadow=100))


@pytest.fixture
def log() -> Kept:
    return Kept()


@pytest.fixture
def server(tmp_path: Path, log: Kept) -> Iterator[RunningServer]:
    files = [("m", v, constant(tmp_path / f"{v}.onnx", float(v))) for v in "12"]
    files += [("odd", "1", constant(tmp_path / "3.onnx", 3)), ("odd", "2", mlp(tmp_path / "mlp.onnx"))]
    wanted = deployment(*files)
    endpoints = tuple(each.model_copy(update={"routes": SHADED}) for each in wanted.endpoints)
    with serving(Deployment(models=wanted.models, endpoints=endpoints), sink=log) as running:
        yield running


@pytest.fixture(params=PROTOCOLS)
def client(server: RunningServer, request: pytest.FixtureRequest) -> Iterator[InferenceClient]:
    made = connect(request.param, server)
    yield made
    made.close()


def body(rows: int = 1) -> dict[str, Any]:
    tensor = {"name": "x", "shape": [rows, 2], "datatype": "FP32", "data": [1.0] * 2 * rows}
    return {"inputs": [tensor]}


def counted(server: RunningServer, endpoint: str, enough: int) -> ShadowCounts:
    """Return the counts of the shadow once so many copies are dealt with."""
    found: list[ShadowCounts] = []

    def done() -> ShadowCounts | None:
        for each in server.server.shadows.take_counts(endpoint):
            found[:] = [merge_counts(found[0], each) if found else each]
        total = found[0].requests + found[0].errors + found[0].dropped if found else 0
        return found[0] if total >= enough else None

    return eventually(done)


def test_copies_are_compared_and_the_answers_are_those_of_the_version_that_answers(
    client: InferenceClient, server: RunningServer, log: Kept
) -> None:
    answers = [client.infer("m", body(rows))[1] for rows in (1, 3, 2)]

    found = counted(server, "m", 3)

    assert {each["model_version"] for each in answers} == {"1"}
    assert {value for each in answers for value in each["outputs"][0]["data"]} == {1.0}
    assert (found.requests, found.rows, found.errors, found.dropped) == (3, 6, 0, 0)
    assert (found.version, found.against) == ("2", "1")
    (output,) = found.outputs
    assert (output.output, output.values, output.mean_difference, output.max_difference) == ("y", 6, 1.0, 1.0)
    assert sum(found.against_latency) == 3
    assert 1 <= sum(found.latency) <= 3  # copies that wait are run together


def test_copies_that_wait_are_run_together_and_each_has_its_own_row(
    client: InferenceClient, server: RunningServer, log: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shadow, "GATHER_S", 0.2)

    answers = [client.infer("m", body(rows))[1] for rows in (1, 2, 1, 3)]

    found = counted(server, "m", 4)
    eventually(lambda: sum(len(batch.requests) for batch in log.of("2.shadow")) == 4)
    logged = [each for batch in log.of("2.shadow") for each in zip(batch.requests, batch.counts, strict=True)]
    assert sum(found.latency) < 4
    assert (found.requests, found.rows, sum(found.against_latency)) == (4, 7, 4)
    assert [request for request, _ in logged] == [answer["id"] for answer in answers]
    assert [rows for _, rows in logged] == [1, 2, 1, 3]


def test_what_a_shadow_predicts_is_logged_under_a_version_of_its_own(
    client: InferenceClient, server: RunningServer, log: Kept
) -> None:
    answer = client.infer("m", body(2))[1]

    (batch,) = eventually(lambda: log.of("2.shadow"))

    assert [each.model.version for each in log.batches] == ["1", "2.shadow"]
    assert batch.requests[0] == answer["id"]  # the prediction that was answered
    assert batch.callers[0] == "tester"
    assert batch.outputs[0].tolist() == [[2.0], [2.0]]


def test_a_shadow_with_other_inputs_is_an_error_that_says_so(
    client: InferenceClient, server: RunningServer
) -> None:
    status, _ = client.infer("odd", body())

    found = counted(server, "odd", 1)

    assert (status, found.errors, found.requests) == (200, 1, 0)
    assert "its inputs are x (FP32 [-1, 32]); 1 takes x (FP32 [-1, 2])" in str(found.problem)


def test_a_share_of_the_requests_is_copied(
    client: InferenceClient, server: RunningServer, tmp_path: Path, log: Kept
) -> None:
    wanted = deployment(*(("m", v, constant(tmp_path / f"{v}.onnx", float(v))) for v in "12"))
    routes = (Route(version="1"), Route(version="2", weight=0, shadow=20))
    (endpoint,) = wanted.endpoints
    changed = (endpoint.model_copy(update={"routes": routes}),)
    server.apply(Deployment(models=wanted.models, endpoints=changed))

    for _ in range(500):
        client.infer("m", body())

    found = counted(server, "m", 50)
    assert 50 <= found.requests + found.dropped <= 170  # 100 of 500 are expected


def test_copies_are_dropped_first_where_requests_wait(
    client: InferenceClient, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shadow, "MAX_AGE_S", 0.05)
    monkeypatch.setattr(type(server.server.shadows._answering[0]), "waiting", 1)

    statuses = [client.infer("m", body())[0] for _ in range(5)]

    found = counted(server, "m", 5)
    assert statuses == [200] * 5
    assert (found.dropped, found.requests) == (5, 0)


def test_waiting_copies_are_bounded(
    client: InferenceClient, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shadow, "MAX_COPIED_BYTES", 10)

    client.infer("m", body())

    assert counted(server, "m", 1).dropped == 1


def test_a_shadow_that_fails_affects_no_answer(
    client: InferenceClient, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = server.server.shadows.plans["m"][0]

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("out of order")

    monkeypatch.setattr(plan.queue.engine, "_run", broken)

    statuses = [client.infer("m", body())[0] for _ in range(3)]

    found = counted(server, "m", 3)
    assert (statuses, found.errors, found.problem) == ([200] * 3, 3, "out of order")
    with RawClient(server.port) as raw:
        metrics = raw.ask(request("GET", "/metrics"))[2].decode()
    line = 'falaj_serving_shadow_requests_total{endpoint="m",outcome="failed",version="2"} 3.0'
    assert line in metrics


def test_messages_of_a_stream_are_copied_too(server: RunningServer, log: Kept) -> None:
    client = GrpcClient(server)

    answers = client.stream("m", [body(rows) for rows in (1, 3, 2)])
    client.close()

    found = counted(server, "m", 3)
    eventually(lambda: sum(len(batch.requests) for batch in log.of("2.shadow")) == 3)
    assert {answer["model_version"] for answer in answers} == {"1"}
    assert (found.requests, found.rows, found.outputs[0].mean_difference) == (3, 6, 1.0)


def test_counts_that_were_not_reported_are_kept(server: RunningServer) -> None:
    counts = ShadowCounts(version="2", against="1", requests=2, latency=(0, 1))

    server.server.shadows.give_back("e", [counts])
    server.server.shadows.give_back("e", [counts])

    assert server.server.shadows.take_counts("e") == [
        ShadowCounts(version="2", against="1", requests=4, latency=(0, 2))
    ]
    assert server.server.shadows.take_counts("e") == []


# ------------------------------------------------------------------------------------------ differences


def test_numbers_differ_by_their_finite_part() -> None:
    one = np.array([[1.0], [math.nan], [math.inf], [2.0], [math.nan]], np.float32)
    other = np.array([[1.5], [math.nan], [math.inf], [math.nan], [3.0]], np.float32)

    found = compare_output("y", one, other)

    assert (found.values, found.sum_difference, found.max_difference, found.not_finite) == (1, 0.5, 0.5, 2)
    assert found.disagreement is None


@pytest.mark.parametrize(
    ("one", "other", "share"),
    [
        (np.array([[0.2, 0.8], [0.6, 0.4]]), np.array([[0.3, 0.7], [0.1, 0.9]]), 0.5),
        (np.array([[0.2], [0.8]]), np.array([[0.4], [0.4]]), 0.5),
        (np.array([1, 2, 3, 4]), np.array([1, 2, 3, 5]), 0.25),
        (np.array(["a", "b"], object), np.array(["a", "c"], object), 0.5),
        (np.array([True, False]), np.array([True, True]), 0.5),
        (np.array([[17.0]]), np.array([[18.0]]), None),
    ],
)
def test_classes_disagree(one: Any, other: Any, share: float | None) -> None:
    assert compare_output("y", one, other).disagreement == share


def test_outputs_of_other_shapes_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match=r"output 'y': float64 \[3\], where float64 \[2\] was answered"):
        compare_output("y", np.zeros(2), np.zeros(3))


def test_huge_differences_stay_numbers() -> None:
    found = compare_output("y", np.array([1e308, 1e308]), np.array([-1e308, -1e308]))

    assert math.isfinite(found.sum_difference)
    assert math.isfinite(found.max_difference)


def test_counts_are_merged_by_output() -> None:
    one = OutputDifference(output="y", values=2, sum_difference=1.0, max_difference=0.75, classes=2)
    other = OutputDifference(
        output="y", values=2, sum_difference=3.0, max_difference=2.0, classes=2, disagreeing=1
    )
    pair = {"version": "2", "against": "1"}

    both = merge_counts(
        ShadowCounts(**pair, outputs=(one,), requests=1), ShadowCounts(**pair, outputs=(other,), requests=2)
    )

    (output,) = both.outputs
    assert (both.requests, output.mean_difference, output.max_difference) == (3, 1.0, 2.0)
    assert output.disagreement == 0.25
