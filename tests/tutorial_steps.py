"""The blocks of the tutorial, run as typed. Standard library only: scripts/check_wheel.py runs them, too."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Generator, Mapping
from pathlib import Path

import curl

PAGE = Path(__file__).parents[1] / "docs" / "tutorial.md"
BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
ANY_PORT = "[server]\nport = 0\n\n[serving]\nport = 0\ngrpc_port = 0\n\n[console]\nport = 0\n"
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


class BlockFailed(Exception):
    """A block of the tutorial ended with an error, or does not say what it should."""


def environment_of(programs: Path, folder: Path) -> dict[str, str]:
    """Return the environment of a person who has `programs` first on the path, and settings in `folder`."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment |= {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "FALAJ_CONFIG_DIR": str(folder / "config"),
        "NO_COLOR": "1",
        "COLUMNS": "150",
    }
    if shutil.which("curl") is None:
        curl.install(folder / "bin")
        environment["PATH"] = f"{folder / 'bin'}:{environment['PATH']}"
    return environment


def run_tutorial(folder: Path, environment: Mapping[str, str]) -> Generator[str, None, None]:
    """Run the blocks in `folder`, which is empty, on ports that are free. Yield the text of each that has run.

    Raise BlockFailed at the first that fails, and at the end if a block has not said what STORY expects.
    """
    (folder / ".falaj").mkdir(mode=0o700)
    (folder / ".falaj" / "falaj.toml").write_text(ANY_PORT)
    outputs = dict[str, str]()
    try:
        for kind, how, text in BLOCK.findall(PAGE.read_text()):
            if "file=" in how:
                (folder / how.partition("file=")[2].strip()).write_text(text)
            elif kind == "sh":
                outputs[text] = run_block(text, folder, environment)
                yield text
    finally:
        subprocess.run(["falaj", "down"], cwd=folder, env=environment, capture_output=True, check=False)
    require_story(outputs)


def run_block(text: str, folder: Path, environment: Mapping[str, str]) -> str:
    """Run the lines of a block in one shell; return what they print."""
    command = ["bash", "-euo", "pipefail", "-c", text]
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise BlockFailed(f"{text}\n{ran.stdout}\n{ran.stderr}")
    return ran.stdout


def require_story(outputs: Mapping[str, str]) -> None:
    for command, words in STORY:
        found = [output for text, output in outputs.items() if command in text]
        if not any(words in output for output in found):
            raise BlockFailed(f"no block with {command!r} says {words!r}: {found}")
