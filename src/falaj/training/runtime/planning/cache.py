"""Plans that were found before, by what they depend on: a JSON file each. What cannot be read is not there."""

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
from typing import Any

import torch
from torch import Tensor, nn

from falaj.training.runtime.data.sources import Batch
from falaj.training.runtime.errors import InvalidTraining
from falaj.training.runtime.planning.fingerprint import fingerprint_of
from falaj.training.runtime.planning.nvml import gpu_names
from falaj.training.runtime.planning.plan import Plan, plan_from

FORMAT = 1


def cache_folder() -> Path:
    """FALAJ_CACHE, or the user's cache."""
    given = os.environ.get("FALAJ_CACHE")
    return (
        Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "falaj"
    )


def load_plan(key: str | None) -> Plan | None:
    """The plan that was kept under `key`; None where there is none, or none that makes sense."""
    if key is None:
        return None
    try:
        kept = json.loads(_path(key).read_text())
        return plan_from(kept["plan"]) if kept["format"] == FORMAT and kept["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError, InvalidTraining):
        return None


def store_plan(key: str | None, plan: Plan, *, table: list[dict[str, Any]]) -> None:
    """Keep `plan`, all or nothing. A cache that cannot be written costs a search, not the run."""
    if key is None:
        return
    with suppress(OSError):
        path = _path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        text = json.dumps({"format": FORMAT, "key": key, "plan": asdict(plan), "tried": table}, indent=1)
        aside.write_text(text)
        aside.replace(path)


def plan_key(model: nn.Module, sample: Batch, device: torch.device, options: Mapping[str, Any]) -> str | None:
    """What a plan depends on: the model's code and structure, the samples' shapes, the options, hardware and versions.

    None where it cannot be told: a class that has no source to show, an object of which nothing can be said.
    """
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


def loss_fingerprint(loss: Callable[..., Any]) -> list[Any]:
    """What it computes; OSError or TypeError where that cannot be told."""
    return [fingerprint_of(loss)]


def source_of(of: Any) -> str:
    """The source of a class or function that is not torch's own, with its name; OSError where it has none to show."""
    name = f"{of.__module__}.{of.__qualname__}" if isinstance(of, type | FunctionType) else repr(of)
    if name.startswith("torch.") or isinstance(of, BuiltinFunctionType):
        return name
    return name + inspect.getsource(of)


def hardware_key(device: torch.device) -> list[str]:
    """The device in words that are equal where a plan can be used again."""
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


def _path(key: str) -> Path:
    return cache_folder() / "plans" / f"{key}.json"
