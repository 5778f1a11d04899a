"""Runs a script up to its `fj.fit`, which estimates the memory of the training instead of training."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from falaj.errors import Fault, InvalidInput
from falaj.records.training.jobs import JobMemoryEstimate, JobSpec

LIMIT_S = 600.0
LINES_SHOWN = 8
DISTRIBUTED_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "FALAJ_AGENT", "FALAJ_JOB")
"""Variables that would make the script act as one of several processes, or as a job."""
TRACEBACK = "Traceback (most recent call last):"
RUNTIME_ERRORS = "falaj.training.runtime.errors."


def estimate_script(script: str | Path, spec: JobSpec, *, limit_s: float = LIMIT_S) -> JobMemoryEstimate:
    """Return the memory of the training in `script`, with the processes and the kind of device that `spec` requests.

    The script runs here, with the job's arguments and variables, in a process of its own, until it calls `fj.fit`.
    InvalidInput where it does not come to that.
    """
    asked = {"processes": spec.world_size, "device": "cuda" if spec.gpus else "cpu"}
    with tempfile.TemporaryDirectory(prefix="falaj-estimate-") as folder:
        file = Path(folder) / "estimate.json"
        file.write_text(json.dumps(asked))
        status, printed = _run(Path(script).resolve(), spec, file, limit_s)
        answer: dict[str, Any] = json.loads(file.read_text())
    if "failed" in answer:
        raise _refused(answer["failed"], "a training whose memory can be estimated")
    if "estimate" not in answer:
        raise _refused(_why(status, printed, limit_s), "a script that calls fj.fit", printed)
    try:
        return JobMemoryEstimate.model_validate(answer["estimate"])
    except ValidationError as error:
        raise _refused(
            str(error.errors()[0]["msg"]), "an estimate; are there two versions of Falaj?"
        ) from error


def _run(script: Path, spec: JobSpec, file: Path, limit_s: float) -> tuple[int | None, str]:
    """Return the exit status, none if it took too long, and the output."""
    kept = {name: value for name, value in os.environ.items() if name not in DISTRIBUTED_VARIABLES}
    path = os.pathsep.join(filter(None, [kept.get("PYTHONPATH"), str(Path(__file__).parents[2])]))
    process = subprocess.Popen(
        [sys.executable, str(script), *spec.args],
        cwd=script.parent,
        env={**kept, "PYTHONPATH": path, **spec.env, "FALAJ_ESTIMATE": str(file)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
        errors="replace",
    )
    try:
        printed, _ = process.communicate(timeout=limit_s)
        return process.returncode, printed
    except subprocess.TimeoutExpired:
        _end(process)
        printed, _ = process.communicate()
        return None, printed
    finally:
        _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    """Kill the script and all processes that it started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _why(status: int | None, printed: str, limit_s: float) -> str:
    if status is None:
        return f"did not come to fj.fit within {limit_s:.0f} s"
    if status == 0:
        return "ended without calling fj.fit"
    said = _raised(printed) or f"exit status {status}"
    if said.startswith(RUNTIME_ERRORS):
        return f"fj.fit refused it: {said.partition(': ')[2]}"
    return f"failed before it called fj.fit: {said}"


def _raised(printed: str) -> str:
    """Return the error of a script: the line after its last traceback, or the last line of its output."""
    lines = printed.strip().splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith(TRACEBACK)]
    behind = lines[starts[-1] + 1 :] if starts else []
    return next((line for line in behind if line[:1].strip()), lines[-1] if lines else "")


def _refused(given: str, allowed: str, printed: str = "") -> InvalidInput:
    shown = "\n".join(printed.strip().splitlines()[-LINES_SHOWN:])
    message = "the memory of this job cannot be estimated" + (f"; it printed\n{shown}" if shown else "")
    fault = Fault(where="estimate", given=given, allowed=allowed, fix="submit it without an estimate")
    return InvalidInput(message, faults=[fault])
