"""Every reader of model files refuses what was altered, and the refusal is in the audit log."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pyarrow.parquet as pq
import pytest

import falaj as fj
from altered_models import change_hash, change_manifest, change_signature, flip_byte
from batch_runs import SIGNATURE, customers, linear_model
from command_line import CommandLine, command_line
from falaj.errors import Damaged
from falaj.governance.operations.caller import acting_as
from falaj.records.control.workflows import WorkflowRun, WorkflowState
from falaj.records.governance.identity import Role
from falaj.records.registry import TensorSpec
from falaj.records.serving.endpoints import Route
from falaj.sdk.platform import Platform
from labelled_sets import labelled, make_set
from model_servers import serving_platform
from platforms import OwnPlatform, make_platform
from polling import PATIENCE_S, eventually

OUTPUTS = (TensorSpec(name="score", dtype="float32", shape=(-1, 1)),)


def register(platform: Platform) -> None:
    file = platform.blobs.upload(iter([linear_model()]))
    platform.models.register(
        "churn", files=(file.id,), paths=("model.onnx",), inputs=SIGNATURE, outputs=OUTPUTS
    )


def of_blob(platform: OwnPlatform, version: str) -> None:
    flip_byte(platform, version, platform.home.path)


ALTERATIONS = pytest.mark.parametrize(
    "alter", [of_blob, change_hash, change_manifest, change_signature], ids=lambda each: each.__name__
)
EXPORTS = ("files", "triton", "kserve", "edge")
READERS: dict[str, Callable[[OwnPlatform, Path], Any]] = {
    "read": lambda platform, _: b"".join(platform.models.read("churn@1", "model.onnx")),
    **{
        to: lambda platform, folder, to=to: platform.export("churn@1", folder / "export", to=to)  # type: ignore[misc]
        for to in EXPORTS
    },
}


@ALTERATIONS
@pytest.mark.parametrize("reader", READERS)
def test_an_altered_version_is_neither_read_nor_exported(
    light_platform: OwnPlatform, tmp_path: Path, alter: Callable[[OwnPlatform, str], None], reader: str
) -> None:
    register(light_platform)
    alter(light_platform, "churn@1")
    before = len(light_platform.entries())

    with pytest.raises(Damaged):
        READERS[reader](light_platform, tmp_path)

    failed = [
        (each["action"], each["error"])
        for each in light_platform.entries()[before:]
        if each["outcome"] == "failed"
    ]
    assert failed
    assert set(failed) <= {("models.read", Damaged.code), ("models.export", Damaged.code)}
    assert not (tmp_path / "export").exists()


@ALTERATIONS
def test_an_altered_version_is_found_by_the_check(
    light_platform: OwnPlatform, alter: Callable[[OwnPlatform, str], None]
) -> None:
    register(light_platform)
    alter(light_platform, "churn@1")

    *_, checked = light_platform.models.verify("churn@1")

    assert (checked.finished, checked.ok, len(checked.problems)) == (True, False, 1)


STARTS: dict[str, Callable[[OwnPlatform], Any]] = {
    "predictions.start": lambda platform: platform.predictions.start("churn@1", data="blob:rows", name="out"),
    "models.evaluate": lambda platform: platform.models.evaluate("churn@1", on="holdout"),
    "optimization.start": lambda platform: platform.optimization.start("churn@1", data="holdout"),
    "models.promote": lambda platform: platform.models.promote("churn@1", to="champion"),
    "models.approve": lambda platform: platform.models.approve("churn@1", alias="champion"),
    "models.card": lambda platform: platform.models.card("churn@1"),
    "models.bom": lambda platform: platform.models.bom("churn@1"),
    "endpoints.deploy": lambda platform: platform.endpoints.deploy("churn", model="churn@1"),
}


@pytest.mark.parametrize("alter", [change_manifest, change_signature], ids=lambda each: each.__name__)
@pytest.mark.parametrize("action", STARTS)
def test_nothing_starts_with_a_version_whose_record_was_altered(
    light_platform: OwnPlatform, alter: Callable[[OwnPlatform, str], None], action: str
) -> None:
    register(light_platform)
    light_platform.put("rows", b"rows")
    make_set(light_platform, labelled(50))
    alter(light_platform, "churn@1")

    approver = light_platform.join("noor", Role.APPROVER, Role.ADMIN)

    with acting_as(approver), pytest.raises(Damaged):
        STARTS[action](light_platform)

    last = light_platform.entries()[-1]
    assert (last["action"], last["outcome"], last["error"]) == (action, "failed", Damaged.code)


# ----------------------------------------------------------------------------------------------- jobs

WORK: dict[str, Callable[[Platform], WorkflowRun]] = {
    "prediction": lambda platform: platform.predict("churn@1", "blob:rows", "scores"),
    "evaluation": lambda platform: platform.models.evaluate("churn@1", on="holdout"),
    "optimization": lambda platform: platform.optimization.start(
        "churn@1", data="holdout", target="churned", recipes=("int8",)
    ),
    "distillation": lambda platform: platform.optimization.start(
        "churn@1", data="holdout", target="churned", recipes=("distill",)
    ),
}


@pytest.mark.slow
def test_no_job_gets_a_model_whose_bytes_were_altered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a batch prediction, an evaluation, an optimization, and of the teacher in a distillation."""
    monkeypatch.setenv("FALAJ_CONFIG_DIR", str(tmp_path / "config"))
    with fj.open(tmp_path / "home") as platform:
        register(platform)
        make_set(platform, labelled(50))
        platform.put("rows", parquet())
        flip_byte(platform, "churn@1", tmp_path / "home")
        for name, start in WORK.items():
            work = start(platform)
            *_, ended = platform.workflows.watch(work.id)
            assert ended.state is WorkflowState.FAILED, name
        jobs = platform.jobs.list().items
        entries = platform.audit.list(action="models.read", outcome="failed", limit=100).items

    assert {each.state for each in jobs} == {"failed"}
    assert {each.spec.module for each in jobs} >= {
        "falaj.assembly.prediction",
        "falaj.assembly.evaluation",
        "falaj.optimization.runtime",
        "falaj.assembly.distillation",
    }
    assert {each.error for each in entries} == {Damaged.code}
    assert len(entries) >= len(jobs)


