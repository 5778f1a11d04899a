"""Process-wide numeric settings of torch: applied while a plan is used, and restored afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from falaj.training.runtime.planning.plan import Plan, Precision


@contextmanager
def apply_numerics(plan: Plan) -> Iterator[None]:
    """Set matrix precision and thread count as `plan` states."""
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
    """Allow TF32 in matrix products; restore all settings exactly, because compiled code is cached under them."""
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
    """Compute convolutions on a GPU in fp32; the default of torch is TF32."""
    convolutions = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    before = convolutions.fp32_precision
    convolutions.fp32_precision = "ieee"
    try:
        yield
    finally:
        convolutions.fp32_precision = before


def precision_of(plan: Plan, device: torch.device) -> Precision:
    """Return the effective precision of `plan` on `device`: that of the least precise part of a step."""
    in_tf32 = device.type == "cuda" and torch.backends.cudnn.conv.fp32_precision == "tf32"  # type: ignore[attr-defined]
    return "tf32" if plan.precision == "fp32" and in_tf32 else plan.precision
