"""Prometheus metrics of the model server, under our names and those of Triton."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from falaj.apps.model_server.limits import ServerLimits
from falaj.records.serving.endpoints import Deployment
from model_servers import RawClient, RunningServer, constant, deployment, mlp, request, serving


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    wanted = deployment(("m", "1", constant(tmp_path / "1.onnx", 1)))
    twin = wanted.endpoints[0].model_copy(update={"name": "twin"})
    with serving(Deployment(models=wanted.models, endpoints=(*wanted.endpoints, twin))) as running:
        yield running


def body(rows: int = 1) -> bytes:
    tensor = {"name": "x", "shape": [rows, 2], "datatype": "FP32", "data": [1.0] * 2 * rows}
    return json.dumps({"inputs": [tensor]}).encode()


def test_the_counts_have_the_names_of_triton(server: RunningServer) -> None:
    with RawClient(server.port) as client:
        for name, rows in (("m", 1), ("m", 3), ("twin", 2)):
            assert client.ask(request(path=f"/v2/models/{name}/infer", body=body(rows)))[0] == 200
        text = client.ask(request("GET", "/metrics"))[2].decode()

    families = {family.name: family for family in text_string_to_metric_families(text)}
    found = {name: family.samples[0] for name, family in families.items() if name.startswith("nv_")}
    assert {name: sample.value for name, sample in found.items() if "duration" not in name} == {
        "nv_inference_request_success": 3,
        "nv_inference_request_failure": 0,
        "nv_inference_count": 6,
        "nv_inference_exec_count": 3,
        "nv_inference_pending_request_count": 0,
    }
    assert all(sample.labels == {"model": "m", "version": "1", "replica": "0"} for sample in found.values())
    total, compute = (
        found[f"nv_inference_{name}_duration_us"].value for name in ("request", "compute_infer")
    )
    assert 0 < compute <= total
    assert families["nv_inference_count"].type == "counter"
    assert families["nv_inference_pending_request_count"].type == "gauge"


def test_waiting_for_a_thread_is_queue_time(tmp_path: Path) -> None:
    """A model in threads: while one request runs, others wait."""
    wide = mlp(tmp_path / "wide.onnx", widths=(32, 2048, 2048, 2048, 1))
    data = [1.0] * 32 * 64
    body = json.dumps(
        {"inputs": [{"name": "x", "shape": [64, 32], "datatype": "FP32", "data": data}]}
    ).encode()
    limits = ServerLimits(threads=1)

    with serving(deployment(("m", "1", wide)), limits=limits) as running, RawClient(running.port) as client:
        client.send(request(body=body) * 8)
        assert [client.answer()[0] for _ in range(8)] == [200] * 8
        totals = running.server.metrics.model_totals()["m", "1"]

    assert totals.queue_duration_us > totals.compute_infer_duration_us / 8
    assert totals.queue_duration_us <= totals.request_duration_us
