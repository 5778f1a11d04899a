"""The worker of a pod: what it needs, and what it leaves behind."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

import falaj
from falaj.drivers.kubernetes.worker.node import (
    MESSAGE_BYTES,
    WorkerNode,
    exit_code,
    failed_to_start,
    visible_gpus,
    write_message,
)
from falaj.drivers.kubernetes.worker.platform_client import output_files, safe_path
from polling import PATIENCE_S

ENDED = {"exit_code": 1, "signal": None, "reason": "Exit code 1", "used": {}, "limits": ["x" * 5000]}


def test_worker_and_supervisor_need_the_standard_library_only() -> None:
    source = Path(falaj.__file__).parents[1]
    script = f"""
import sys
sys.path.insert(0, {str(source)!r})
import falaj.drivers.kubernetes.worker.__main__
import falaj.drivers.processes.supervisor.attempt
import falaj.training.runtime.agent.job
known = set(sys.stdlib_module_names) | {{"falaj", "__main__"}}
print(sorted({{name.split(".")[0] for name in sys.modules}} - known))
"""
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", script], capture_output=True, text=True, timeout=PATIENCE_S
    )

    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_the_termination_message_fits_whatever_the_reason_is(tmp_path: Path) -> None:
    write_message(tmp_path / "message", ENDED | {"reason": "é" * 10_000, "delivered": False})

    text = (tmp_path / "message").read_text()
    assert len(text.encode()) <= MESSAGE_BYTES
    assert json.loads(text)["falaj"]["exit_code"] == 1


@pytest.mark.parametrize("ahead_s", [-3600.0, 3600.0])
def test_times_are_those_of_the_platforms_clock(tmp_path: Path, ahead_s: float) -> None:
    worker = WorkerNode("tls://h:1", 0, "u1", tmp_path, message_file=tmp_path / "message")
    worker._ahead_s, worker._is_refused = ahead_s, True
    here = time.time()

    worker._deliver(failed_to_start("no room"))

    told = json.loads((tmp_path / "message").read_text())["falaj"]
    assert here - ahead_s <= told["started_at"] <= told["ended_at"] <= time.time() - ahead_s


@pytest.mark.parametrize(
    ("code", "number", "expected"), [(0, None, 0), (7, None, 7), (None, 9, 137), (None, None, 1)]
)
def test_the_pod_ends_like_its_script(code: int | None, number: int | None, expected: int) -> None:
    assert exit_code(ENDED | {"exit_code": code, "signal": number}) == expected


def test_outputs_are_regular_files_only(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a").write_text("a")
    (tmp_path / "link").symlink_to("/etc/passwd")
    (tmp_path / "all").symlink_to("/etc")

    assert [path for path, _ in output_files(tmp_path)] == ["sub/a"]


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "code/../../x"])
def test_a_listed_path_stays_in_the_folder(path: str) -> None:
    with pytest.raises(ValueError, match="lists"):
        safe_path(path)


@pytest.mark.parametrize(
    ("given", "expected"), [("GPU-1,GPU-2", ["GPU-1", "GPU-2"]), ("all", []), ("void", []), ("", [])]
)
def test_the_gpus_are_those_of_the_device_plugin(
    monkeypatch: pytest.MonkeyPatch, given: str, expected: list[str]
) -> None:
    monkeypatch.setenv("NVIDIA_VISIBLE_DEVICES", given)

    assert visible_gpus() == expected
