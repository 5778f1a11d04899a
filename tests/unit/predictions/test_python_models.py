"""Python models in batches, and models that hang: in the process without keys, in a sandbox that keeps code apart."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from batch_runs import SIGNATURE, customers, nothing, scores
from falaj.assembly.prediction import local_files
from falaj.assembly.prediction.local_files import predict_files
from falaj.drivers.sandbox.same_uid import SameUidSandbox
from falaj.errors import Damaged, FalajError, InvalidInput, IsolationRefused, Unavailable
from falaj.ports.sandbox import Sandbox
from falaj.records.control.predictions import AccompanyingFile, PredictionRun
from falaj.records.registry import FileFormat, TensorSpec
from falaj.serving.runtime.batch_prediction.watched_engine import HangWatch
from polling import eventually

ROWS = 150_001
WEIGHTS = b"[1.0, 10.0, 100.0]"
LINEAR = """
import json

print("loaded")  # lost


def load(files):
    global WEIGHTS
    WEIGHTS = json.loads(files["data/weights.json"])


def predict(inputs):
    print({"done": {"rows": 1}})
    return {"score": sum(inputs["X"][:, place] * weight for place, weight in enumerate(WEIGHTS))}
"""


def predicted(folder: Path, source: str, *, rows: int = 10, weights: bytes = WEIGHTS) -> Any:
    """Return what a model with this source writes."""
    given = folder / "in.parquet"
    pq.write_table(customers(rows), given, row_group_size=40_000)
    run = PredictionRun(
        model="m@1",
        file="model.py",
        sha256=hashlib.sha256(source.encode()).hexdigest(),
        format=FileFormat.PYTHON,
        tensors=SIGNATURE,
        outputs=(TensorSpec(name="score", dtype="float32", shape=(-1,)),),
        others=(AccompanyingFile(path="data/weights.json", sha256=hashlib.sha256(WEIGHTS).hexdigest()),),
        source=str(given),
    )
    predict_files(run, [source.encode()], folder / "out.parquet", others=[[weights]], report=nothing)
    return pq.read_table(folder / "out.parquet")


def test_a_python_model_predicts_with_the_files_of_its_version(tmp_path: Path) -> None:
    made = predicted(tmp_path, LINEAR, rows=ROWS)

    assert np.array_equal(made["id"].to_numpy(), np.arange(ROWS))
    assert np.allclose(made["score"].to_numpy(), scores(customers(ROWS)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.parquet", "out.parquet"]


@pytest.mark.parametrize(
    ("source", "kind", "words"),
    [
        (
            "import nonesuch\ndef predict(inputs): ...",
            Unavailable,
            "m@1 imports nonesuch, which is not installed",
        ),
        (
            "def predict(inputs):\n  raise TimeoutError('late')",
            FalajError,
            r"TimeoutError: late \(model.py, line 2\)",
        ),
        ("def predict(inputs):\n  raise SystemExit(0)", FalajError, r"SystemExit: 0 \(model.py, line 2\)"),
        (
            "def predict(inputs):\n  return {'other': 1}",
            InvalidInput,
            "returned \\['other'\\]; allowed a dict with score",
        ),
        (
            "import subprocess\ndef predict(inputs):\n  subprocess.run(['true'])",
            FalajError,
            "PermissionError|Operation not permitted",
        ),
        ("import os\ndef predict(inputs):\n  os.fork()", FalajError, "PermissionError"),
        (
            "import socket\ndef predict(inputs):\n  socket.create_connection(('192.0.2.1', 80), 1)",
            FalajError,
            "PermissionError|OSError|unreachable",
        ),
        (
            "import os\ndef predict(inputs):\n  os._exit(3)",
            Unavailable,
            "the process of the prediction ended",
        ),
    ],
)
def test_what_a_python_model_may_not_do_ends_in_a_sentence(
    tmp_path: Path, source: str, kind: type[FalajError], words: str
) -> None:
    with pytest.raises(kind, match=words):
        predicted(tmp_path, source)

    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.parquet"]


@pytest.mark.slow
def test_a_python_model_that_hangs_is_ended_after_its_time_limit(tmp_path: Path) -> None:
    source = (
        "import time\ncalls = []\ndef predict(inputs):\n  calls.append(1)\n"
        "  if len(calls) > 60: time.sleep(1000)\n  return {'score': inputs['X'][:, 0]}"
    )

    with pytest.raises(Unavailable, match="a run of m@1 hangs: it took longer than its time limit of 60 s"):
        predicted(tmp_path, source, rows=ROWS * 4)


def test_what_hangs_is_told_once_and_what_ends_in_time_is_not() -> None:
    told: list[str] = []
    watch = HangWatch(lambda hung: told.append(hung.message))

    watch.end(watch.begin("it ends", limit_s=0.1))
    watch.begin("it hangs", limit_s=0.1)
    eventually(lambda: bool(told))

    assert told == ["it hangs"]


def test_a_file_of_the_version_that_was_altered_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Damaged, match="a file of m@1 differs from the registered one"):
        predicted(tmp_path, LINEAR, weights=b"[1.0]")


def test_code_is_not_run_where_nothing_keeps_it_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def only_plain() -> Sequence[Sandbox]:
        return [SameUidSandbox()]

    monkeypatch.setattr(local_files, "find_sandboxes", only_plain)

    with pytest.raises(IsolationRefused, match="m@1 is Python code, which runs only where a sandbox"):
        predicted(tmp_path, LINEAR)
