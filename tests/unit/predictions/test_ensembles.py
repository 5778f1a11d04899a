"""Ensembles in batches: composed and predicted by commands, here and as a job, as their models predict alone."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import falaj as fj
from command_line import CommandLine, command_line
from ensembles import AMOUNT, CLEAN, SCALED, add_view, ensemble, register
from framework_models import rows, xgboost_booster, xgboost_bytes
from model_servers import mlp

ROWS = 100_003
TOML = """
[[inputs]]
name = "row"
dtype = "float32"
shape = [-1, 4]
features = ["a", "b", "c", "d"]

[[steps]]
name = "final"
model = "final@1"
inputs = {x = ["request.row", "trees.probability"]}

[[steps]]
name = "trees"
model = "trees@1"
inputs = {features = "request.row"}

[outputs]
score = "final.y"
probability = "trees.probability"
"""

pytestmark = pytest.mark.slow


@pytest.fixture
def falaj(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[CommandLine]:
    with command_line(tmp_path, capsys) as made:
        yield made


@pytest.fixture
def final(falaj: CommandLine, tmp_path: Path) -> Path:
    """Register trees@1 and final@1, and compose both@1 of them; return the file of the latter model."""
    file = mlp(tmp_path / "final.onnx", widths=(5, 6, 1), seed=2)
    with fj.open(falaj.home) as platform:
        register(platform, "trees", {"model.ubj": xgboost_bytes(xgboost_booster())})
        register(platform, "final", {"model.onnx": file.read_bytes()})
    (tmp_path / "both.toml").write_text(TOML)
    made = falaj.done("models", "compose", "both", "both.toml")
    assert made.out.startswith("both@1 is composed of 2 steps: trees, final\n")
    assert "takes  row: float32 [-1, 4]" in made.out
    return file


def expected(final: Path, given: Any) -> tuple[Any, Any]:
    """Return score and probability, by the frameworks alone."""
    probability = np.asarray(xgboost_booster().inplace_predict(given), np.float32).reshape(-1, 1)
    session = ort.InferenceSession(final.read_bytes(), providers=["CPUExecutionProvider"])
    (score,) = session.run(None, {"x": np.concatenate([given, probability], axis=1)})
    return score[:, 0], probability[:, 0]


def write(path: Path, given: Any) -> None:
    columns = {name: given[:, number] for number, name in enumerate("abcd")}
    pq.write_table(pa.table({"id": np.arange(len(given)), **columns}), path, row_group_size=7_001)


def test_files_are_predicted_here(falaj: CommandLine, final: Path, tmp_path: Path) -> None:
    given = rows(ROWS, seed=4)
    write(tmp_path / "in.parquet", given)

    falaj.done("predict", "both@1", "in.parquet", "out.parquet")

    made = pq.read_table(tmp_path / "out.parquet")
    score, probability = expected(final, given)
    assert made.column_names == ["id", "score", "probability"]
    assert made["id"].to_pylist() == list(range(ROWS))
    np.testing.assert_allclose(made["score"].to_numpy(), score, atol=1e-4)
    np.testing.assert_allclose(made["probability"].to_numpy(), probability, atol=1e-5)
    assert sorted(path.name for path in tmp_path.glob("out*")) == ["out.parquet"]


def test_tables_on_the_platform_are_predicted_by_a_job(
    falaj: CommandLine, final: Path, tmp_path: Path
) -> None:
    given = rows(2_000, seed=4)
    write(tmp_path / "in.parquet", given)

    falaj.done("predict", "both@1", "in.parquet", "scores", "--job")

    with fj.open(falaj.home) as platform:
        made = pq.read_table(io.BytesIO(platform.get("scores")))
    np.testing.assert_allclose(made["score"].to_numpy(), expected(final, given)[0], atol=1e-4)


def test_python_steps_and_lookups_are_refused_in_a_sentence(
    falaj: CommandLine, final: Path, tmp_path: Path
) -> None:
    write(tmp_path / "in.parquet", rows(10))
    with fj.open(falaj.home) as platform:
        add_view(platform)
        tensors = {"inputs": (AMOUNT,), "outputs": (SCALED,)}
        register(platform, "clean", {"model.py": CLEAN}, **tensors)
        steps = ensemble().model_dump(exclude_defaults=True)["steps"]
        coded = ensemble(steps=steps[:1], outputs={"y": "clean.scaled"})
        platform.models.compose("coded", ensemble=coded)
        looked_up = ensemble(steps=steps[1:2], outputs={"y": "customer.features"})
        platform.models.compose("looked", ensemble=looked_up)

    refused = [
        falaj("predict", name, "in.parquet", "out.parquet", *more)
        for name in ("coded@1", "looked@1")
        for more in ((), ("--job",))
    ]

    assert [each.status for each in refused] == [2, 2, 2, 2]
    for each in refused[:2]:
        assert "clean@1" in each.err
        assert "python" in each.err
    for each in refused[2:]:
        assert "a batch has its features in its rows" in each.err
    assert not (tmp_path / "out.parquet").exists()


def test_faults_of_a_file_have_their_lines(falaj: CommandLine, final: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text(TOML.replace('model = "trees@1"', 'modle = "trees@1"'))
    (tmp_path / "no.toml").write_text("[[steps]")
    (tmp_path / "cycle.toml").write_text(TOML.replace('features = "request.row"', 'features = "final.y"'))

    bad, no, cycle = (falaj("models", "compose", "both", f"{name}.toml") for name in ("bad", "no", "cycle"))

    assert [each.status for each in (bad, no, cycle)] == [2, 2, 2]
    assert "bad.toml:15 steps.1" in bad.err
    assert "a file of TOML" in no.err
    assert "a cycle: final needs trees needs final" in cycle.err
