"""The GPUs of this machine, as NVIDIA's management library (NVML) lists them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from falaj.records.scheduling import Gpu

Found = tuple[tuple[Gpu, ...], str]


def load() -> Any:
    return importlib.import_module("pynvml")


def find_gpus(load: Callable[[], Any] = load) -> Found:
    """The whole GPUs in the order of their indices, and why some or all are missing (empty: none is)."""
    try:
        nvml = load()
    except ImportError:
        return (), "nvidia-ml-py is not installed"
    try:
        with session(nvml):
            return list_gpus(nvml)
    except nvml.NVMLError as error:
        return (), f"NVML does not answer: {error}"


@contextmanager
def session(nvml: Any) -> Iterator[None]:
    nvml.nvmlInit()
    try:
        yield
    finally:
        nvml.nvmlShutdown()


def list_gpus(nvml: Any) -> Found:
    """A card that fails or is cut into MIG slices is left out: it cannot be handed out whole."""
    gpus, faults = [], []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            card = nvml.nvmlDeviceGetHandleByIndex(index)
            if is_sliced(nvml, card):
                faults.append(f"GPU {index} is in MIG mode")
            else:
                gpus.append(describe(nvml, card))
        except nvml.NVMLError as error:
            faults.append(f"GPU {index}: {error}")
    return tuple(gpus), "; ".join(faults)


def is_sliced(nvml: Any, card: Any) -> bool:
    try:
        current, _ = nvml.nvmlDeviceGetMigMode(card)
    except nvml.NVMLError:
        return False  # a card that has no such mode
    return bool(current == nvml.NVML_DEVICE_MIG_ENABLE)


def describe(nvml: Any, card: Any) -> Gpu:
    return Gpu(
        id=text(nvml.nvmlDeviceGetUUID(card)),
        model=text(nvml.nvmlDeviceGetName(card)),
        memory_bytes=nvml.nvmlDeviceGetMemoryInfo(card).total,
    )


def text(given: str | bytes) -> str:
    """Older releases of the library give bytes."""
    return given.decode() if isinstance(given, bytes) else given
