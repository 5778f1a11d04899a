"""Ensembles on a real platform: composed, deployed, and asked by REST and gRPC."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton

from ensembles import add_models, add_view, ensemble, expected, register, request
from falaj.assembly.parsing import find_sandboxes
from falaj.errors import Damaged, NotFound
from falaj.records.registry import FileFormat
from falaj.records.serving.endpoints import Route
from model_servers import mlp, serving_platform
from platforms import OwnPlatform, make_platform
from polling import PATIENCE_S, eventually

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(len(find_sandboxes()) == 1, reason="no sandbox works on this machine"),
]

AMOUNTS, NAMES = [10.0, 250.0, 0.0], ["ann", "cat", "nobody"]


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnPlatform]:
    folder = tmp_path_factory.mktemp("platform")
    with make_platform(folder, toml="[serving]\nlog_every = 0.2\n") as made:
        add_view(made)
        add_models(made, folder)
        yield made


@pytest.fixture(scope="module")
def churn(platform: OwnPlatform, tmp_path_factory: pytest.TempPathFactory) -> Path:
    content = b"".join(platform.models.read("churn@1", "model.onnx"))
    path = tmp_path_factory.mktemp("churn") / "model.onnx"
    path.write_bytes(content)
    return path


@pytest.fixture(scope="module")
def url(platform: OwnPlatform) -> Iterator[str]:
    with serving_platform(platform.parts) as found:
        yield found


@pytest.fixture
def http(platform: OwnPlatform, url: str) -> Iterator[httpx.Client]:
    token = platform.tokens.issue(purpose="test").secret
    with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=PATIENCE_S) as made:
        yield made


def deployed(platform: OwnPlatform, http: httpx.Client, name: str, **changes: Any) -> None:
    made = platform.models.compose(name, ensemble=ensemble(**changes))
    platform.endpoints.deploy(name, model=made.reference)

    def is_ready() -> bool:
        problem = platform.endpoints.show(name).routes[0].problem
        assert problem is None, problem
        return http.get(f"/v2/models/{name}/ready").status_code == 200

    eventually(is_ready)


def outputs(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    return {each["name"]: np.reshape(each["data"], each["shape"]) for each in answer.json()["outputs"]}


def test_rest_and_grpc_answer_as_the_models_do(
    platform: OwnPlatform, http: httpx.Client, churn: Path
) -> None:
    deployed(platform, http, "risk")
    wanted = expected(churn, AMOUNTS, NAMES)

    by_rest = outputs(http.post("/v2/models/risk/infer", json=request(AMOUNTS, NAMES)))
    described = http.get("/v2/models/risk").json()
    by_grpc = ask_by_grpc(platform, "risk")

    np.testing.assert_allclose(by_rest["risk"], wanted, rtol=1e-5)
    np.testing.assert_allclose(by_rest["scaled"][:, 0], np.array(AMOUNTS) / 100, rtol=1e-5)
    np.testing.assert_allclose(by_grpc, wanted, rtol=1e-5)
    assert described["platform"] == "ensemble"
    assert [(each["name"], each["datatype"], each["shape"]) for each in described["inputs"]] == [
        ("amount", "FP32", [-1]),
        ("customer", "BYTES", [-1]),
    ]
    assert [(each["name"], each["shape"]) for each in described["outputs"]] == [
        ("risk", [-1, 1]),
        ("scaled", [-1, 2]),
    ]


def ask_by_grpc(platform: OwnPlatform, name: str) -> Any:
    address, served = (platform.endpoints.show(name).grpc or "").split()
    token = platform.tokens.issue(purpose="test").secret
    amount, customer = triton.InferInput("amount", [3], "FP32"), triton.InferInput("customer", [3], "BYTES")
    amount.set_data_from_numpy(np.array(AMOUNTS, np.float32))
    customer.set_data_from_numpy(np.array([each.encode() for each in NAMES], np.object_))
    with triton.InferenceServerClient(address) as client:
        headers = {"authorization": f"Bearer {token}"}
        assert client.get_model_metadata(served, headers=headers).platform == "ensemble"
        return client.infer(served, [amount, customer], headers=headers).as_numpy("risk")


def test_requests_of_all_sizes_share_runs_and_keep_their_answers(
    platform: OwnPlatform, http: httpx.Client, churn: Path
) -> None:
    deployed(platform, http, "mixed")
    sizes = [1, 2, 5, 31, 32, 33, 1, 1, 700, 3] * 3
    random = np.random.default_rng(3)
    asked = [
        (random.uniform(0, 900, size).astype(np.float32).tolist(), random.choice(NAMES, size).tolist())
        for size in sizes
    ]

    def ask(given: tuple[list[float], list[str]]) -> Any:
        return outputs(http.post("/v2/models/mixed/infer", json=request(*given)))["risk"]

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, asked))

    for given, answer in zip(asked, answers, strict=True):
        np.testing.assert_allclose(answer, expected(churn, *given), rtol=1e-4, atol=1e-5)
    assert platform.endpoints.show("mixed").measured[0].batch_rows > 1


def test_an_ensemble_and_its_steps_have_metrics(platform: OwnPlatform, http: httpx.Client) -> None:
    deployed(platform, http, "counted")
    for _ in range(3):
        outputs(http.post("/v2/models/counted/infer", json=request(AMOUNTS, NAMES)))

    text = http.get("/metrics").text

    def count(name: str, **labels: str) -> float:
        found = [
            float(line.rsplit(" ", 1)[1])
            for line in text.splitlines()
            if line.startswith(name + "{")
            and all(f'{key}="{value}"' in line for key, value in labels.items())
        ]
        assert len(found) == 1, (name, labels, found)
        return found[0]

    assert count("falaj_serving_ensemble_seconds_count", model="counted") == 3
    assert count("falaj_serving_ensemble_failures_total", model="counted") == 0
    for step in ("clean", "customer", "score"):
        assert count("falaj_serving_step_seconds_count", model="counted", step=step) == 3
        assert count("falaj_serving_step_seconds_sum", model="counted", step=step) > 0
        assert count("falaj_serving_step_failures_total", model="counted", step=step) == 0
    gap = {"step": "customer", "view": "customers", "reason": "unknown_key"}
    assert count("falaj_serving_step_missing_features_total", model="counted", **gap) == 6
    assert count("falaj_serving_batches_total", model="counted") == 3
    assert re.search(r'nv_inference_count\{model="counted",version="1",replica="0"\} 9', text)


def test_predictions_are_logged_with_the_inputs_of_the_ensemble(
    platform: OwnPlatform, http: httpx.Client
) -> None:
    deployed(platform, http, "logged")

    body = request(AMOUNTS, NAMES) | {"parameters": {"falaj_logged": True}}
    answer = http.post("/v2/models/logged/infer", json=body).json()

    def logged() -> Any:
        try:
            return platform.endpoints.prediction(f"{answer['id']}.1")
        except NotFound:
            return None

    found = eventually(logged)
    assert found.inputs["customer"] == ["cat"]
    assert found.inputs["amount"] == [250.0]
    assert found.outputs["risk"] == pytest.approx(answer["outputs"][0]["data"][1:2])


def test_a_lookup_that_rejects_names_the_step_and_spares_the_others(
    platform: OwnPlatform, http: httpx.Client, churn: Path
) -> None:
    given = ensemble().model_dump()
    given["steps"][1]["lookup"]["missing"] = "reject"
    deployed(platform, http, "strict", steps=given["steps"])

    def ask(name: str) -> httpx.Response:
        return http.post("/v2/models/strict/infer", json=request([5.0], [name]))

    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(ask, ["ann", "nobody", "bob", "nobody", "cat", "ann"]))

    assert [each.status_code for each in answers] == [200, 400, 200, 400, 200, 200]
    assert answers[1].json()["error"].startswith("step customer: ")
    assert "'nobody', which customers does not have" in answers[1].json()["error"]
    np.testing.assert_allclose(outputs(answers[2])["risk"], expected(churn, [5.0], ["bob"]), rtol=1e-5)


def test_features_are_imputed_from_the_view(platform: OwnPlatform, http: httpx.Client) -> None:
    given = ensemble(outputs={"found": "customer.features", "risk": "score.y"}).model_dump()
    given["steps"][1]["lookup"]["missing"] = "impute"
    deployed(platform, http, "imputed", steps=given["steps"], outputs=given["outputs"])

    answer = outputs(http.post("/v2/models/imputed/infer", json=request([1.0], ["nobody"])))

    assert answer["found"][0, 0] == pytest.approx((2.5 + 0.5 - 1.0) / 3)


HANGS = b"""
import os, time

