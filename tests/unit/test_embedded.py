"""The platform in this process: who owns the home, long work without a server, and what is public."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import falaj as fj
from falaj.errors import HomeBusy
from falaj.records.work import WorkState


@pytest.fixture(autouse=True)
def _own_config_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FALAJ_CONFIG_DIR", str(tmp_path / "config"))


def test_long_work_is_done_without_a_server(tmp_path: Path) -> None:
    with fj.open(tmp_path / "home") as platform:
        platform.put("original", b"bytes")

        *_, last = platform.work.watch(platform.blob.copy("original", "local", name="twin").id)

        assert last.state is WorkState.DONE
        assert platform.get("twin") == b"bytes"


def test_work_that_was_not_finished_goes_on_at_the_next_opening(tmp_path: Path) -> None:
    with fj.open(tmp_path / "home") as platform:
        platform.put("original", b"bytes")
        asked = platform.blob.copy("original", "local", name="twin")

    with fj.open(tmp_path / "home") as platform:
        *_, last = platform.work.watch(asked.id)

        assert last.state is WorkState.DONE


def test_a_home_is_opened_once(tmp_path: Path) -> None:
    with fj.open(tmp_path / "home"), pytest.raises(HomeBusy, match="held by a platform"):
        fj.open(tmp_path / "home")

    fj.open(tmp_path / "home").close()


def test_another_process_may_open_it_after_this_one_was_killed(tmp_path: Path) -> None:
    script = (
        "import falaj as fj, os; p = fj.open('home'); p.workspace.create('kept'); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=False)

    with fj.open(tmp_path / "home") as platform:
        assert platform.workspace.show("kept").name == "kept"
        assert platform.audit.key().ed25519


def test_the_public_names() -> None:
    assert fj.__all__ == [
        "Aggregation",
        "Entity",
        "FalajError",
        "Feature",
        "FeatureView",
        "Platform",
        "__version__",
        "connect",
        "export_onnx",
        "fit",
        "job",
        "once",
        "open",
        "save_model",
    ]
    assert all(getattr(fj, name) is not None for name in fj.__all__)


def test_importing_falaj_loads_no_heavy_module() -> None:
    script = "import sys, falaj; print([m for m in ('pydantic', 'sqlalchemy', 'pyarrow', 'torch') if m in sys.modules])"

    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert ran.stdout.strip() == "[]"
