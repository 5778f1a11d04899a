"""The platform in this process: the lock of the home, workflows without a server, and the public names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import falaj as fj
from falaj.assembly import drivers
from falaj.errors import HomeBusy, ProcessFailed
from falaj.governance import record_stream
from falaj.records.control.workflows import WorkflowState


@pytest.fixture(autouse=True)
def _own_config_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FALAJ_CONFIG_DIR", str(tmp_path / "config"))


@pytest.mark.slow
def test_workflows_run_without_a_server(tmp_path: Path) -> None:
    with fj.open(tmp_path / "home") as platform:
        platform.put("original", b"bytes")

        *_, last = platform.workflows.watch(platform.blobs.copy("original", "local", name="twin").id)

        assert last.state is WorkflowState.DONE
        assert platform.get("twin") == b"bytes"


@pytest.mark.slow
def test_unfinished_workflows_continue_at_the_next_opening(tmp_path: Path) -> None:
    with fj.open(tmp_path / "home") as platform:
        platform.put("original", b"bytes")
        work = platform.blobs.copy("original", "local", name="twin")

    with fj.open(tmp_path / "home") as platform:
        *_, last = platform.workflows.watch(work.id)

        assert last.state is WorkflowState.DONE


@pytest.mark.slow
def test_a_failed_controller_is_restarted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, faults = drivers.open_workflows, [OSError("the disk is away for a moment")]

    def open_workflows(*args: Any) -> Any:
        if faults:
            raise faults.pop()
        return real(*args)

    monkeypatch.setattr(drivers, "open_workflows", open_workflows)
    with fj.open(tmp_path / "home") as platform:
        platform.put("original", b"bytes")

        *_, last = platform.workflows.watch(platform.blobs.copy("original", "local", name="twin").id)

        assert last.state is WorkflowState.DONE


@pytest.mark.slow
def test_a_controller_that_keeps_failing_ends_the_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_stream, "HEARTBEAT_S", 0.1)
    with fj.open(tmp_path / "home") as platform:
        (tmp_path / "home" / "workflows.db").write_bytes(b"damaged " * 1000)
        platform.put("original", b"bytes")

        work = platform.blobs.copy("original", "local", name="twin").id
        with pytest.raises(
            ProcessFailed, match=r"the controller keeps failing since .*: DatabaseError: .* its log is"
        ):
            list(platform.workflows.watch(work))

        assert list(platform.platform.status().failing) == ["controller"]


@pytest.mark.slow
def test_a_lease_that_was_not_renewed_in_time_does_not_end_the_users_process(tmp_path: Path) -> None:
    script = """
import falaj as fj
from falaj.control import controller, lease
from falaj.errors import Unavailable

def away(*_, **__):
    raise Unavailable("the disk is slow")

lease.renew = away
short = controller.ControllerTiming(lease=controller.timedelta(seconds=0.3))
controller.Controller.__init__.__kwdefaults__["timing"] = short
with fj.open("home") as platform:
    platform.put("original", b"bytes")
    copied = platform.blobs.copy("original", "local", name="twin")
    *_, last = platform.workflows.watch(copied.id)
    controller.time.sleep(1)  # the lease is over by then
    print(last.state)
"""

    ran = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)

    assert (ran.returncode, ran.stdout.strip()) == (0, "done"), ran.stderr


def test_a_home_is_opened_once(tmp_path: Path) -> None:
    with fj.open(tmp_path / "home"), pytest.raises(HomeBusy, match="held by a platform"):
        fj.open(tmp_path / "home")

    fj.open(tmp_path / "home").close()


@pytest.mark.slow
def test_another_process_may_open_it_after_this_one_was_killed(tmp_path: Path) -> None:
    script = (
        "import falaj as fj, os; p = fj.open('home'); p.workspaces.create('kept'); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=False)

    with fj.open(tmp_path / "home") as platform:
        assert platform.workspaces.show("kept").name == "kept"
        assert platform.audit.key().ed25519


def test_public_names_are_pinned() -> None:
    assert fj.__all__ == [
        "STOP",
        "AcceptanceBudget",
        "Aggregation",
        "Canary",
        "CanaryTraffic",
        "Entity",
        "FalajError",
        "FalseAlarmBudget",
        "Feature",
        "FeatureView",
        "Lookup",
        "MonitorWindow",
        "Platform",
        "PredictionColumns",
        "ViewLookup",
        "__version__",
        "connect",
        "estimate",
        "export_onnx",
        "fit",
        "job",
        "once",
        "open",
        "save_model",
        "step",
        "verify_certificate",
        "verify_export",
    ]
    assert all(getattr(fj, name) is not None for name in fj.__all__)


def test_importing_falaj_loads_no_heavy_module() -> None:
    script = "import sys, falaj; print([m for m in ('pydantic', 'sqlalchemy', 'pyarrow', 'torch') if m in sys.modules])"

    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert ran.stdout.strip() == "[]"
