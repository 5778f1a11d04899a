"""Peak rates of a device: floating-point operations and bytes per second, from a table or measured."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch

from falaj.training.runtime.planning.cache import hardware_key, load_entry, store_entry
from falaj.training.runtime.planning.plan import Precision

TERA, GIGA = 1e12, 1e9
TRIES_S = 0.05
CPU_WIDTH, GPU_WIDTH = 512, 4096
CPU_COPY_BYTES, GPU_COPY_BYTES = 1 << 26, 1 << 28
FORMAT = 1


@dataclass(frozen=True)
class DevicePeaks:
    """FLOP/s in the precision of the run, and memory bandwidth in bytes per second."""

    flops: float
    bandwidth: float | None
    """None if it was not requested and is not in the table: measuring it takes some memory."""
    measured: bool = False
    """Otherwise the vendor's figures."""


@dataclass(frozen=True)
class GpuSpec:
    """Dense figures without sparsity, in TFLOP/s, and GB/s; `half` is bf16 and fp16."""

    fp32: float
    tf32: float
    half: float
    bandwidth: float

    def peaks(self, precision: Precision) -> DevicePeaks:
        rates = {"fp32": self.fp32, "tf32": self.tf32}
        return DevicePeaks(rates.get(precision, self.half) * TERA, self.bandwidth * GIGA)


GPU_SPECS: tuple[tuple[str, GpuSpec], ...] = (
    ("GB200", GpuSpec(80, 1250, 2500, 8000)),
    ("B200", GpuSpec(75, 1125, 2250, 8000)),
    ("GH200", GpuSpec(67, 494, 989, 4000)),
    ("H200", GpuSpec(67, 494, 989, 4800)),
    ("H100 PCIe", GpuSpec(51, 378, 756, 2000)),
    ("H100 NVL", GpuSpec(60, 418, 835, 3900)),
    ("H100", GpuSpec(67, 494, 989, 3350)),
    ("H800", GpuSpec(67, 494, 989, 3350)),
    ("A100-PCIE-40GB", GpuSpec(19.5, 156, 312, 1555)),
    ("A100-SXM4-40GB", GpuSpec(19.5, 156, 312, 1555)),
    ("A100", GpuSpec(19.5, 156, 312, 2039)),
    ("A800", GpuSpec(19.5, 156, 312, 2039)),
    ("A40", GpuSpec(37.4, 74.8, 149.7, 696)),
    ("A30", GpuSpec(10.3, 82, 165, 933)),
    ("A10G", GpuSpec(31.2, 35, 70, 600)),
    ("A10", GpuSpec(31.2, 62.5, 125, 600)),
    ("L40S", GpuSpec(91.6, 183, 362, 864)),
    ("L40", GpuSpec(90.5, 90.5, 181, 864)),
    ("L4", GpuSpec(30.3, 60, 121, 300)),
    ("V100", GpuSpec(15.7, 15.7, 125, 900)),
    ("T4", GpuSpec(8.1, 8.1, 65, 320)),
    ("RTX 4090", GpuSpec(82.6, 82.6, 165, 1008)),
    ("RTX 3090", GpuSpec(35.6, 35.6, 71, 936)),
)
"""By a part of the name that the driver reports; the first match counts."""


def gpu_peaks(name: str, precision: Precision) -> DevicePeaks | None:
    """Return the peaks of the GPU that the driver calls `name`; None if it is not in the table."""
    words = name.split()
    for part, card in GPU_SPECS:
        if part in name if " " in part or "-" in part else any(w.split("-")[0] == part for w in words):
            return card.peaks(precision)
    return None


def device_peaks(
    device: torch.device, precision: Precision, *, reached: float = 0.0, with_bandwidth: bool = False
) -> DevicePeaks:
    """Return the peaks of `device`; those that are not in the table are measured once and cached.

    A measured peak below the rate that was `reached` was disturbed by other work: it is measured again.
    """
    if device.type == "cuda":
        known = gpu_peaks(torch.cuda.get_device_name(device), precision)
        if known is not None:
            return known
    parts = [FORMAT, torch.__version__, precision, *hardware_key(device)]
    key = sha256(json.dumps(parts).encode()).hexdigest()
    kept = load_entry("peaks", key, _peaks_from, version=FORMAT) or DevicePeaks(0.0, None, measured=True)
    flops, bandwidth = kept.flops, kept.bandwidth
    if not flops or flops < reached:
        flops = max(flops, measure_flops(device, precision))
    if with_bandwidth and bandwidth is None:
        bandwidth = measure_bandwidth(device)
    found = DevicePeaks(flops, bandwidth, measured=True)
    if found != kept:
        store_entry("peaks", key, {"flops": found.flops, "bandwidth": found.bandwidth}, version=FORMAT)
    return found


def measure_flops(device: torch.device, precision: Precision) -> float:
    """Return the FLOP/s of a matrix multiplication."""
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
    width = GPU_WIDTH if device.type == "cuda" else CPU_WIDTH
    matrix = torch.ones(width, width, dtype=dtypes.get(precision, torch.float32), device=device)
    out = torch.empty_like(matrix)
    return 2.0 * width**3 / _fastest_run(lambda: torch.mm(matrix, matrix, out=out), device)


def measure_bandwidth(device: torch.device) -> float:
    """Return the bytes per second of a copy inside the device's memory, read and written."""
    size = GPU_COPY_BYTES if device.type == "cuda" else CPU_COPY_BYTES
    data = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.zeros_like(data)
    return 2.0 * size / _fastest_run(lambda: target.copy_(data), device)


def _fastest_run(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the fastest of a few runs."""
    best, began = float("inf"), time.perf_counter()
    while best == float("inf") or time.perf_counter() - began < TRIES_S:
        for _ in range(2):
            start = time.perf_counter()
            work()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            best = min(best, time.perf_counter() - start)
    return best


def _peaks_from(found: dict[str, Any]) -> DevicePeaks:
    bandwidth = found["bandwidth"]
    return DevicePeaks(float(found["flops"]), bandwidth and float(bandwidth), measured=True)
