"""What torch keeps for the whole process, set as a plan says while it is trained by, and put back afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from falaj.training.runtime.plan.plans import Plan


@contextmanager
def numerics_of(plan: Plan) -> Iterator[None]:
    """Inside, matrix products and threads are as `plan` says."""
    threads, matrices = torch.get_num_threads(), torch.get_float32_matmul_precision()
    if plan.threads is not None:
        torch.set_num_threads(plan.threads)
    if plan.precision == "tf32":
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        if plan.threads is not None:
            torch.set_num_threads(threads)
        if plan.precision == "tf32":
            torch.set_float32_matmul_precision(matrices)
