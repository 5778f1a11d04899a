"""A fork server that has imported torch, from which all gangs of a test session are forked."""

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

from polling import PATIENCE_S

SCRIPTS = Path(__file__).parent / "unit" / "training"


def run_script(script: str, request: Any, folder: Path) -> Any:
    """Return what `answer(request, folder)` of `script` returns, and print the output of its processes."""
    host = start() if start().poll() is None else started_anew()
    assert host.stdin
    assert host.stdout
    host.stdin.write(json.dumps({"script": script, "request": request, "folder": str(folder)}) + "\n")
    host.stdin.flush()
    ready, _, _ = select.select([host.stdout], [], [], PATIENCE_S)
    line = host.stdout.readline() if ready else ""
    output = folder / "output.txt"
    words = output.read_text(errors="replace") if output.exists() else ""
    print(words)
    if not line:
        host.kill()
        raise AssertionError(f"{script} gave no answer in {PATIENCE_S} s: {words}")
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
        output = os.open(folder / "output.txt", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        try:
            script = importlib.import_module(request["script"])
            found = {"answer": script.answer(request["request"], folder)}
        except Exception:
            found = {"broken": traceback.format_exc()}
        answers.write(json.dumps(found) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
