"""The commands, links and figures of the README are correct."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from polling import eventually

ROOT = Path(__file__).parents[2]


def run(command: list[str | Path], folder: Path) -> str:
    environment = os.environ | {"FALAJ_CONFIG_DIR": str(folder / "config"), "NO_COLOR": "1", "COLUMNS": "200"}
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.mark.slow
def test_readme_commands_work_twice(tmp_path: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)

    for _ in range(2):
        printed = run([sys.executable, "-c", block], tmp_path)
        ended_at = int(time.time())
        eventually(lambda: time.time() >= ended_at + 1)  # noqa: B023 - the name of the set contains the second

        assert "'usage__calls') only AE" in printed
        assert "-2 view usage" in printed
        assert "ok=True" in printed


@pytest.mark.slow
def test_readme_lines_work_twice(tmp_path: Path) -> None:
    """On the ports that are free, since the home sets none."""
    (block,) = re.findall(r"```\n(falaj init.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    script = f"export PATH={programs}\nset -euo pipefail\n{block}"
    try:
        printed = [run(["bash", "-c", script], tmp_path) for _ in range(2)]
    finally:
        run(["bash", "-c", f"PATH={programs} falaj down"], tmp_path)

    assert "churn@1 is registered" in printed[0]
    assert "churn@2 is registered" in printed[1]
    assert all("sound" in each for each in printed)


def test_readme_figures_equal_the_measured_benchmarks() -> None:
    script = ROOT / "scripts" / "benchmark_table.py"
    compared = subprocess.run([sys.executable, script, "--check"], check=False)

    assert compared.returncode == 0, "run scripts/benchmark_table.py"


@pytest.mark.parametrize(
    "page", [*sorted(ROOT.glob("docs/**/*.md")), ROOT / "README.md"], ids=lambda p: p.name
)
def test_links_have_targets(page: Path) -> None:
    links = re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text())

    assert [link for link in links if not (page.parent / link).exists() and "NNNN" not in link] == []
