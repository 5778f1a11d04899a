"""A model whose predictions are known, rows for it, and runs of batch prediction.

    python tests/batch_runs.py files SOURCE OUTPUT
    python tests/batch_runs.py parts SOURCE FOLDER

The first predicts as `falaj predict` does, the second in its own process, in parts of 100 rows; both can be killed.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pyarrow as pa
import pyarrow.parquet as pq
from onnx import TensorProto, helper, numpy_helper

from falaj.assembly.prediction.local_files import predict_files
from falaj.drivers.deltalake.table_folders import DeltaFolders
from falaj.records.control.predictions import (
    PredictionColumns,
    PredictionProgress,
    PredictionRun,
    PredictionSummary,
)
from falaj.records.registry import TensorSpec
from falaj.records.serving.endpoints import ServedFile
from falaj.records.serving.settings import ServingSettings
from falaj.serving.runtime.batch_prediction import run as batch_run
from falaj.serving.runtime.batch_prediction.partial_output import KeptHere, OutputKeeper
from falaj.serving.runtime.loading import open_model

Array = npt.NDArray[Any]

NAMES = ("age", "income", "calls")
WEIGHTS = np.array([[1.0], [10.0], [100.0]], np.float32)
SIGNATURE = (TensorSpec(name="X", dtype="float32", shape=(-1, 3), features=NAMES),)


def linear_model(*, rows: int | str = "rows") -> bytes:
    """Return an ONNX model that adds age, 10 times income and 100 times calls to `score`."""
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["X", "W"], ["score"])],
        "linear",
        [helper.make_tensor_value_info("X", TensorProto.FLOAT, [rows, 3])],
        [helper.make_tensor_value_info("score", TensorProto.FLOAT, [rows, 1])],
        [numpy_helper.from_array(WEIGHTS, "W")],
    )
    return serialized(graph)


def serialized(graph: onnx.GraphProto) -> bytes:
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return made.SerializeToString()


def customers(count: int, *, first: int = 0) -> pa.Table:
    """Return rows whose values tell their number."""
    number = np.arange(first, first + count)
    return pa.table(
        {
            "calls": (number % 7).astype(np.float32),
            "id": number,
            "age": (number % 50).astype(np.float32),
            "income": (number % 11).astype(np.float32),
        }
    )


def scores(rows: pa.Table) -> Array:
    """Return what the linear model predicts."""
    matrix = np.column_stack([rows[name].to_numpy().astype(np.float32) for name in NAMES])
    return (matrix @ WEIGHTS)[:, 0]


def nothing(_: PredictionProgress) -> None:
    """Report nothing."""


@dataclass(frozen=True)
class BatchRunner:
    """Predicts tables in a folder of the test, as `falaj predict` does in a process of its own."""

    folder: Path

    @property
    def partial(self) -> Path:
        return self.folder / "partial"

    def write(self, rows: Any, name: str = "in.parquet", **options: Any) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(rows, path, **options)
        return path

    def __call__(
        self,
        source: Path,
        *,
        content: bytes | None = None,
        model: str = "churn@1",
        tensors: Any = SIGNATURE,
        report: Callable[[PredictionProgress], None] = nothing,
        restart: bool = False,
        threads: int = 2,
        keeper: OutputKeeper = KeptHere(),  # noqa: B008 - it has no state
        is_staged: bool = False,
        **columns: Any,
    ) -> PredictionSummary:
        self.partial.mkdir(exist_ok=True)
        content = content or linear_model()
        run = PredictionRun(
            model=model,
            file="model.onnx",
            sha256=hashlib.sha256(content).hexdigest(),
            tensors=tensors,
            columns=PredictionColumns(**columns),
            source=str(source),
            threads=threads,
            restart=restart,
            is_staged=is_staged,
        )
        name, _, number = model.rpartition("@")
        settings = ServingSettings(max_batch_rows=batch_run.RUN_ROWS)
        engine = open_model(ServedFile(model=name, version=number, settings=settings), content)
        try:
            return batch_run.predict(
                run, engine, folder=self.partial, folders=DeltaFolders(), report=report, keeper=keeper
            )
        finally:
            engine.close()

    def predicted(self) -> pa.Table:
        return pq.read_table(self.partial / "data")


def predict_local(
    source: Path, output: Path, *, overwrite: bool = False, **options: Any
) -> PredictionSummary:
    """Predict files as `falaj predict` does, in a process without keys."""
    content = options.pop("content", None) or linear_model()
    report = options.pop("report", nothing)
    columns = options.pop("columns", PredictionColumns())
    run = PredictionRun(
        model=options.pop("model", "churn@1"),
        file="model.onnx",
        sha256=hashlib.sha256(content).hexdigest(),
        tensors=SIGNATURE,
        columns=columns,
        source=str(source),
        **options,
    )
    return predict_files(run, [content], output, overwrite=overwrite, report=report)


class Stopped(BaseException):
    """The run is stopped, as by Ctrl-C."""


def stop_after(rows: int) -> Callable[[PredictionProgress], None]:
    """Return a report that stops the run once so many rows are done."""

    def report(far: PredictionProgress) -> None:
        if far.rows >= rows:
            raise Stopped

    return report


def main(mode: str, source: Path, output: Path) -> None:
    print("started", flush=True)
    if mode == "files":
        predict_local(source, output)
    else:
        batch_run.PART_ROWS, batch_run.COMMIT_S = 100, 0.0
        BatchRunner(output)(source)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
