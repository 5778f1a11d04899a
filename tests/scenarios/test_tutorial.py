"""Every block of the tutorial runs as typed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tutorial_steps import environment_of, run_tutorial


@pytest.mark.slow
def test_every_block_of_the_tutorial_works(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()

    ran = list(run_tutorial(folder, environment_of(Path(sys.executable).parent, tmp_path)))

    assert ran[-1] == "falaj down\n"
