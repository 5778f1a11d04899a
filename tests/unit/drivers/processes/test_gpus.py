"""The GPU environment and devices of an attempt, and when a fraction of a GPU is refused."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from falaj.drivers.machine import mps
from falaj.drivers.processes.gpus import check_gpus, gpu_devices, gpu_environment, gpu_folders
from falaj.errors import InvalidInput, Unavailable
from falaj.ports.launcher import Launch

GIB = 2**30
LAUNCH = Launch("job_1/1", Path("/jobs/1"), ["python", "script.py"])
WHOLE = replace(LAUNCH, gpus=("GPU-aa", "GPU-bb"))
PART = replace(LAUNCH, gpus=("GPU-aa",), gpu_milli=300, gpu_memory_bytes=20 * GIB)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Path]:
    """Yield a folder with a socket for packets, like that of the MPS daemon."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / "control"))
        listener.listen()
        yield tmp_path


def test_no_gpu_is_visible_to_a_job_that_has_none() -> None:
    assert gpu_environment(LAUNCH) == {"CUDA_VISIBLE_DEVICES": "", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert gpu_devices(LAUNCH) == []


def test_whole_gpus_are_named_by_uuid_and_kept_out_of_mps() -> None:
    environment = gpu_environment(WHOLE)

    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-aa,GPU-bb"
    assert not Path(environment["CUDA_MPS_PIPE_DIRECTORY"]).exists()
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in environment
    assert gpu_folders(WHOLE) == []


def test_a_mig_slice_is_named_like_a_gpu() -> None:
    assert gpu_environment(replace(LAUNCH, gpus=("MIG-cc",)))["CUDA_VISIBLE_DEVICES"] == "MIG-cc"


def test_a_gpu_fraction_is_limited_by_mps() -> None:
    environment = gpu_environment(replace(PART, mps_directory="/run/mps"))

    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-aa"
    assert environment["CUDA_MPS_PIPE_DIRECTORY"] == "/run/mps"
    assert environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "30"
    assert environment["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "GPU-aa=20480M"
    assert gpu_folders(replace(PART, mps_directory="/run/mps")) == [Path("/run/mps")]


def test_the_processes_of_a_job_share_its_gpu_fraction() -> None:
    environment = gpu_environment(replace(PART, processes=4))

    assert environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "7.5"
    assert environment["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "GPU-aa=5120M"


def test_a_fraction_without_a_memory_limit_sets_none() -> None:
    assert "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT" not in gpu_environment(replace(PART, gpu_memory_bytes=0))


# ---------------------------------------------------------------------------------------------------- devices


def driver(root: Path) -> Path:
    """Three GPUs, whose devices are not numbered in the order of the bus."""
    for address, uuid, minor in [("1b", "GPU-aa", 2), ("43", "GPU-bb", 0), ("52", "GPU-cc", 1)]:
        folder = root / f"proc/driver/nvidia/gpus/0000:{address}:00.0"
        folder.mkdir(parents=True)
        text = f"Model: \t\t NVIDIA H200\nGPU UUID: \t {uuid}\nDevice Minor: \t {minor}\n"
        (folder / "information").write_text(text)
    (root / "dev/nvidia-caps").mkdir(parents=True)
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (root / "dev" / name).touch()
    return root


def names(launch: Launch, root: Path) -> set[str]:
    return {path.name for path in gpu_devices(launch, root=root)}


def test_a_job_sees_the_devices_of_its_own_gpus_only(tmp_path: Path) -> None:
    shared = {"nvidiactl", "nvidia-uvm", "nvidia-caps"}

    assert names(WHOLE, driver(tmp_path)) == shared | {"nvidia2", "nvidia0"}


def test_a_mig_slice_of_an_unknown_gpu_sees_all_gpus(tmp_path: Path) -> None:
    cards = {"nvidia0", "nvidia1", "nvidia2"}

    assert names(replace(LAUNCH, gpus=("MIG-aa",)), driver(tmp_path)) >= cards


# ------------------------------------------------------------------------------------------------- the daemon


def test_a_running_daemon_is_found(daemon: Path) -> None:
    assert mps.is_running(daemon)


def test_missing_or_stale_mps_socket_means_no_daemon(tmp_path: Path) -> None:
    assert not mps.is_running(tmp_path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / "control"))
        listener.listen()

    assert not mps.is_running(tmp_path)


def test_gpu_fraction_without_mps_daemon_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="no MPS daemon is running"):
        check_gpus(replace(PART, mps_directory=str(tmp_path)))


def test_whole_gpus_need_no_mps_daemon(tmp_path: Path) -> None:
    check_gpus(replace(WHOLE, mps_directory=str(tmp_path)))


def test_fractions_are_of_one_gpu(daemon: Path) -> None:
    check_gpus(replace(PART, mps_directory=str(daemon)))
    with pytest.raises(InvalidInput, match="gpu_milli"):
        check_gpus(replace(PART, gpus=("GPU-aa", "GPU-bb"), mps_directory=str(daemon)))
