"""What torch keeps for the whole process, set as a plan says while it is trained by, and put back afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from falaj.training.runtime.planning.plan import Plan, Precision


@contextmanager
def apply_numerics(plan: Plan) -> Iterator[None]:
    """Inside, matrix products and threads are as `plan` says."""
    threads = torch.get_num_threads()
    if plan.threads is not None:
        torch.set_num_threads(plan.threads)
    try:
        with tf32_matmul() if plan.precision == "tf32" else nullcontext():
            yield
    finally:
        if plan.threads is not None:
            torch.set_num_threads(threads)


@contextmanager
def tf32_matmul() -> Iterator[None]:
    """To the letter as before afterwards: compiled code is kept under all of these settings."""
    before, products = torch.get_float32_matmul_precision(), (torch.backends.cuda, torch.backends.mkldnn)
    kept = [each.matmul.fp32_precision for each in products]
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        for each, precision in zip(products, kept, strict=True):
            each.matmul.fp32_precision = precision


@contextmanager
def full_fp32() -> Iterator[None]:
    """Inside, convolutions on a GPU are computed in fp32 too; torch has them in TF32 unless it is told not to."""
    convolutions = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    before = convolutions.fp32_precision
    convolutions.fp32_precision = "ieee"
    try:
        yield
    finally:
        convolutions.fp32_precision = before


def precision_of(plan: Plan, device: torch.device) -> Precision:
    """What `plan` computes in on `device`, where a step is as precise as the least of its parts."""
    in_tf32 = device.type == "cuda" and torch.backends.cudnn.conv.fp32_precision == "tf32"  # type: ignore[attr-defined]
    return "tf32" if plan.precision == "fp32" and in_tf32 else plan.precision
