"""`falaj predict` in a process of its own: Ctrl-C, a disk that is full, and nobody who reads its messages."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

import falaj as fj
from batch_runs import SIGNATURE, customers, linear_model, scores
from command_line import environment
from polling import eventually

ROWS = 1_500_000

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with the model, and rows beside it."""
    monkeypatch.setenv("FALAJ_CONFIG_DIR", str(tmp_path / "config"))
    with fj.open(tmp_path / "home") as platform:
        file = platform.blobs.upload(iter([linear_model()]))
        platform.models.register("churn", files=(file.id,), paths=("model.onnx",), inputs=SIGNATURE)
        platform.models.promote("churn@1", to="champion")
    pq.write_table(customers(ROWS), tmp_path / "in.parquet")
    return tmp_path


def command(*more: str) -> list[str]:
    return [sys.executable, "-m", "falaj", "predict", "churn@champion", "in.parquet", "out.parquet", *more]


def require_complete(folder: Path) -> None:
    made = pq.read_table(folder / "out.parquet")
    assert np.array_equal(made["id"].to_numpy(), np.arange(ROWS))
    assert np.array_equal(made["score"].to_numpy(), scores(customers(ROWS)))
    assert not (folder / "out.parquet.partial").exists()


def test_ctrl_c_stops_it_and_the_same_command_goes_on(folder: Path) -> None:
    partial = folder / "out.parquet.partial"

    def has_rows() -> bool:
        return (partial / "data").exists() and (partial / "data").stat().st_size > 4

    with subprocess.Popen(command("--threads", "1"), cwd=folder, env=environment(folder)) as process:
        eventually(has_rows, within=60)
        process.send_signal(signal.SIGINT)
        status = process.wait(60)
    left = sorted(path.name for path in partial.iterdir()) if partial.exists() else []
    again = subprocess.run(command(), cwd=folder, env=environment(folder), capture_output=True, text=True)

    assert status != 0
    assert left in (["data", "journal", "lock"], [])
    assert again.returncode == 0, again.stderr
    require_complete(folder)


def test_a_full_disk_is_named_and_the_same_command_goes_on(folder: Path) -> None:
    def limit_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, 3 << 20))

    ran = subprocess.run(
        command(), cwd=folder, env=environment(folder), capture_output=True, text=True, preexec_fn=limit_files
    )
    existed = (folder / "out.parquet").exists()
    again = subprocess.run(command(), cwd=folder, env=environment(folder), capture_output=True, text=True)

    assert (ran.returncode, existed) == (1, False)
    assert "the disk is full" in ran.stderr
    assert again.returncode == 0, again.stderr
    require_complete(folder)


def test_it_works_without_anyone_who_reads_its_messages(folder: Path) -> None:
    ran = subprocess.run(
        ["bash", "-c", 'exec "$@" 2>&- >&-', "bash", *command()], cwd=folder, env=environment(folder)
    )

    assert ran.returncode == 0
    require_complete(folder)
    assert os.access(folder / "out.parquet", os.R_OK)
