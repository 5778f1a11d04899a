"""The pages that change the repository are followed in a copy of it: files are written, changes made, commands run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The sources and the tests, without what they made."""
    made = tmp_path / "repository"
    for name in ("src", "tests"):
        shutil.copytree(ROOT / name, made / name, ignore=shutil.ignore_patterns("__pycache__", ".venvs"))
    shutil.copy(ROOT / "pyproject.toml", made)
    return made


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_driver_that_is_added_as_its_page_says_works(copy: Path) -> None:
    printed = follow("add-a-driver", copy)

    assert "16 passed" in printed
    assert "[(9,), (4,)]" in printed
    assert "the store of zone local was damaged" in printed
    assert "view trips was rebuilt from its table: 2 keys" in printed
    assert (copy / "store-home" / "online" / "local").read_bytes().startswith(b"SQLite format 3")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_aggregation_that_is_added_as_its_page_says_works(copy: Path) -> None:
    printed = follow("add-an-aggregation", copy)

    assert " passed" in printed
    assert "(2.0,)" in printed


def follow(page: str, folder: Path) -> str:
    """Do what the blocks of a page say, in order; return all that its commands printed."""
    printed = []
    for kind, how, text in BLOCK.findall((ROOT / "docs" / "howto" / f"{page}.md").read_text()):
        file = folder / how.partition("file=")[2].strip()
        if kind == "diff":
            change(file, text)
        elif "file=" in how:
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            file.write_text(text)
        elif kind == "sh":
            printed.append(run(["bash", "-euo", "pipefail", "-c", text], folder))
        elif kind == "python":
            printed.append(run([sys.executable, "-c", text], folder))
    return "".join(printed)


def change(file: Path, diff: str) -> None:
    """Apply a change that is shown without line numbers: its lines must be in the file once."""
    lines = diff.splitlines(keepends=True)
    before = "".join(line[1:] for line in lines if line[0] != "+")
    after = "".join(line[1:] for line in lines if line[0] != "-")
    text = file.read_text()
    assert text.count(before) == 1, f"{file} has these lines {text.count(before)} times:\n{before}"
    file.write_text(text.replace(before, after))


def run(command: list[str], folder: Path) -> str:
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {
        "PATH": programs,
        "PYTHONPATH": str(folder / "src"),
        "FALAJ_CONFIG_DIR": str(folder / "config"),
        "NO_COLOR": "1",
        "COLUMNS": "150",
    }
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, f"{command[-1]}\n{ran.stdout}\n{ran.stderr}"
    return ran.stdout + ran.stderr
