"""Serialization of values between stages: a JSON description, and a list of tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from falaj.training.runtime.parallel.pipeline.forward_graph import cannot_partition


def describe(value: Any, tensors: list[Tensor]) -> Any:
    """Return `value` as JSON, and append its tensors to `tensors` in order."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"tensor": [name_of(value.dtype), list(value.shape), value.requires_grad]}
    if isinstance(value, tuple | list):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [describe(each, tensors) for each in value]}
    if isinstance(value, dict) and all(isinstance(name, str) for name in value):
        return {"dict": {name: describe(each, tensors) for name, each in value.items()}}
    if isinstance(value, torch.dtype):
        return {"dtype": name_of(value)}
    if isinstance(value, torch.device):
        return {"device": None}
    if value is None or isinstance(value, bool | int | float | str):
        return {"plain": value}
    raise cannot_partition(
        f"a {type(value).__name__} that goes from one stage to the next", allowed="tensors and numbers"
    )


def empty_tensors(described: Any, device: torch.device) -> list[Tensor]:
    """Return empty tensors on `device` for those of the description."""
    return [
        torch.empty(shape, dtype=dtype_of(dtype), device=device, requires_grad=grad)
        for dtype, shape, grad in _tensors(described)
    ]


def assemble(described: Any, tensors: Iterator[Tensor], device: torch.device) -> Any:
    """Return the described value with these `tensors`."""
    ((kind, inner),) = described.items()
    if kind == "tensor":
        return next(tensors)
    if kind in ("tuple", "list"):
        parts = [assemble(each, tensors, device) for each in inner]
        return parts if kind == "list" else tuple(parts)
    if kind == "dict":
        return {name: assemble(each, tensors, device) for name, each in inner.items()}
    if kind == "dtype":
        return dtype_of(inner)
    return device if kind == "device" else inner


def _tensors(described: Any) -> Iterator[tuple[str, Sequence[int], bool]]:
    ((kind, inner),) = described.items()
    if kind == "tensor":
        yield inner
    elif kind in ("tuple", "list", "dict"):
        for each in inner.values() if kind == "dict" else inner:
            yield from _tensors(each)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found
