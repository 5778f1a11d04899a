"""This machine as a node: told from recorded files and a recorded NVML, and once from the machine itself."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from falaj.drivers.machine.hardware import ThisMachine, node_name
from falaj.drivers.machine.nvml import find_gpus
from falaj.ports.hardware import Hardware
from falaj.records.residency import Zone
from falaj.records.scheduling import Gpu
from falaj.scheduling import node_from

GIB = 2**30
SAPPHIRE_RAPIDS = """\
processor\t: 0
model name\t: Intel(R) Xeon(R) Platinum 8480C
flags\t\t: fpu vme sse2 avx avx2 avx512f avx512_vnni amx_bf16 amx_tile amx_int8
"""


class NVMLError(Exception):
    pass


class RecordedNvml:
    """The part of pynvml that is used, answering from a recorded list of cards."""

    NVMLError = NVMLError
    NVML_DEVICE_MIG_ENABLE = 1

    def __init__(self, *cards: dict[str, Any], fault: str = "") -> None:
        self.cards = cards
        self.fault = fault
        self.sessions = 0

    def nvmlInit(self) -> None:  # noqa: N802
        if self.fault:
            raise NVMLError(self.fault)
        self.sessions += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.sessions -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> dict[str, Any]:  # noqa: N802
        if "lost" in self.cards[index]:
            raise NVMLError("GPU is lost")
        return self.cards[index]

    def nvmlDeviceGetMigMode(self, card: dict[str, Any]) -> list[int]:  # noqa: N802
        if "mig" not in card:
            raise NVMLError("Not Supported")
        return [card["mig"], card["mig"]]

    def nvmlDeviceGetUUID(self, card: dict[str, Any]) -> str | bytes:  # noqa: N802
        return card["uuid"]  # type: ignore[no-any-return]

    def nvmlDeviceGetName(self, card: dict[str, Any]) -> str | bytes:  # noqa: N802
        return card["name"]  # type: ignore[no-any-return]

    def nvmlDeviceGetMemoryInfo(self, card: dict[str, Any]) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(total=card["memory"])


# As NVML 13 told it of a real card, but for the UUID; the T4 as older releases tell it, in bytes.
H200 = {"uuid": "GPU-5d0c", "name": "NVIDIA H200", "memory": 150_754_820_096, "mig": 0}
T4 = {"uuid": b"GPU-77aa", "name": b"Tesla T4", "memory": 15 * GIB}


def recorded(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def machine(root: Path, *, cpus: int = 16, **files: str) -> ThisMachine:
    given = {name.replace("__", "/").replace("_max", ".max"): text for name, text in files.items()}
    base = {"proc/meminfo": f"MemTotal:   {64 * 2**20} kB\n", "proc/cpuinfo": SAPPHIRE_RAPIDS}
    where = recorded(root, base | given)
    return ThisMachine(root=where, name="box", usable_cpus=cpus, gpus=lambda: ((), "none here"))


# ------------------------------------------------------------------------------------------ CPUs and memory


def test_a_machine_without_limits(tmp_path: Path) -> None:
    (facts,) = machine(tmp_path).nodes()

    assert (facts.name, facts.cpus, facts.memory_bytes) == ("box", 16, 64 * GIB)
    assert facts.cpu_model == "Intel(R) Xeon(R) Platinum 8480C"
    assert facts.isa == {"avx2", "avx512", "vnni", "amx"}
    assert facts.gpu_fault == "none here"


def test_a_container_offers_what_its_cgroup_allows(tmp_path: Path) -> None:
    limited = machine(
        tmp_path,
        proc__self__cgroup="0::/\n",
        sys__fs__cgroup__cpu_max="250000 100000\n",
        sys__fs__cgroup__memory_max=f"{8 * GIB}\n",
    )

    (facts,) = limited.nodes()

    assert (facts.cpus, facts.memory_bytes) == (2, 8 * GIB)


def test_a_limit_on_a_group_above_binds_too(tmp_path: Path) -> None:
    limited = machine(
        tmp_path,
        proc__self__cgroup="0::/slice/falaj\n",
        sys__fs__cgroup__slice__cpu_max="400000 100000\n",
        sys__fs__cgroup__slice__falaj__cpu_max="max 100000\n",
        sys__fs__cgroup__slice__falaj__memory_max="max\n",
    )

    (facts,) = limited.nodes()

    assert (facts.cpus, facts.memory_bytes) == (4, 64 * GIB)


def test_a_share_of_one_cpu_is_still_a_cpu(tmp_path: Path) -> None:
    (facts,) = machine(tmp_path, sys__fs__cgroup__cpu_max="50000 100000\n").nodes()

    assert facts.cpus == 1


def test_affinity_binds_below_the_cgroup(tmp_path: Path) -> None:
    (facts,) = machine(tmp_path, cpus=2, sys__fs__cgroup__cpu_max="800000 100000\n").nodes()

    assert facts.cpus == 2


def test_this_very_machine() -> None:
    hardware: Hardware = ThisMachine()

    (facts,) = hardware.nodes()
    node = node_from(facts, zone=Zone(name="local", jurisdiction="AE"))

    assert node.cpus >= 1
    assert node.memory_bytes > 2**28
    assert node.jurisdiction == "AE"
    assert node.gpus or facts.gpu_fault


@pytest.mark.parametrize(
    ("host", "name"),
    [("DGX-01.corp.ae", "dgx-01-corp-ae"), ("my_laptop", "my-laptop"), ("", "this-machine")],
)
def test_a_host_name_becomes_a_name(host: str, name: str) -> None:
    assert node_name(host) == name


# ------------------------------------------------------------------------------------------------- GPUs


def test_gpus_are_listed_in_order_and_the_session_is_closed() -> None:
    nvml = RecordedNvml(H200, T4)

    gpus, fault = find_gpus(lambda: nvml)

    assert gpus == (
        Gpu(id="GPU-5d0c", model="NVIDIA H200", memory_bytes=150_754_820_096),
        Gpu(id="GPU-77aa", model="Tesla T4", memory_bytes=15 * GIB),
    )
    assert fault == ""
    assert nvml.sessions == 0


def test_a_sliced_or_lost_gpu_is_left_out_with_the_reason() -> None:
    gpus, fault = find_gpus(lambda: RecordedNvml({**H200, "mig": 1}, {"lost": True}, T4))

    assert [gpu.model for gpu in gpus] == ["Tesla T4"]
    assert fault == "GPU 0 is in MIG mode; GPU 1: GPU is lost"


def test_no_driver_means_no_gpus_and_the_reason() -> None:
    assert find_gpus(lambda: RecordedNvml(fault="NVML Shared Library Not Found")) == (
        (),
        "NVML does not answer: NVML Shared Library Not Found",
    )


def test_no_library_means_no_gpus_and_the_reason() -> None:
    def absent() -> Any:
        raise ModuleNotFoundError("No module named 'pynvml'")

    assert find_gpus(absent) == ((), "nvidia-ml-py is not installed")
