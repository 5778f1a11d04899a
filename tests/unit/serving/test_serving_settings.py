"""Limits of callers, and how an operator sets what is otherwise measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from pydantic import ValidationError
from tritonclient.utils import InferenceServerException

from falaj.errors import RateLimited
from falaj.records.serving.endpoints import Deployment, Endpoint, Route, ServedFile
from falaj.records.serving.settings import ServingSettings
from falaj.serving.runtime import rate_limits
from falaj.serving.runtime.loading import load
from falaj.serving.runtime.rate_limits import LocalBuckets, RateLimit, RateLimits
from model_servers import OTHER_TOKEN, TOKEN, RawClient, centred, constant, deployment, mlp, request, serving

BODY = b'{"inputs":[{"name":"x","shape":[1,2],"datatype":"FP32","data":[1,2]}]}'


# ------------------------------------------------------------------------------------ limits of callers


def endpoint(name: str = "m", **settings: Any) -> Endpoint:
    return Endpoint(name=name, model="m", routes=(Route(version="1"),), settings=ServingSettings(**settings))


def allowed(limits: RateLimits, served: Endpoint, *times: float, caller: str = "vera") -> list[bool]:
    found = []
    for now in times:
        try:
            limits.require(served, caller, now)
            found.append(True)
        except RateLimited:
            found.append(False)
    return found


def test_a_caller_may_send_a_burst_and_then_its_rate() -> None:
    limits, served = RateLimits(), endpoint(requests_per_second=2, burst=3)

    assert allowed(limits, served, 0, 0, 0, 0) == [True, True, True, False]
    assert allowed(limits, served, 0.4, 0.5, 0.6, 1.0) == [False, True, False, True]
    assert allowed(limits, served, 100, 100, 100, 100) == [True, True, True, False]


def test_each_caller_and_each_endpoint_has_its_own_limit() -> None:
    limits, served = RateLimits(), endpoint(requests_per_second=1)

    assert allowed(limits, served, 0, 0) == [True, False]
    assert allowed(limits, served, 0, caller="sam") == [True]
    assert allowed(limits, endpoint("other", requests_per_second=1), 0) == [True]
    assert allowed(limits, endpoint("free"), *range(100)) == [True] * 100


def test_the_default_holds_where_an_endpoint_has_no_limit() -> None:
    limits = RateLimits(RateLimit(1, 1))

    assert allowed(limits, endpoint(), 0, 0) == [True, False]
    assert allowed(limits, endpoint("own", requests_per_second=100, burst=2), 0, 0) == [True, True]


def test_the_refusal_says_when_to_come_back() -> None:
    limits, served = RateLimits(), endpoint(requests_per_second=0.1)
    limits.require(served, "vera", 0)

    with pytest.raises(RateLimited, match=r"0\.1 requests a second to m, and 1 at once") as refused:
        limits.require(served, "vera", 1)

    assert refused.value.details == {"retry_after_s": 9}


def test_callers_without_end_take_no_memory_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_limits, "MAX_BUCKETS", 10)
    limits, served = RateLimits(), endpoint(requests_per_second=1)

    for number in range(1000):
        limits.require(served, f"caller-{number}", float(number))

    assert isinstance(limits.buckets, LocalBuckets)
    assert len(limits.buckets) <= 11


def test_a_limited_caller_gets_429_and_others_their_answers(tmp_path: Path) -> None:
    wanted = deployment(("m", "1", constant(tmp_path / "m.onnx", 1)))
    served = wanted.endpoints[0].model_copy(update={"settings": ServingSettings(requests_per_second=0.5)})
    with (
        serving(wanted.model_copy(update={"endpoints": (served,)})) as server,
        RawClient(server.port) as client,
    ):
        statuses = [client.ask(request(body=BODY))[0] for _ in range(3)]
        _, headers, body = client.ask(request(body=BODY))
        other = client.ask(request(body=BODY, token=OTHER_TOKEN))[0]

    assert statuses == [200, 429, 429]
    assert headers["retry-after"] == "2"
    assert json.loads(body)["code"] == "serving.rate_limited"
    assert other == 200


def test_a_limit_holds_by_every_protocol(tmp_path: Path) -> None:
    """REST, plain rows and gRPC share it."""
    wanted = deployment(("m", "1", constant(tmp_path / "m.onnx", 1)))
    settings = ServingSettings(requests_per_second=0.01, burst=4)
    served = wanted.endpoints[0].model_copy(update={"settings": settings})
    tensor = triton.InferInput("x", [1, 2], "FP32")
    tensor.set_data_from_numpy(np.ones((1, 2), np.float32))
    headers = {"authorization": f"Bearer {TOKEN}"}
    with (
        serving(wanted.model_copy(update={"endpoints": (served,)})) as server,
        RawClient(server.port) as client,
    ):
        rest = client.ask(request(body=BODY))[0]
        rows = client.ask(request(path="/v1/models/m:predict", body=b'{"instances": [[1, 2]]}'))[0]
        with triton.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as caller:
            for _ in range(2):
                caller.infer("m", [tensor], headers=headers)
            for _ in range(2):
                with pytest.raises(
                    InferenceServerException, match=r"RESOURCE_EXHAUSTED.*0\.01 requests a second"
                ):
                    caller.infer("m", [tensor], headers=headers)
        refused = [client.ask(request(body=BODY))[0]]
        refused.append(client.ask(request(path="/v1/models/m:predict", body=b'{"instances": [[1, 2]]}'))[0])

    assert (rest, rows) == (200, 200)
    assert refused == [429, 429]


# --------------------------------------------------------------------------------------------- settings


def test_settings_of_a_model_are_kept(tmp_path: Path) -> None:
    settings = ServingSettings(
        max_batch_rows=8, instances=3, threads=2, max_queue_ms=50, batch_delay_ms=2, timeout_ms=500
    )
    path = mlp(tmp_path / "m.onnx", widths=(2, 4, 1))
    file = ServedFile(model="m", version="1", path=path, settings=settings)
    plain = ServedFile(model="m", version="1", path=path)
    endpoints = (endpoint("m", **settings.model_dump()), endpoint("plain", requests_per_second=9))

    with serving(Deployment(models=(file, plain), endpoints=endpoints)) as server:
        tuned, measured = server.server.measured(file), server.server.measured(plain)
        with RawClient(server.port) as client:
            answers = [
                client.ask(request(path=f"/v2/models/{n}/infer", body=BODY))[0] for n in ("m", "plain")
            ]

    assert tuned is not None
    assert measured is not None
    assert (tuned.batch_rows, tuned.instances, tuned.max_queue_ms) == (8, 3, 50)
    assert (measured.batch_rows, measured.place, measured.max_queue_ms) == (32, "event loop", 1000)
    assert answers == [200, 200]


def test_batches_are_no_larger_than_the_setting(tmp_path: Path) -> None:
    settings = ServingSettings(max_batch_rows=1)
    file = ServedFile(model="m", version="1", path=mlp(tmp_path / "m.onnx"), settings=settings)

    assert load(file).cost.rows == 1


def test_rows_that_depend_on_each_other_never_share_a_run_whatever_is_set(tmp_path: Path) -> None:
    settings = ServingSettings(max_batch_rows=16)
    file = ServedFile(model="m", version="1", path=centred(tmp_path / "m.onnx"), settings=settings)

    assert load(file).cost.rows == 1


@pytest.mark.parametrize(
    "settings", [{"instances": 0}, {"max_queue_ms": 0}, {"burst": 5}, {"requests_per_second": float("inf")}]
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ServingSettings(**settings)
