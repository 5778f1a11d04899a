"""Tensors and a JSON manifest as bytes that verify themselves; nothing in them is ever executed.

magic (8) | length of the header (8, little-endian) | sha256 of the header (32) | header | tensors
The header is JSON, padded with spaces; each tensor is raw little-endian memory, at a multiple of 64 bytes,
with its dtype, shape and sha256 in the header. Tensors that share their memory are stored once.
"""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from falaj.training.runtime.errors import CheckpointDamaged, Fault, InvalidTraining

MAGIC = b"FALAJCK1"
ALIGNMENT = 64
_PREFIX = len(MAGIC) + 8 + 32


@dataclass(frozen=True)
class Contents:
    """What a checkpoint holds. The tensors lie in the memory of the bytes that it was read from."""

    manifest: dict[str, Any]
    tensors: dict[str, Tensor]


def encode(manifest: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[memoryview]:
    """`manifest` and `tensors` as bytes in parts. They show the tensors' own memory: use them before it changes."""
    entries: dict[str, dict[str, Any]] = {}
    shared: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    data: list[memoryview] = []
    offset = 0
    for name, tensor in tensors.items():
        first = seen.setdefault(_place(name, tensor), name)
        if first != name:
            shared[name] = first
            continue
        memory = _memory(_on_cpu(name, tensor))
        entries[name] = _entry(tensor, memory, offset)
        data += [memory, _padding(len(memory))]
        offset += len(memory) + len(data[-1])
    header = json.dumps({"manifest": manifest, "tensors": entries, "shared": shared}).encode()
    header += b" " * (-(_PREFIX + len(header)) % ALIGNMENT)
    prefix = MAGIC + len(header).to_bytes(8, "little") + sha256(header).digest()
    return [memoryview(prefix + header), *data]


def decode(data: bytearray) -> Contents:
    """What `encode` was given; refuses bytes that are cut, altered or something else."""
    header, start = _header(data)
    try:
        tensors = {name: _tensor(data, start, name, entry) for name, entry in header["tensors"].items()}
        tensors |= {name: tensors[first] for name, first in header["shared"].items()}
        return Contents(header["manifest"], tensors)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointDamaged(f"the checkpoint's header makes no sense: {error!r}") from error


def _header(data: bytearray) -> tuple[dict[str, Any], int]:
    if not data.startswith(MAGIC) or len(data) < _PREFIX:
        raise CheckpointDamaged("these bytes are no checkpoint, or only the beginning of one")
    end = _PREFIX + int.from_bytes(data[8:16], "little")
    header = bytes(data[_PREFIX:end])
    if sha256(header).digest() != data[16:_PREFIX]:
        raise CheckpointDamaged("the checkpoint's header is cut or altered")
    loaded: dict[str, Any] = json.loads(header)
    return loaded, end


def _tensor(data: bytearray, start: int, name: str, entry: Mapping[str, Any]) -> Tensor:
    dtype, shape = getattr(torch, entry["dtype"]), entry["shape"]
    count = math.prod(shape)
    begin, size = start + entry["offset"], count * dtype.itemsize
    found = memoryview(data)[begin : begin + size]
    if len(found) != size or sha256(found).hexdigest() != entry["sha256"]:
        raise CheckpointDamaged(f"the tensor {name} of the checkpoint is cut or altered")
    if not size:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype, count=count, offset=begin).reshape(shape)


def _entry(tensor: Tensor, memory: memoryview, offset: int) -> dict[str, Any]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    digest = sha256(memory).hexdigest()
    return {"dtype": dtype, "shape": list(tensor.shape), "offset": offset, "sha256": digest}


def _place(name: str, tensor: Tensor) -> tuple[Any, ...]:
    """Equal for tensors that are the same memory, read the same way."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return (name,)
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _on_cpu(name: str, tensor: Tensor) -> Tensor:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        kind = f"{tensor.layout} on {tensor.device}"
        raise InvalidTraining("cannot be kept in a checkpoint", faults=[Fault(name, kind, "dense tensors")])
    return tensor.detach().to("cpu").contiguous().resolve_conj().resolve_neg()


def _memory(tensor: Tensor) -> memoryview:
    """The memory of `tensor`, which lives as long as the view."""
    size = tensor.numel() * tensor.element_size()
    if not size:
        return memoryview(b"")
    memory = (ctypes.c_ubyte * size).from_address(tensor.data_ptr())
    memory.owner = tensor  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")


def _padding(size: int) -> memoryview:
    return memoryview(bytes(-size % ALIGNMENT))
