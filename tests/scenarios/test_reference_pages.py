"""The generated pages of docs/reference are those that the code gives now."""

from __future__ import annotations

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