def predict(inputs):
    x = inputs["x"]
    if (x == 66).any():
        time.sleep(3600)
    if (x == 77).any():
        os._exit(3)
    if (x == 88).any():
        raise ValueError("88 is not allowed")
    if (x == 99).any():
        return {"y": x[:-1] if len(x) > 1 else x[:0]}
    return {"y": x + 1}
"""


def test_a_step_that_misbehaves_is_named_and_other_models_go_on(
    platform: OwnPlatform, http: httpx.Client, churn: Path
) -> None:
    tensor = {"dtype": "float32", "shape": (-1,)}
    facts: dict[str, Any] = {"inputs": ({"name": "x", **tensor},), "outputs": ({"name": "y", **tensor},)}
    register(platform, "moody", {"model.py": HANGS}, **facts)
    steps = [{"name": "mood", "model": "moody@1", "inputs": {"x": "request.x"}}]
    deployed(platform, http, "moods", steps=steps, outputs={"y": "mood.y"})
    deployed(platform, http, "calm")
    platform.endpoints.configure("moods", timeout_ms=300, instances=3)

    def ask(value: float) -> httpx.Response:
        tensor = {"name": "x", "shape": [2], "datatype": "FP32", "data": [value, 1.0]}
        return http.post("/v2/models/moods/infer", json={"inputs": [tensor]})

    eventually(lambda: platform.endpoints.show("moods").measured[0].instances == 3)
    assert outputs(eventually(lambda: found if (found := ask(1)).status_code == 200 else None))["y"][0] == 2
    raised, short = ask(88), ask(99)
    with ThreadPoolExecutor(1) as pool:
        hung = pool.submit(ask, 66)
        beside = outputs(http.post("/v2/models/calm/infer", json=request(AMOUNTS, NAMES)))["risk"]
    died = eventually(lambda: found if "waits to be started" not in (found := ask(77)).text else None)

    assert raised.status_code == 400
    assert "step mood (moody@1): ValueError: 88 is not allowed (model.py, line 11)" in raised.json()["error"]
    assert short.status_code == 400
    assert "step mood (moody@1): it answered y with the shape [1] for 2 rows" in short.json()["error"]
    assert hung.result().status_code == 503
    assert "step mood (moody@1): the process of moody@1 did not stop at" in hung.result().json()["error"]
    assert died.status_code == 503
    assert "step mood (moody@1): the process of moody@1 ended during a run" in died.json()["error"]
    np.testing.assert_allclose(beside, expected(churn, AMOUNTS, NAMES), rtol=1e-5)
    again = eventually(lambda: found if (found := ask(1)).status_code == 200 else None)
    assert outputs(again)["y"].tolist() == [2.0, 2.0]
    text = http.get("/metrics").text
    failures = next(
        line
        for line in text.splitlines()
        if line.startswith("falaj_serving_step_failures_total{") and '"moods"' in line
    )
    assert float(failures.rsplit(" ", 1)[1]) >= 4


def test_a_step_whose_file_was_altered_is_not_served(platform: OwnPlatform, http: httpx.Client) -> None:
    file = b"".join(platform.models.read("churn@1", "model.onnx"))
    made = register(platform, "altered", {"model.onnx": file})
    steps = [{"name": "only", "model": "altered@1", "inputs": {"x": "request.x"}}]
    whole = platform.models.compose("of-altered", ensemble=ensemble(steps=steps, outputs={"y": "only.y"}))
    assert whole.format is FileFormat.ENSEMBLE
    platform.sql(
        "UPDATE registry_versions SET manifest = replace(manifest, 'altered', 'changed') WHERE id = :id",
        {"id": made.id},
    )

    with pytest.raises(Damaged, match="altered@1"):
        platform.endpoints.deploy("of-altered", model="of-altered@1")


def ready(platform: OwnPlatform, http: httpx.Client, name: str) -> None:
    eventually(lambda: http.get(f"/v2/models/{name}/ready").status_code == 200)


def problem_of(platform: OwnPlatform, name: str) -> str:
    found: str = eventually(lambda: platform.endpoints.show(name).routes[0].problem)
    return found


def test_bytes_of_a_step_that_were_changed_on_disk_are_not_served(
    platform: OwnPlatform, http: httpx.Client
) -> None:
    content = b"".join(platform.models.read("churn@1", "model.onnx"))
    made = register(platform, "rotten", {"model.onnx": content})
    steps = [{"name": "only", "model": "rotten@1", "inputs": {"x": "request.x"}}]
    platform.models.compose("of-rotten", ensemble=ensemble(steps=steps, outputs={"y": "only.y"}))
    (stored,) = platform.home.path.rglob(f"{made.files[0].blob}*")
    damaged = bytearray(stored.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    stored.write_bytes(damaged)

    platform.endpoints.deploy("of-rotten", model="of-rotten@1")

    assert problem_of(platform, "of-rotten").startswith("step only (rotten@1): ")


def test_an_ensemble_ends_with_the_key_of_a_step(platform: OwnPlatform, http: httpx.Client) -> None:
    content = b"".join(platform.models.read("churn@1", "model.onnx"))
    platform.workspaces.create("lender")
    blob = platform.blobs.upload(iter([content]), workspace="lender")
    platform.models.register("lent", files=(blob.id,), paths=("model.onnx",), workspace="lender")
    steps = [{"name": "only", "model": "lender/lent@1", "inputs": {"x": "request.x"}}]
    platform.models.compose("of-lent", ensemble=ensemble(steps=steps, outputs={"y": "only.y"}))
    platform.endpoints.deploy("of-lent", model="of-lent@1")
    ready(platform, http, "of-lent")

    platform.keys.destroy("lender")

    assert problem_of(platform, "of-lent") == "the key of lent@1 was destroyed"
    eventually(lambda: http.get("/v2/models/of-lent/ready").status_code != 200)


def test_a_second_version_is_shadowed_and_then_routed_to(
    platform: OwnPlatform, http: httpx.Client, tmp_path: Path
) -> None:
    deployed(platform, http, "moving")
    file = mlp(tmp_path / "other.onnx", widths=(4, 8, 1), seed=6)
    number = register(platform, "churn", {"model.onnx": file.read_bytes()}).number
    given = ensemble().model_dump(exclude_defaults=True)["steps"]
    given[2]["model"] = f"churn@{number}"
    platform.models.compose("moving", ensemble=ensemble(steps=given))

    platform.endpoints.route("moving", routes=(Route(version="1"), Route(version="2", weight=0, shadow=100)))
    eventually(lambda: len(platform.endpoints.show("moving").measured) == 2)

    def compared() -> Any:
        outputs(http.post("/v2/models/moving/infer", json=request(AMOUNTS, NAMES)))
        return platform.endpoints.shadow_report("moving").differences

    assert eventually(compared)
    platform.endpoints.route("moving", routes=(Route(version="2"),))
    wanted = expected(file, AMOUNTS, NAMES)

    def answers() -> bool:
        found = http.post("/v2/models/moving/infer", json=request(AMOUNTS, NAMES)).json()
        return found["model_version"] == "2" and np.allclose(found["outputs"][0]["data"], wanted[:, 0])

    eventually(answers)


def test_a_hundred_thousand_rows_in_one_request(
    platform: OwnPlatform, http: httpx.Client, churn: Path
) -> None:
    deployed(platform, http, "large")
    random = np.random.default_rng(8)
    amounts = random.uniform(0, 900, 100_001).astype(np.float32)
    names = random.choice(NAMES, len(amounts))

    answer = outputs(http.post("/v2/models/large/infer", json=request(amounts.tolist(), names.tolist())))

    np.testing.assert_allclose(answer["risk"], expected(churn, amounts.tolist(), names.tolist()), atol=1e-4)
