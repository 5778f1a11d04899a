"""The README says what is true."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(command: list[str | Path], folder: Path) -> str:
    environment = os.environ | {"FALAJ_CONFIG_DIR": str(folder / "config"), "NO_COLOR": "1", "COLUMNS": "200"}
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_the_lines_of_the_readme_work_twice(tmp_path: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)

    for _ in range(2):
        printed = run([sys.executable, "-c", block], tmp_path)
        time.sleep(1.1)  # the name of the training set has the second in it

        assert "'usage__calls') only AE" in printed
        assert "-2 view usage" in printed
        assert "ok=True" in printed


def test_the_benchmarks_of_the_readme_are_those_measured() -> None:
    script = ROOT / "scripts" / "benchmark_table.py"
    compared = subprocess.run([sys.executable, script, "--check"], check=False)

    assert compared.returncode == 0, "run scripts/benchmark_table.py"


@pytest.mark.parametrize(
    "page", [*sorted(ROOT.glob("docs/**/*.md")), ROOT / "README.md"], ids=lambda p: p.name
)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text())

    assert [link for link in links if not (page.parent / link).exists() and "NNNN" not in link] == []
