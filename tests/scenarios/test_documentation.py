"""The README says what is true."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(command: list[str | Path], folder: Path) -> str:
    environment = os.environ | {"FALAJ_CONFIG_DIR": str(folder / "config"), "NO_COLOR": "1", "COLUMNS": "200"}
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_the_ten_lines_of_the_readme_work(tmp_path: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)

    said = run([sys.executable, "-c", block], tmp_path)

    assert "'usage__calls') only AE" in said
    assert "-2 view usage" in said
    assert "ok=True" in said


@pytest.mark.parametrize(
    "page", [*sorted(ROOT.glob("docs/**/*.md")), ROOT / "README.md"], ids=lambda p: p.name
)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text())

    assert [link for link in links if not (page.parent / link).exists() and "NNNN" not in link] == []
