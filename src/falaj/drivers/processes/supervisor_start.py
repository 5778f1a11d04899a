"""Starts the supervisor of an attempt; by the launcher of one machine, and by the worker of a pod."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from falaj.drivers.processes.attempt_folder import AttemptFolder

START_TIMEOUT_S = 30
SOURCE_ROOT = Path(__file__).parents[3]


def start_supervisor(folder: AttemptFolder, secrets: Mapping[str, str]) -> str:
    """Start a supervisor, wait until it holds the lock, and return an error message, empty on success.

    It inherits nothing of our environment, which holds secrets. The secrets of the attempt are passed by a pipe only.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "falaj.drivers.processes.supervisor", str(folder.path)],
            cwd="/",
            env={"PATH": os.defpath, "PYTHONPATH": str(SOURCE_ROOT)},
            input=json.dumps(dict(secrets)).encode(),
            capture_output=True,
            start_new_session=True,
            timeout=START_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return f"the supervisor did not start within {START_TIMEOUT_S} s"
    if done.returncode == 0:
        return ""
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"exit code {done.returncode}"
