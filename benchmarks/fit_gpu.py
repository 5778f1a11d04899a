"""`fit` on an NVIDIA GPU: precisions, compilation, resuming after a kill, and checkpoints that change device.

Needs torch and a GPU: `PYTHONPATH=src python benchmarks/fit_gpu.py`. A transcript is in results/fit_gpu.txt.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from falaj.training.runtime.fit import FitResult, fit

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # otherwise matrix products are not deterministic

STEPS = 60
KILLED_AT = 37


def main() -> None:
    if len(sys.argv) > 1:
        train(run=sys.argv[1], device=sys.argv[2], killed_at=KILLED_AT)
        return
    if not torch.cuda.is_available():
        raise SystemExit("there is no GPU here")
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    reference = train(device="cuda").losses
    print(f"fp32 on the GPU: first loss {reference[0]:.4f}, last {reference[-1]:.4f}")
    on_cpu = train(device="cpu").losses
    print(f"fp32 on the CPU differs by at most {difference(reference, on_cpu):.2e}")
    for precision in ("bf16", "fp16"):
        losses = train(device="cuda", precision=precision).losses
        print(
            f"{precision}: last loss {losses[-1]:.4f}, differs by at most {difference(reference, losses):.3f}"
        )
    began = time.perf_counter()
    compiled = train(device="cuda", compile=True).losses
    took = time.perf_counter() - began
    print(f"compiled: differs by at most {difference(reference, compiled):.2e}, {took:.1f} s with compiling")
    print(
        f"killed by kill -9 at step {KILLED_AT} and resumed on the GPU: {resumed(reference, 'cuda', 'cuda')}"
    )
    print(f"killed on the GPU, resumed on the CPU: {resumed(reference, 'cuda', 'cpu')}")
    print(f"killed on the CPU, resumed on the GPU: {resumed(reference, 'cpu', 'cuda')}")


def train(
    *,
    device: str,
    run: str | None = None,
    precision: str = "fp32",
    compile: bool = False,  # noqa: A002 - as torch calls it
    killed_at: int | None = None,
) -> FitResult:
    """Train a small network with dropout on generated rows."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    rows = torch.randn(4096, 64)
    target = rows[:, :8].sum(1, keepdim=True)
    layers = (
        nn.Linear(64, 256),
        nn.GELU(),
        nn.Dropout(0.1),
        nn.Linear(256, 256),
        nn.GELU(),
        nn.Linear(256, 1),
    )
    seen = 0

    def loss(out: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        nonlocal seen
        seen += 1
        if seen == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return nn.functional.mse_loss(out.float(), wanted)

    return fit(
        nn.Sequential(*layers),
        loss,
        (rows, target),
        steps=STEPS,
        batch_size=256,
        lr=3e-3,
        precision=precision,  # type: ignore[arg-type]
        compile=compile,
        checkpoint_every=10,
        seed=1,
        device=device,
        run=run,
    )


def resumed(reference: list[float], first: str, then: str) -> str:
    """Return how a run killed on `first` and resumed on `then` differs from an uninterrupted one."""
    with tempfile.TemporaryDirectory() as folder:
        run = str(Path(folder) / "run")
        command = [sys.executable, __file__, run, first]
        ended = subprocess.run(command, env=os.environ, check=False).returncode
        result = train(run=run, device=then)
    tail = reference[-len(result.losses) :]
    return f"exit {ended}, {len(result.losses)} steps more, differs by at most {difference(tail, result.losses):.2e}"


def difference(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


if __name__ == "__main__":
    main()
