"""Emulation of CUDA autocast on a CPU: operations that CUDA autocast runs in fp32 and CPU autocast does not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

IN_FP32: frozenset[Callable[..., Any]] = frozenset(
    {
        *(functional.layer_norm, functional.group_norm, functional.softplus),
        *(functional.softmax, functional.log_softmax, functional.softmin, functional.normalize),
        *(torch.layer_norm, torch.group_norm, torch.softmax, torch.log_softmax),
        *(torch.exp, torch.expm1, torch.log, torch.log2, torch.log10, torch.log1p, torch.pow, torch.rsqrt),
        *(torch.cumsum, torch.cumprod, torch.cdist, torch.norm, torch.prod),
        *(Tensor.softmax, Tensor.log_softmax, Tensor.exp, Tensor.log, Tensor.pow, Tensor.__pow__),
        *(Tensor.rsqrt, Tensor.cumsum, Tensor.norm, Tensor.prod),
    }
)
SUMS: frozenset[Callable[..., Any]] = frozenset({torch.sum, Tensor.sum})
"""These accumulate in fp32 without a copy of their input."""
HALVES = (torch.bfloat16, torch.float16)


class GpuAutocast(TorchFunctionMode):
    """Inside autocast: casts the inputs of the functions above to fp32, as CUDA autocast does."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        if function is functional.cross_entropy:
            return _cross_entropy(*args, **options)
        if not _sets_dtype_or_output(args, options):
            if function in IN_FP32:
                args = tuple(_to_fp32(value) for value in args)
                options = {name: _to_fp32(value) for name, value in options.items()}
            elif function in SUMS and args and _is_half(args[0]):
                options["dtype"] = torch.float32
        return function(*args, **options)


def _cross_entropy(found: Tensor, target: Tensor, **options: Any) -> Any:
    """Compute cross entropy as CUDA autocast does: logarithms in the input precision, the rest in fp32.

    torch passes all but the first two arguments by name. Only memory is measured: label smoothing need not be
    exact.
    """
    options["weight"] = weight = _to_fp32(options.get("weight"))
    if found.dtype not in HALVES:
        return functional.cross_entropy(found, target, **options)
    smoothing = options.pop("label_smoothing", 0.0)
    with torch.autocast("cpu", enabled=False):
        if target.is_floating_point():
            return functional.cross_entropy(found, target, label_smoothing=smoothing, **options)
        classes = 1 if found.dim() > 1 else 0
        logarithms = functional.log_softmax(found, classes)
        loss = functional.nll_loss(logarithms.float(), target, **options)
        if not smoothing:
            return loss
        weighed = logarithms if weight is None else logarithms * weight.view(-1, *[1] * (found.dim() - 2))
        rest = weighed.sum(classes, dtype=torch.float32) / -found.shape[classes]
        return (1 - smoothing) * loss + smoothing * (rest if loss.dim() else rest.mean())


def _sets_dtype_or_output(args: tuple[Any, ...], options: Mapping[str, Any]) -> bool:
    """Return whether the caller sets a dtype or an output tensor, which autocast respects."""
    return (
        options.get("dtype") is not None
        or options.get("out") is not None
        or any(isinstance(value, torch.dtype) for value in args)
    )


def _to_fp32(value: Any) -> Any:
    return value.float() if _is_half(value) else value


def _is_half(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in HALVES
