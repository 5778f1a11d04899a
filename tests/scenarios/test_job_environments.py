"""Jobs in a virtualenv of their own under a real `falaj up`, as root and as an ordinary user."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from running_platforms import USERS, running_platform

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SCRIPT = """
import os
import sys
from pathlib import Path
import falaj as fj
fj.job.log(step=1, loss=0.5)
print("ran in", sys.prefix)
print("volume", *sorted(os.listdir(Path(os.environ["FALAJ_VOLUMES"]) / "shared")))
"""


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that every user can read, with a virtualenv without packages and a volume."""
    with tempfile.TemporaryDirectory(prefix="falaj-test-", dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "bare"], check=True)
        (folder / "volume").mkdir(mode=0o755)
        (folder / "volume" / "rows.csv").write_text("1,2\n")
        yield folder


@pytest.mark.parametrize("user", USERS)
def test_a_job_in_an_environment_imports_falaj_and_reads_its_volume(
    tmp_path: Path, shared: Path, user: str
) -> None:
    toml = f"""
[jobs.environments]
bare = "{shared}/bare"
[jobs.volumes.shared]
folder = "{shared}/volume"
workspaces = ["default"]
"""
    (tmp_path / "train.py").write_text(SCRIPT)
    with running_platform(tmp_path, toml, user=user) as platform:
        job = platform.train(tmp_path / "train.py", environment="bare", volumes=("shared",))
        *_, ended = platform.jobs.wait(job.id)
        log = b"".join(platform.jobs.logs(job.id)).decode()

    assert ended.state == "done", f"{ended.reason}\n{log}"
    assert f"ran in {shared}/bare" in log
    assert "volume rows.csv" in log
