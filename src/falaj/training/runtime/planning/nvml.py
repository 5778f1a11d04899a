"""GPU discovery through NVML, which does not initialize CUDA: forked child processes can still use it."""

from __future__ import annotations

import ctypes

import torch


def is_cuda_available() -> bool:
    """Return whether torch can use a GPU, without initializing CUDA: see the setting in `falaj`."""
    return torch.cuda.is_available()


def gpu_count() -> int:
    """Return the number of GPUs that this process may use, without initializing CUDA."""
    return torch.cuda.device_count()


def gpu_names() -> list[str]:
    """Return name and memory of each GPU; empty without the driver's library."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return []
    if nvml.nvmlInit_v2():
        return []
    try:
        count = ctypes.c_uint()
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        return [_describe(nvml, place) for place in range(count.value)]
    finally:
        nvml.nvmlShutdown()


def _describe(nvml: ctypes.CDLL, place: int) -> str:
    handle, name = ctypes.c_void_p(), ctypes.create_string_buffer(96)
    memory = (ctypes.c_ulonglong * 3)()
    nvml.nvmlDeviceGetHandleByIndex_v2(place, ctypes.byref(handle))
    nvml.nvmlDeviceGetName(handle, name, len(name))
    nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
    return f"{name.value.decode(errors='replace')} {memory[0] >> 20} MiB"
