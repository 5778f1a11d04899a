"""The demonstration runs the whole loop where torch is not installed, and says what it leaves out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from processes import hide_module

ROOT = Path(__file__).parents[2]
STORY = [
    "torch is not installed, so the network is left out; 'make setup' adds torch",
    "flight-delays@1 is champion, approved by sara",
    "flight-delays@1 int8: refused. trees only compare and add",
    "flight-delays@1 prune-structured: ",
    "recommended: CPU, ",
    "platform.pipeline('train_trees.py'",
    "columns drift: weather__temp",
    "verdict: ",
    "rolled back: it is worse",
    "→ view:flights → dataset:jan-may",
    "sound: ",
    "the whole demonstration",
]
"""Sentences that it must print, in this order."""


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_demonstration_without_torch_runs_the_whole_loop(tmp_path: Path) -> None:
    own = {"FALAJ_CONFIG_DIR": str(tmp_path / "config"), "HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    environment = os.environ | own | {"COLUMNS": "200"} | hide_module("torch", tmp_path / "hidden")
    command = [sys.executable, str(ROOT / "examples" / "demo.py"), "--every", "8"]

    with (tmp_path / "printed").open("w") as out:
        shown = subprocess.run(command, env=environment, stdout=out, stderr=out, timeout=900, check=False)

    printed = (tmp_path / "printed").read_text()
    places = [printed.find(sentence) for sentence in STORY]
    assert shown.returncode == 0, printed
    assert -1 not in places, printed
    assert places == sorted(places)
