"""The runtime works with torch and the standard library alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SOURCE = Path(__file__).parents[3] / "src"

OF_TORCH = {
    *("torch", "torchgen", "functorch", "typing_extensions.py", "sympy", "mpmath"),
    *("networkx", "jinja2", "markupsafe", "fsspec", "filelock", "setuptools"),
}

OTHER_MODULES = "['falaj.records', 'falaj.records.no_telemetry', 'falaj.version']"
SCRIPT = """
import sys
import torch
from falaj.training.runtime.fit import fit

rows = torch.randn(40, 3)
options = dict(batch_size=8, device="cpu", run=sys.argv[1])
for epochs in (1, 2):
    result = fit(torch.nn.Linear(3, 1), torch.nn.functional.mse_loss, (rows, rows[:, :1]), epochs=epochs, **options)
samples = fit(torch.nn.Linear(3, 1), torch.nn.functional.mse_loss, list(zip(rows, rows[:, :1])), epochs=1)
print(result.resumed_from, result.step, samples.step)
print(sorted(name for name in sys.modules if name.startswith("falaj.") and ".training" not in name))
print("numpy" in sys.modules, "pydantic" in sys.modules)
"""


@pytest.mark.slow
def test_fit_trains_and_resumes_with_torch_alone(tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    packages.mkdir()
    for path in Path(torch.__file__).parents[1].iterdir():
        if path.name in OF_TORCH:
            (packages / path.name).symlink_to(path)
    command = [
        sys.executable,
        "-S",
        "-W",
        "ignore",
        "-c",
        SCRIPT,
        str(tmp_path / "run"),
    ]  # -S: no site-packages
    environment = {"PYTHONPATH": f"{SOURCE}{os.pathsep}{packages}"}

    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["5 10 2", OTHER_MODULES, "False False"]
