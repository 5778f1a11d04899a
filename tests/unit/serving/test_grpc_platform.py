"""gRPC on a real platform: admitted by the gate, logged, and hidden from those who may not call."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from falaj.errors import NotFound
from model_servers import constant, serving_platform
from platforms import OwnPlatform, make_platform
from polling import eventually


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnPlatform]:
    folder: Path = tmp_path_factory.mktemp("platform")
    with make_platform(folder, toml="[serving]\nlog_every = 0.2\n") as made:
        blob = made.blobs.upload(iter([constant(folder / "m.onnx", 7).read_bytes()]))
        made.models.register("m", files=(blob.id,), paths=("model.onnx",))
        with serving_platform(made.parts):
            made.endpoints.deploy("sevens", model="m@1")
            yield made


def headers(platform: OwnPlatform, user: str | None = None) -> dict[str, str]:
    token = platform.tokens.issue(purpose="test", **({"user": user} if user else {}))
    return {"authorization": f"Bearer {token.secret}"}


@pytest.fixture
def client(platform: OwnPlatform) -> Iterator[triton.InferenceServerClient]:
    address, model = (platform.endpoints.show("sevens").grpc or "").split()
    assert model == "sevens"
    with triton.InferenceServerClient(address) as made:
        own = headers(platform)
        eventually(lambda: is_ready(made, own))
        yield made


def is_ready(client: triton.InferenceServerClient, own: dict[str, str]) -> bool:
    try:
        return bool(client.is_model_ready("sevens", headers=own))
    except InferenceServerException:
        return False


def rows() -> list[triton.InferInput]:
    made = triton.InferInput("x", [1, 2], "FP32")
    made.set_data_from_numpy(np.array([[0.5, 2.0]], np.float32))
    return [made]


def test_a_prediction_is_logged_with_its_caller(
    platform: OwnPlatform, client: triton.InferenceServerClient
) -> None:
    waits = {"falaj_logged": True}
    answer = client.infer(
        "sevens", rows(), request_id="order-7", headers=headers(platform), parameters=waits
    ).get_response()

    ident = answer.parameters["prediction"].string_param

    def logged() -> Any:
        try:
            return platform.endpoints.prediction(ident)
        except NotFound:
            return None

    found = eventually(logged)
    assert (found.endpoint, found.version, found.request) == ("sevens", "1", "order-7")
    assert found.outputs == {"y": [7.0]}


def test_endpoints_are_hidden_from_who_may_not_call_them(
    platform: OwnPlatform, client: triton.InferenceServerClient
) -> None:
    platform.join("nobody")
    theirs = headers(platform, "nobody")

    for call in (
        lambda: client.infer("sevens", rows(), headers=theirs),
        lambda: client.infer("nothing", rows(), headers=theirs),
        lambda: client.get_model_metadata("sevens", headers=theirs),
        lambda: client.unload_model("sevens", headers=theirs),
    ):
        with pytest.raises(InferenceServerException, match=r"NOT_FOUND.*there is no endpoint"):
            call()
    assert not client.get_model_repository_index(headers=theirs).models


def test_a_revoked_token_is_refused(platform: OwnPlatform, client: triton.InferenceServerClient) -> None:
    issued = platform.tokens.issue(purpose="short")
    theirs = {"authorization": f"Bearer {issued.secret}"}
    client.infer("sevens", rows(), headers=theirs)
    platform.tokens.revoke(issued.token.id)

    def is_refused() -> bool:
        try:
            client.infer("sevens", rows(), headers=theirs)
        except InferenceServerException as error:
            return "UNAUTHENTICATED" in str(error)
        return False

    eventually(is_refused)
