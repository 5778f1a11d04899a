"""Every block of the tutorial runs as typed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import curl

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
STORY = [
    ("falaj init", "train.py"),
    ("falaj features infer", 'key = "customer_id"'),
    ("falaj apply", "2 definitions changed"),
    ("falaj features ingest usage usage.csv", "2000 rows added"),
    ("training-set", "2000 rows"),
    ("falaj train", "churn@1 is registered"),
    ("falaj train", "logged auc "),
    ("falaj runs show last", "auc"),
    ("falaj models verify", "yes"),
    ("falaj models promote", "churn@1 is champion"),
    ("falaj deploy", "churn is served by churn@1"),
    ("curl", '"probability"'),
    ("falaj monitoring watch", "churn compares churn with"),
    ("falaj pipelines apply", "retrain-churn"),
    ("falaj lineage show", "usage"),
    ("falaj audit verify", "sound"),
    ("falaj down", "stopped"),
]
"""Expected text in the output of a block."""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_block_of_the_tutorial_works(tmp_path: Path) -> None:
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "FALAJ_CONFIG_DIR": str(tmp_path / "config"),
        "NO_COLOR": "1",
        "COLUMNS": "150",
    }
    if shutil.which("curl") is None:
        curl.install(tmp_path / "bin")
        environment["PATH"] = f"{tmp_path / 'bin'}:{environment['PATH']}"
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / ".falaj").mkdir(mode=0o700)
    (folder / ".falaj" / "falaj.toml").write_text("[server]\nport = 0\n\n[serving]\nport = 0\n")
    outputs = {}
    try:
        for kind, how, text in BLOCK.findall((ROOT / "docs" / "tutorial.md").read_text()):
            if "file=" in how:
                (folder / how.partition("file=")[2].strip()).write_text(text)
            elif kind == "sh":
                outputs[text] = run(text, folder, environment)
    finally:
        subprocess.run(["falaj", "down"], cwd=folder, env=environment, check=False)

    for command, words in STORY:
        found = [output for text, output in outputs.items() if command in text]
        assert found, f"the tutorial has no {command}"
        assert any(words in output for output in found), f"{command} does not say {words!r}: {found}"


def run(text: str, folder: Path, environment: dict[str, str]) -> str:
    ran = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, f"{text}\n{ran.stdout}\n{ran.stderr}"
    return ran.stdout