def parquet() -> bytes:
    sink = io.BytesIO()
    pq.write_table(customers(20), sink)
    return sink.getvalue()


@pytest.fixture
def falaj(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[CommandLine]:
    with command_line(tmp_path, capsys) as made:
        yield made


@pytest.mark.slow
def test_local_files_are_not_predicted_with_an_altered_model(falaj: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").write_bytes(parquet())
    with fj.open(falaj.home) as platform:
        register(platform)
        flip_byte(platform, "churn@1", falaj.home)

    ran = falaj("predict", "churn@1", tmp_path / "rows.parquet", tmp_path / "out.parquet")

    assert ran.status == 1
    assert f"error[{Damaged.code}]" in ran.err
    assert not (tmp_path / "out.parquet").exists()


# ------------------------------------------------------------------------------------- the model server


@pytest.mark.slow
@pytest.mark.parametrize("route", [{"weight": 10}, {"weight": 0, "shadow": 100}], ids=["canary", "shadow"])
def test_the_model_server_serves_no_altered_version_as_canary_or_shadow(
    tmp_path: Path, route: dict[str, int]
) -> None:
    with make_platform(tmp_path) as platform:
        for _ in range(2):
            register(platform)
        platform.endpoints.deploy("churn", model="churn@1")
        flip_byte(platform, "churn@2", platform.home.path)
        with serving_platform(platform.parts) as url:
            token = platform.tokens.issue(purpose="test").secret
            headers = {"Authorization": f"Bearer {token}"}
            with httpx.Client(base_url=url, headers=headers, timeout=PATIENCE_S) as http:
                eventually(lambda: http.get("/v2/models/churn/ready").status_code == 200)
                share = 100 - route["weight"]
                platform.endpoints.route(
                    "churn", routes=(Route(version="1", weight=share), Route(version="2", **route))
                )
                problem = eventually(lambda: platform.endpoints.show("churn").routes[1].problem)
                body = {
                    "inputs": [{"name": "X", "shape": [1, 3], "datatype": "FP32", "data": [1.0, 1.0, 1.0]}]
                }
                answers = [http.post("/v2/models/churn/infer", json=body) for _ in range(30)]

        entries = [each for each in platform.entries() if each["outcome"] == "failed"]

    assert "damaged" in problem or "signed" in problem
    versions = {each.json().get("model_version") for each in answers if each.status_code == 200}
    assert versions == {"1"}
    assert {(each["action"], each["error"]) for each in entries} >= {("models.read", Damaged.code)}
