"""Where a batch prediction runs: what it asks the engines for, and what is said where there is no GPU."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batch_runs import customers, linear_model, nothing, predict_local
from falaj.assembly.prediction import local_files
from falaj.assembly.prediction.local_files import predict_files
from falaj.control.workflows.store import work_row
from falaj.errors import InvalidInput, Unavailable
from falaj.records.control.predictions import PredictionColumns, PredictionRun
from falaj.records.registry import FileFormat, TensorSpec
from framework_models import lightgbm_booster, lightgbm_bytes, rows, torch_bytes, torch_module
from platforms import OwnPlatform

ROWS = 50_001
without_gpu = pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has a GPU")


def predicted_by_torch(folder: Path, module: Any, given: Any, **options: Any) -> Any:
    """Return what a batch prediction of a torch export writes, a list for each row."""
    import torch

    content = torch_bytes(module, torch.zeros(2, given.shape[1]))
    names = tuple(f"f{number}" for number in range(given.shape[1]))
    table = pa.table({name: given[:, number] for number, name in enumerate(names)})
    pq.write_table(table, folder / "in.parquet", row_group_size=20_000)
    run = PredictionRun(
        model="m@1",
        file="model.pt2",
        sha256=hashlib.sha256(content).hexdigest(),
        format=FileFormat.TORCH_EXPORT,
        tensors=(TensorSpec(name="x", dtype="float32", shape=(-1, len(names)), features=names),),
        columns=PredictionColumns(keep=()),
        source=str(folder / "in.parquet"),
        **options,
    )
    predict_files(run, [content], folder / "out.parquet", report=nothing)
    return np.array(pq.read_table(folder / "out.parquet").column(0).to_pylist(), np.float32)


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_a_torch_export_predicts_as_torch_does(tmp_path: Path, device: str) -> None:
    import torch

    module, given = torch_module(), rows(ROWS, seed=1)

    found = predicted_by_torch(tmp_path, module, given, device=device)

    with torch.inference_mode():
        expected = module(torch.from_numpy(given)).numpy()
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.on_request("FALAJ_TEST_GPU")
def test_a_torch_export_predicts_on_the_gpu_as_torch_does(tmp_path: Path) -> None:
    import torch

    module, given = torch_module(), rows(ROWS, seed=1)

    found = predicted_by_torch(tmp_path, module, given, device="gpu")

    with torch.inference_mode():
        expected = module(torch.from_numpy(given)).numpy()
    np.testing.assert_allclose(found, expected, atol=1e-4)


@without_gpu
def test_torch_says_that_there_is_no_gpu_and_nothing_is_left(tmp_path: Path) -> None:
    with pytest.raises(
        Unavailable, match=r"m@1 is to run on a GPU, and torch .* finds none; .* the device auto"
    ):
        predicted_by_torch(tmp_path, torch_module(), rows(10), device="gpu")

    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.parquet"]


@without_gpu
def test_onnx_runtime_says_that_there_is_no_gpu(tmp_path: Path) -> None:
    pq.write_table(customers(10), tmp_path / "in.parquet")

    with pytest.raises(Unavailable, match=r"the model is to run on a GPU, and .*; .* choose the device auto"):
        predict_local(tmp_path / "in.parquet", tmp_path / "out.parquet", device="gpu")
    predict_local(tmp_path / "in.parquet", tmp_path / "out.parquet", device="cpu")

    assert pq.read_metadata(tmp_path / "out.parquet").num_rows == 10


@pytest.mark.parametrize(
    ("kind", "device", "sees"),
    [
        (FileFormat.TORCH_EXPORT, "auto", True),
        (FileFormat.TORCH_EXPORT, "cpu", False),
        (FileFormat.ONNX, "gpu", True),
        (FileFormat.PYTHON, "auto", False),
        (FileFormat.PYTHON, "gpu", True),
    ],
)
def test_the_process_sees_the_gpus_only_where_it_may_use_them(
    kind: FileFormat, device: Any, sees: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(local_files, "GPU_DEVICES", "null")
    run = PredictionRun(model="m@1", file="m", sha256="0" * 64, format=kind, device=device)

    assert [str(path) for path in local_files._devices(run)] == (["/dev/null"] if sees else [])


# ------------------------------------------------------------------------------------------ as a job


@pytest.fixture
def models(platform: OwnPlatform, tmp_path: Path) -> OwnPlatform:
    """The platform with an ONNX model, a model of trees, and rows."""
    linear = platform.blobs.upload(iter([linear_model()]))
    platform.models.register("linear", files=(linear.id,), paths=("model.onnx",))
    trees = platform.blobs.upload(iter([lightgbm_bytes(lightgbm_booster())]))
    platform.models.register("trees", files=(trees.id,), paths=("model.txt",))
    pq.write_table(customers(5), tmp_path / "rows.parquet")
    platform.put("rows", tmp_path / "rows.parquet")
    return platform


def requested(platform: OwnPlatform, **options: Any) -> Any:
    work = platform.predictions.start("linear@1", data="blob:rows", name="scores", **options)
    with platform.database.read() as tx:
        return work_row(tx, work.id).input


@pytest.mark.parametrize(
    ("options", "gpus", "device"),
    [({}, 0, "auto"), ({"device": "gpu"}, 1, "gpu"), ({"gpus": 2}, 2, "auto"), ({"device": "cpu"}, 0, "cpu")],
)
def test_a_job_asks_for_the_gpu_that_it_is_to_use(
    models: OwnPlatform, options: Any, gpus: int, device: str
) -> None:
    found = requested(models, **options)

    assert (found["gpus"], found["run"]["device"]) == (gpus, device)


def test_a_device_that_the_format_or_the_request_rules_out_is_refused(models: OwnPlatform) -> None:
    with pytest.raises(InvalidInput) as gpus:
        requested(models, device="cpu", gpus=1)
    with pytest.raises(InvalidInput) as trees:
        models.predictions.start("trees@1", data="blob:rows", name="scores", device="gpu")

    assert gpus.value.faults[0].allowed == "0 where the device is cpu"
    assert trees.value.faults[0].given == "gpu, for a model of the format lightgbm"
