"""The cache of plans and measurements: one JSON file per entry, named by a hash of everything it depends on."""

from __future__ import annotations

import inspect
import json
import os
import platform
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from falaj.training.runtime.data.sources import Batch
from falaj.training.runtime.errors import InvalidTraining
from falaj.training.runtime.planning.fingerprint import fingerprint_of
from falaj.training.runtime.planning.nvml import gpu_names
from falaj.training.runtime.planning.plan import Plan, plan_from

FORMAT = 1

Entry = TypeVar("Entry")


def cache_folder() -> Path:
    """Return FALAJ_CACHE, or the user's cache folder."""
    given = os.environ.get("FALAJ_CACHE")
    return (
        Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "falaj"
    )


def load_entry(
    kind: str, key: str | None, read: Callable[[dict[str, Any]], Entry], *, version: int
) -> Entry | None:
    """Return the entry that was stored under `key`; None if there is none, or it cannot be read."""
    if key is None:
        return None
    try:
        found = json.loads(_path(kind, key).read_text())
        return read(found) if found["format"] == version and found["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError, InvalidTraining):
        return None


def store_entry(kind: str, key: str | None, values: Mapping[str, Any], *, version: int) -> None:
    """Store `values` under `key` atomically. A cache that cannot be written is ignored."""
    if key is None:
        return
    with suppress(OSError):
        path = _path(kind, key)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps({"format": version, "key": key, **values}, indent=1))
        temporary.replace(path)


def load_plan(key: str | None) -> Plan | None:
    """Return the plan that was found before under `key`, or None."""
    return load_entry("plans", key, lambda found: plan_from(found["plan"]), version=FORMAT)


def store_plan(key: str | None, plan: Plan, *, table: list[dict[str, Any]]) -> None:
    """Store `plan` with the `table` of trials that led to it."""
    store_entry("plans", key, {"plan": asdict(plan), "tried": table}, version=FORMAT)


def plan_key(model: nn.Module, sample: Batch, device: torch.device, options: Mapping[str, Any]) -> str | None:
    """Return the hash of what a plan depends on: code and structure of the model, sample shapes, options, hardware
    and versions. None if it cannot be determined, for example for a class without source code."""
    try:
        described = fingerprint_of(model, by_shape=[*model.parameters(), *model.buffers()])
    except (OSError, TypeError):
        return None
    parts = [
        [repr(model), described],
        _kinds(sample),
        {name: str(value) for name, value in sorted(options.items())},
        hardware_key(device),
        [torch.__version__, platform.python_version(), FORMAT],
    ]
    return sha256(json.dumps(parts).encode()).hexdigest()


def loss_fingerprint(loss: Callable[..., Any] | None) -> list[Any]:
    """Return the fingerprint of a loss. Raise OSError or TypeError if it has none."""
    return [fingerprint_of(loss)]


def source_of(of: Any) -> str:
    """Return name and source of a class or function that is not part of torch. Raise OSError if it has no source."""
    name = f"{of.__module__}.{of.__qualname__}" if isinstance(of, type | FunctionType) else repr(of)
    if name.startswith("torch.") or isinstance(of, BuiltinFunctionType):
        return name
    return name + inspect.getsource(of)


def hardware_key(device: torch.device) -> list[str]:
    """Return a description of the device that is equal where a plan can be reused."""
    if device.type == "cuda":
        return [
            str(device),
            *gpu_names(),
            str(torch.version.cuda),
            os.environ.get("CUDA_VISIBLE_DEVICES", ""),
        ]
    return [platform.machine(), cpu_name(), str(os.cpu_count()), str(torch.get_num_threads())]


def cpu_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def _kinds(sample: Batch) -> Any:
    if isinstance(sample, Tensor):
        return _kind(sample)
    if isinstance(sample, tuple | list):
        return [_kinds(part) for part in sample]
    if isinstance(sample, Mapping):
        return {str(name): _kinds(part) for name, part in sample.items()}
    return type(sample).__name__


def _kind(tensor: Tensor) -> list[Any]:
    return [str(tensor.dtype), list(tensor.shape)]


def _path(kind: str, key: str) -> Path:
    return cache_folder() / kind / f"{key}.json"
