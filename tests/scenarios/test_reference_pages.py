"""The generated pages of docs/reference are those that the code gives now."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_reference_pages_are_current() -> None:
    script = ROOT / "scripts" / "reference_pages.py"

    compared = subprocess.run(
        [sys.executable, script, "--check"], capture_output=True, text=True, check=False
    )

    assert compared.returncode == 0, compared.stderr


def test_the_examples_of_the_python_page_print_what_they_say(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "reference" / "python.md").read_text()
    script = "\n".join(re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE))
    environment = os.environ | {"FALAJ_CONFIG_DIR": str(tmp_path / "config")}

    ran = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )

    assert ran.returncode == 0, ran.stdout + ran.stderr
    promised = re.findall(r"^ *print\(.*\)  # (.+)$", script, re.MULTILINE)
    assert len(promised) > 10
    for words, line in zip(promised, ran.stdout.splitlines(), strict=True):
        assert words in line
