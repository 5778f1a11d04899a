"""The CPU extensions on which the speed of inference depends, as Linux reports them."""

from __future__ import annotations

import os
import platform
from collections.abc import Collection
from pathlib import Path

from falaj.records.optimization import InstructionSet

EXTENSIONS = frozenset(
    {
        *(
            "avx2",
            "fma",
            "f16c",
            "avx512f",
            "avx512bw",
            "avx512_vnni",
            "avx_vnni",
            "avx512_bf16",
            "avx512_fp16",
        ),
        *("amx_int8", "amx_bf16"),
        *("asimd", "asimddp", "asimdhp", "i8mm", "bf16", "sve", "sve2"),
    }
)
"""Those for which the kernels of ONNX Runtime, torch and XNNPACK differ: of x86, its matrix units, and of ARM."""
INT8_DOT = frozenset({"avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm"})
"""Extensions that add products of int8 in 32 bits. Without one, they are added in 16 bits, which can overflow."""
HALF_ARITHMETIC = frozenset({"asimdhp", "avx512_fp16"})
CPUINFO = Path("/proc/cpuinfo")


def instruction_set(cpuinfo: str | None = None) -> InstructionSet:
    """Return the extensions of this host's CPU, sorted; of the first one that `cpuinfo` lists."""
    text = _read_cpuinfo() if cpuinfo is None else cpuinfo
    for line in text.splitlines():
        name, _, flags = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return tuple(sorted(EXTENSIONS & set(flags.split())))
    return ()


def has_int8_dot(extensions: Collection[str]) -> bool:
    """Tell whether int8 products are added without overflow, so that weights may use all 8 bits."""
    return bool(INT8_DOT & set(extensions))


def host_name() -> str:
    """Describe this machine."""
    lines = _read_cpuinfo().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} processors, {platform.system()}"


def _read_cpuinfo() -> str:
    try:
        return CPUINFO.read_text()
    except OSError:
        return ""
