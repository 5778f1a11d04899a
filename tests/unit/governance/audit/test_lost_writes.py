"""A database that lost its last writes is refused when it is opened."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import falaj as fj
from falaj.assembly.home import open_home
from falaj.assembly.platform import assemble
from falaj.errors import Damaged

CHILD = """
import os, signal, sys
import falaj as fj
with fj.open(sys.argv[1]) as platform:
    for number in range(5):
        platform.workspaces.create(f"w{number}")
    platform.audit.inclusion_proof(0)  # signs a head
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home whose last writes are in the write-ahead log, after kill -9."""
    monkeypatch.setenv("FALAJ_CONFIG_DIR", str(tmp_path / "config"))
    with fj.open(tmp_path / "home"):
        pass
    ended = subprocess.run([sys.executable, "-c", CHILD, str(tmp_path / "home")], check=False)
    assert ended.returncode == -signal.SIGKILL
    return tmp_path / "home"


@pytest.mark.slow
def test_a_killed_platform_opens_with_all_that_was_written(home: Path) -> None:
    with fj.open(home) as platform:
        assert {f"w{number}" for number in range(5)} <= {
            each.name for each in platform.workspaces.list().items
        }


@pytest.mark.slow
def test_a_cut_write_ahead_log_is_noticed_at_the_next_start(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wal = home / "falaj.db-wal"
    assert wal.stat().st_size > 0
    (home / "falaj.db-shm").unlink(missing_ok=True)

    os.truncate(wal, wal.stat().st_size // 3)

    with pytest.raises(Damaged, match="lost its last writes") as caught:
        assemble(open_home(home))
    assert "restore the newest backup" in (caught.value.faults[0].fix or "")


@pytest.mark.slow
def test_an_older_copy_is_noticed_and_the_owner_can_go_on(
    home: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with fj.open(home):
        pass
    shutil.copy(home / "falaj.db", tmp_path / "copy.db")
    with fj.open(home) as platform:
        platform.workspaces.create("later")
    shutil.copy(tmp_path / "copy.db", home / "falaj.db")

    with fj.open(home) as platform:
        assert "the metadata database has lost its last writes" in caplog.text
        platform.audit.accept(reason="the disk was replaced")
        platform.workspaces.create("onwards")

    assemble(open_home(home)).close()
