"""The uid sandbox verifies file modes before it starts anything, since they alone hide files."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import pytest

from falaj.drivers.sandbox import UidSandbox
from falaj.errors import IsolationRefused
from falaj.ports.sandbox import UserCode
from sandbox_testbed import machine


@pytest.fixture
def uid_sandbox() -> UidSandbox:
    facts = machine("uid")
    if not facts.uid_works:
        pytest.skip(f"the uid sandbox: {facts.uid_fault}")
    return UidSandbox(facts)


@pytest.mark.parametrize(
    ("home_mode", "key_mode", "named"),
    [(0o755, 0o644, "root.key"), (0o711, 0o604, "root.key"), (0o755, 0o600, "home"), (0o711, 0o600, "home")],
)
def test_uid_sandbox_refuses_to_start_when_a_hidden_path_is_readable(
    uid_sandbox: UidSandbox, home_mode: int, key_mode: int, named: str
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        home, job = Path(folder, "home"), Path(folder, "job")
        home.mkdir()
        job.mkdir()
        (home / "root.key").write_text("key-b41c")
        (home / "root.key").chmod(key_mode)
        home.chmod(home_mode)
        code = UserCode(["true"], job, hidden=[home / "root.key", home])

        with pytest.raises(IsolationRefused, match=f"{named} is not valid"):
            uid_sandbox.start(code, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

        assert job.stat().st_uid == 0


def test_uid_sandbox_names_the_folder_that_blocks_access_to_the_job(uid_sandbox: UidSandbox) -> None:
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder, "job")
        job.mkdir()

        with pytest.raises(IsolationRefused, match="keep job directories outside of it"):
            uid_sandbox.start(UserCode(["true"], job), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
