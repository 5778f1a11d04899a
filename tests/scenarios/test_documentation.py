"""What the README and the demonstration say is true."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STORY = [
    "16,701 rows, 27 columns",
    "refused [policy.denied] champion of flight-delays is protected",
    "flight-delays@1 is champion, approved by sara",
    "flight-delays@2 int8: refused. trees only compare and add",
    "columns drift: weather__temp",
    "verdict: promoted",
    "rolled back: it is worse",
    "all requests go to version 3",
    "model_version flight-delays@3",
    "view weather",
    "refused [residency.denied]",
    "→ view:flights → dataset:jan-may",
    "sound: ",
    "was edited",
    "the whole demonstration",
]
"""What the demonstration must say, on each eighth flight."""


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


@pytest.mark.timeout(400)
def test_the_demonstration_tells_its_story(tmp_path: Path) -> None:
    """The whole loop, on each eighth flight."""
    said = run([sys.executable, ROOT / "examples" / "demo.py", "--every", "8"], tmp_path)

    for sentence in STORY:
        assert sentence in said, f"{sentence!r} is not in\n{said}"


@pytest.mark.parametrize(
    "page", [*sorted(ROOT.glob("docs/**/*.md")), ROOT / "README.md"], ids=lambda p: p.name
)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text())

    assert [link for link in links if not (page.parent / link).exists() and "NNNN" not in link] == []
