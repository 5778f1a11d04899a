"""`falaj predict` in a process of its own: Ctrl-C, full disks, tables that drift, and who reads its messages."""

from __future__ import annotations

import json
import os
import pty
import resource
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import falaj as fj
from batch_runs import SIGNATURE, customers, linear_model, scores
from command_line import environment
from polling import PATIENCE_S, eventually

ROWS = 1_500_000

pytestmark = pytest.mark.slow


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

    status, tries = 0, 0
    while status == 0 and (tries := tries + 1) <= 5:  # on a busy machine it may end before the signal comes
        (folder / "out.parquet").unlink(missing_ok=True)
        with subprocess.Popen(command("--threads", "1"), cwd=folder, env=environment(folder)) as process:
            eventually(lambda: has_rows() or process.poll() is not None, every=0.001)
            process.send_signal(signal.SIGINT)
            status = process.wait(PATIENCE_S)
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


FULL_DISK = """
import subprocess, sys
command, place = sys.argv[2:], sys.argv[1]
mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", place]
subprocess.run(mount, check=True)
first = subprocess.run(command, capture_output=True, text=True)
subprocess.run(["mount", "-o", "remount,size=200m", place], check=True)
second = subprocess.run(command, capture_output=True, text=True)
print(first.returncode, first.stderr.replace(chr(10), " "), second.returncode, second.stdout, second.stderr, sep="|")
subprocess.run(["cp", f"{place}/out.parquet", "out.parquet"], check=True)
"""


def can_mount(folder: Path) -> bool:
    """Return whether a file system of our own can be mounted, in a namespace of our own."""
    words = ["unshare", "--mount", "mount", "-t", "tmpfs", "none", str(folder)]
    return subprocess.run(words, capture_output=True).returncode == 0


def test_a_file_system_without_room_is_named_and_the_same_command_goes_on(folder: Path) -> None:
    place = folder / "small"
    place.mkdir()
    if not can_mount(place):
        pytest.skip("file systems cannot be mounted here")
    words = [*command()[:-1], str(place / "out.parquet")]

    ran = subprocess.run(
        ["unshare", "--mount", sys.executable, "-c", FULL_DISK, str(place), *words],
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
    )

    assert ran.returncode == 0, ran.stderr
    first, why, second, said, _ = ran.stdout.split("|")
    assert (first, second) == ("1", "0"), ran.stdout
    assert "writing the predictions failed after row" in why
    assert "the disk is full; make room, then run the same command again" in why
    assert "of them before" in said
    require_complete(folder)


def test_a_table_that_drifts_half_way_is_named_and_goes_on_once_it_is_repaired(folder: Path) -> None:
    rows = folder / "rows"
    rows.mkdir()
    half = ROWS // 2
    pq.write_table(customers(half), rows / "0.parquet", row_group_size=100_000)
    good = customers(ROWS - half, first=half)
    words = [*command()[:-2], str(rows), "out.parquet"]
    with subprocess.Popen(words, cwd=folder, env=environment(folder), stderr=subprocess.PIPE) as process:
        partial = folder / "out.parquet.partial"
        pq.write_table(good, rows / "1.parquet", row_group_size=100_000)
        eventually(lambda: process.poll() is not None or (partial / "data").exists())
        drifted = good.set_column(2, "age", good["age"].cast(pa.string()))
        pq.write_table(drifted, folder / "drifted.parquet", row_group_size=100_000)
        (folder / "drifted.parquet").replace(rows / "1.parquet")
        process.communicate()
    again = subprocess.run(words, cwd=folder, env=environment(folder), capture_output=True, text=True)
    is_drift_seen = not (folder / "out.parquet").exists()
    pq.write_table(good, rows / "1.parquet", row_group_size=100_000)
    last = subprocess.run(
        [*words, "--json"], cwd=folder, env=environment(folder), capture_output=True, text=True
    )

    if is_drift_seen:  # else the whole was read before the table drifted
        assert process.returncode != 0
        assert again.returncode != 0
        assert "1.parquet, column age" in again.stderr
        assert last.returncode == 0, last.stderr
        assert json.loads(last.stdout)["rows"] == ROWS
    require_complete(folder)


def test_a_terminal_shows_a_bar_and_json_comes_alone(folder: Path) -> None:
    shown, terminal = pty.openpty()
    with os.fdopen(shown, "rb", buffering=0) as screen:
        seen = bytearray()

        def read() -> None:
            with suppress(OSError):
                while piece := screen.read(65536):
                    seen.extend(piece)

        reader = threading.Thread(target=read)
        reader.start()
        ran = subprocess.run(
            command("--json"), cwd=folder, env=environment(folder), stdout=subprocess.PIPE, stderr=terminal
        )
        os.close(terminal)
        reader.join(PATIENCE_S)

    assert ran.returncode == 0, seen
    summary = json.loads(ran.stdout)
    assert (summary["rows"], summary["resumed"], summary["columns"]) == (ROWS, 0, ["id", "score"])
    assert "churn@1 predicts in.parquet" in seen.decode()
    assert f"/{ROWS}" in seen.decode().replace(" ", "")
    require_complete(folder)
