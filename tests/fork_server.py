"""A fork server that has loaded torch: all gangs of a test session are forked from it, one request after the other.

As a script: each line of its input names a script, its arguments and a folder; the response is one line of JSON.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import select
import subprocess
import sys
import traceback
from functools import cache
from pathlib import Path
from typing import Any

LONGEST_S = 300
SCRIPTS = Path(__file__).parent / "unit" / "training"


def run_script(script: str, asked: Any, folder: Path) -> Any:
    """What `answer(asked, folder)` of `script` says. What its processes said to people is printed."""
    host = start() if start().poll() is None else started_anew()
    assert host.stdin
    assert host.stdout
    host.stdin.write(json.dumps({"script": script, "asked": asked, "folder": str(folder)}) + "\n")
    host.stdin.flush()
    ready, _, _ = select.select([host.stdout], [], [], LONGEST_S)
    line = host.stdout.readline() if ready else ""
    said = folder / "said.txt"
    words = said.read_text(errors="replace") if said.exists() else ""
    print(words)
    if not line:
        host.kill()
        raise AssertionError(f"{script} gave no answer in {LONGEST_S} s: {words}")
    found = json.loads(line)
    assert "broken" not in found, f"{found['broken']}\n{words}"
    return found["answer"]


@cache
def start() -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(SCRIPTS), *sys.path])}
    command = [sys.executable, str(Path(__file__).resolve())]
    host = subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(host.kill)
    return host


def started_anew() -> subprocess.Popen[str]:
    start.cache_clear()
    return start()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        request = json.loads(line)
        folder = Path(request["folder"])
        said = os.open(folder / "said.txt", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(said, 1)
        os.dup2(said, 2)
        os.close(said)
        try:
            script = importlib.import_module(request["script"])
            found = {"answer": script.answer(request["asked"], folder)}
        except Exception:
            found = {"broken": traceback.format_exc()}
        answers.write(json.dumps(found) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
