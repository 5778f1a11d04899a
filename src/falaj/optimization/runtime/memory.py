"""`python -m falaj.optimization.runtime.memory MODEL ROWS`: the memory of a model that answers a batch of rows.

It is measured in a process of its own, as memory that was freed in this one would be used again.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from falaj.optimization.runtime.conversion.converted import Array

LONGEST_S = 120
CALLS = 3


def measure_memory(model: Path, batch: Array) -> int | None:
    """Return the bytes that a model takes beyond its runtime library; None if it cannot be measured."""
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.npy"
        np.save(rows, batch, allow_pickle=False)
        command = [sys.executable, "-m", "falaj.optimization.runtime.memory", str(model), str(rows)]
        try:
            ran = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_S, check=True)
            return int(ran.stdout)
        except (OSError, ValueError, subprocess.SubprocessError):
            return None


def main(model: str, rows: str) -> None:
    from falaj.optimization.runtime.candidates import open_candidate

    path, batch = Path(model), np.load(rows, allow_pickle=False)
    _import_library(path)
    before = _resident("VmRSS")
    found = open_candidate("measured", path)
    if found is not None:
        for _ in range(CALLS):
            found.predict(batch)
        print(max(0, _resident("VmHWM") - before))


def _import_library(path: Path) -> None:
    """Import what runs the model, so that it is not counted."""
    if path.suffix == ".onnx":
        import onnxruntime  # noqa: F401
    elif path.suffix == ".pt2":
        import torch  # noqa: F401
    elif path.suffix == ".tflite":
        import ai_edge_litert.interpreter  # noqa: F401
    else:
        import xgboost  # noqa: F401


def _resident(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    main(*sys.argv[1:])
