"""What the local machine reports now: CPUs, memory, network, disks and GPUs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from falaj.drivers.machine.kernel_files import read_text
from falaj.drivers.machine.nvml import Load, load, query, session, to_text
from falaj.ports.machine.hardware import GpuTelemetry, NodeTelemetry

CPU_MODES = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
SECTOR_BYTES = 512
"""The unit of /proc/diskstats, whatever the sectors of the disk are."""
WHOLE_DISK = re.compile(r"(sd[a-z]+|vd[a-z]+|xvd[a-z]+|nvme\d+n\d+|mmcblk\d+)")
KIB = 1024


def read_telemetry(
    name: str, *, volumes: Iterable[Path] = (), root: Path = Path("/"), load: Load = load
) -> NodeTelemetry:
    """Return what the machine reports now; what cannot be read is left out."""
    memory = _memory(root)
    return NodeTelemetry(
        name=name,
        cpu_s=_cpu_seconds(root),
        load=_load(root),
        memory_total_bytes=memory.get("MemTotal"),
        memory_available_bytes=memory.get("MemAvailable"),
        network_bytes=_network(root),
        disk_bytes=_disks(root),
        volumes=dict(_volumes(volumes)),
        gpus=read_gpus(load=load),
    )


def read_gpus(*, load: Load = load) -> tuple[GpuTelemetry, ...]:
    """Return the figures of every card that responds; none where there is no driver."""
    try:
        nvml = load()
    except ImportError:
        return ()
    found = []
    try:
        with session(nvml):
            for index in range(nvml.nvmlDeviceGetCount()):
                handle = query(nvml, "nvmlDeviceGetHandleByIndex", index)
                if handle is not None:
                    found.append(_gpu(nvml, handle))
    except nvml.NVMLError:
        pass
    return tuple(found)


def _gpu(nvml: Any, handle: Any) -> GpuTelemetry:
    # Only the second version counts what the driver reserves apart from what is used.
    memory = query(nvml, "nvmlDeviceGetMemoryInfo", handle, getattr(nvml, "nvmlMemory_v2", None))
    use = query(nvml, "nvmlDeviceGetUtilizationRates", handle)
    return GpuTelemetry(
        id=to_text(query(nvml, "nvmlDeviceGetUUID", handle)),
        model=to_text(query(nvml, "nvmlDeviceGetName", handle)),
        memory_total_bytes=None if memory is None else int(memory.total),
        memory_used_bytes=None if memory is None else int(memory.used),
        busy=None if use is None else use.gpu / 100,
        temperature_c=query(nvml, "nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU),
        power_w=_scaled(query(nvml, "nvmlDeviceGetPowerUsage", handle), 1e-3),
        energy_j=_scaled(query(nvml, "nvmlDeviceGetTotalEnergyConsumption", handle), 1e-3),
        pcie_bytes_per_s=_pcie(nvml, handle),
        nvlink_bytes=_nvlink(nvml, handle),
        ecc_errors=_ecc(nvml, handle),
    )


def _pcie(nvml: Any, handle: Any) -> dict[str, float]:
    counters = {"received": nvml.NVML_PCIE_UTIL_RX_BYTES, "sent": nvml.NVML_PCIE_UTIL_TX_BYTES}
    found = {
        name: query(nvml, "nvmlDeviceGetPcieThroughput", handle, which) for name, which in counters.items()
    }
    return {name: value * KIB for name, value in found.items() if value is not None}


def _nvlink(nvml: Any, handle: Any) -> dict[str, float]:
    """Return the bytes of data over all links, without protocol overhead."""
    fields = {
        "received": nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX,
        "sent": nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX,
    }
    values = query(nvml, "nvmlDeviceGetFieldValues", handle, list(fields.values())) or ()
    return {
        name: value.value.ullVal * KIB
        for name, value in zip(fields, values, strict=False)
        if value.nvmlReturn == 0
    }


def _ecc(nvml: Any, handle: Any) -> dict[str, int]:
    kinds = {
        "corrected": nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED,
        "uncorrected": nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
    }
    since_load = nvml.NVML_VOLATILE_ECC
    found = {
        name: query(nvml, "nvmlDeviceGetTotalEccErrors", handle, kind, since_load)
        for name, kind in kinds.items()
    }
    return {name: int(value) for name, value in found.items() if value is not None}


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _cpu_seconds(root: Path) -> dict[str, float]:
    ticks = os.sysconf("SC_CLK_TCK")
    for line in read_text(root / "proc/stat").splitlines():
        name, *numbers = line.split()
        if name == "cpu":
            return {mode: int(number) / ticks for mode, number in zip(CPU_MODES, numbers, strict=False)}
    return {}


def _load(root: Path) -> float | None:
    words = read_text(root / "proc/loadavg").split()
    return float(words[0]) if words else None


def _memory(root: Path) -> dict[str, int]:
    found = {}
    for line in read_text(root / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdecimal():
            found[name] = int(words[0]) * KIB
    return found


def _network(root: Path) -> dict[tuple[str, str], int]:
    """Return the bytes of each adapter, without loopback."""
    found = {}
    for line in read_text(root / "proc/net/dev").splitlines()[2:]:
        name, _, rest = line.partition(":")
        numbers = rest.split()
        if name.strip() != "lo" and len(numbers) >= 9:
            found[name.strip(), "received"], found[name.strip(), "sent"] = int(numbers[0]), int(numbers[8])
    return found


def _disks(root: Path) -> dict[tuple[str, str], int]:
    """Return the bytes of each whole disk."""
    found = {}
    for line in read_text(root / "proc/diskstats").splitlines():
        words = line.split()
        if len(words) >= 10 and WHOLE_DISK.fullmatch(words[2]):
            found[words[2], "read"] = int(words[5]) * SECTOR_BYTES
            found[words[2], "written"] = int(words[9]) * SECTOR_BYTES
    return found


def _volumes(paths: Iterable[Path]) -> Iterable[tuple[str, tuple[int, int]]]:
    for path in paths:
        try:
            found = os.statvfs(path)
        except OSError:
            continue
        yield str(path), (found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail)
