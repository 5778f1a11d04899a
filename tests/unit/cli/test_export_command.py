"""`falaj models export`, on the home and over REST."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import falaj as fj
from command_line import CommandLine, command_line
from interfaces import serve
from model_servers import constant


@pytest.fixture
def falaj(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with command_line(tmp_path, capsys) as line:
        with fj.open(line.home) as platform:
            blob = platform.put("file", constant(tmp_path / "m.onnx", 3.0))
            platform.models.register("churn", files=(blob.id,), paths=("model.onnx",))
        yield line


@pytest.mark.slow
def test_an_edge_bundle_is_written_and_the_printed_command_verifies_it(
    falaj: CommandLine, tmp_path: Path
) -> None:
    shown = falaj.done("models", "export", "churn@1", "out", "--to", "edge", "--archive", "out.tar.gz").out

    assert "churn@1 is exported to out, and to out.tar.gz: 8 files" in shown
    (command,) = [line.split()[1:] for line in shown.splitlines() if line.strip().startswith("next")]
    assert command[:2] == ["python", "out/run.py"]
    ran = subprocess.run([sys.executable, *command[1:]], cwd=tmp_path, capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "churn@1 is sound" in ran.stdout


@pytest.mark.slow
def test_json_has_the_files_and_the_notes(falaj: CommandLine, tmp_path: Path) -> None:
    given = ["--to", "kserve", "--cpus", "2", "--memory", "1GiB", "--gpus", "1", "--max-batch-rows", "8"]

    made = falaj.json("models", "export", "churn@1", "out", *given)

    assert "storageUri" in made["notes"][0]
    assert {file["path"] for file in made["files"]} == {
        path.relative_to(tmp_path / "out").as_posix()
        for path in (tmp_path / "out").rglob("*")
        if path.is_file()
    }
    assert "max_batch_size: 8" in (tmp_path / "out/model/churn/config.pbtxt").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--to", "tensorrt"], "--to"),
        (["--to", "kserve", "--memory", "lots"], "--memory 2GiB"),
        (["--to", "kserve", "--storage-uri", "ftp://x"], "--storage-uri"),
        (["--to", "kserve", "--gpus", "many"], "--gpus"),
        (["--to", "edge", "--gpus", "2"], "not with edge"),
        (["--to", "edge", "--archive", "out.zip"], "tar.gz"),
    ],
)
def test_bad_options_are_named_as_they_are_typed(
    falaj: CommandLine, tmp_path: Path, given: list[str], words: str
) -> None:
    ran = falaj("models", "export", "churn@1", "out", *given)

    assert ran.status == 2
    assert words in ran.err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_an_existing_folder_takes_force(falaj: CommandLine, tmp_path: Path) -> None:
    falaj.done("models", "export", "churn@1", "out", "--to", "edge")

    refused = falaj("models", "export", "churn@1", "out", "--to", "triton")

    assert (refused.status, "--force" in refused.err) == (1, True)
    falaj.done("models", "export", "churn@1", "out", "--to", "triton", "--force")
    assert json.loads((tmp_path / "out/export.json").read_text())["to"] == "triton"


@pytest.mark.slow
def test_over_rest_the_same_bytes_arrive(tmp_path: Path) -> None:
    with serve(tmp_path) as served:
        platform = served.platform
        blob = platform.put("file", constant(tmp_path / "m.onnx", 3.0))
        platform.models.register("churn", files=(blob.id,), paths=("model.onnx",))

        made = platform.export("churn@1", tmp_path / "out", to="edge")

    for file in made.files:
        assert (tmp_path / "out" / file.path).stat().st_size == file.size_bytes
    assert (tmp_path / "out/files/model.onnx").read_bytes() == (tmp_path / "m.onnx").read_bytes()
