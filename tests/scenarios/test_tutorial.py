"""The tutorial, block by block, as a reader would type it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from polling import eventually

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
STORY = [
    ("falaj apply", "2 definitions changed"),
    ("falaj features ingest usage usage.csv", "2000 rows added"),
    ("training-set", "2000 rows"),
    ("falaj train", "churn@1 is registered"),
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
"""What a command says, as part of its block's output."""


@pytest.mark.timeout(600)
def test_every_block_of_the_tutorial_works(tmp_path: Path) -> None:
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "FALAJ_CONFIG_DIR": str(tmp_path / "config"),
        "NO_COLOR": "1",
        "COLUMNS": "150",
    }
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / ".falaj").mkdir(mode=0o700)
    (folder / ".falaj" / "falaj.toml").write_text("[server]\nport = 0\n\n[serving]\nport = 0\n")
    background: list[subprocess.Popen[bytes]] = []
    said = {}
    try:
        for kind, how, text in BLOCK.findall((ROOT / "docs" / "tutorial.md").read_text()):
            if "file=" in how:
                (folder / how.partition("file=")[2].strip()).write_text(text)
            elif "background" in how:
                command = ["bash", "-c", f"exec {text}"]
                background.append(
                    subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL)
                )
                eventually(lambda: (folder / ".falaj" / "run.json").exists(), within=30)
            elif kind == "sh":
                said[text] = run(text, folder, environment)
    finally:
        for process in background:
            process.send_signal(signal.SIGTERM)
            process.wait()

    for command, words in STORY:
        found = [output for text, output in said.items() if command in text]
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
