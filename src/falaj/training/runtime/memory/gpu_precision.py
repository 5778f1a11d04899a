"""What autocast on a GPU computes in fp32 though autocast on a CPU, where a step is traced, does not."""

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
        *(torch.cumsum, torch.cumprod, torch.cdist, torch.norm, torch.sum, torch.prod),
        *(Tensor.softmax, Tensor.log_softmax, Tensor.exp, Tensor.log, Tensor.pow, Tensor.__pow__),
        *(Tensor.rsqrt, Tensor.cumsum, Tensor.norm, Tensor.sum, Tensor.prod),
    }
)
HALVES = (torch.bfloat16, torch.float16)


class AsOnGpu(TorchFunctionMode):
    """Inside autocast: gives the functions above their tensors in fp32, as autocast does on a GPU."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function is functional.cross_entropy:
            return _cross_entropy(*args, **(kwargs or {}))
        if function in IN_FP32:
            args = tuple(_wide(value) for value in args)
        return function(*args, **(kwargs or {}))


def _cross_entropy(found: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Any:
    """On a GPU the logarithms are in the precision of `found`, and only what follows is in fp32."""
    if found.dtype not in HALVES or target.is_floating_point() or kwargs.get("label_smoothing"):
        return functional.cross_entropy(_wide(found), target, *args, **kwargs)
    with torch.autocast("cpu", enabled=False):
        logarithms = functional.log_softmax(found, 1 if found.dim() > 1 else 0)
        options = {name: value for name, value in kwargs.items() if name != "label_smoothing"}
        return functional.nll_loss(logarithms.float(), target, *args[:5], **options)


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in HALVES else value
