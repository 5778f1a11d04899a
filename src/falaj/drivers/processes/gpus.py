"""The GPUs of an attempt: its environment variables and the devices that it may open."""

from __future__ import annotations

import re
from pathlib import Path

from falaj.drivers.machine import mps
from falaj.ports.launcher import WHOLE_GPU, Launch

MPS_DISABLED = "/nonexistent"
"""A directory without MPS daemon: by default CUDA looks in /tmp, and would share a card that a job has to itself."""

DRIVER_DEVICES = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset", "nvidia-caps")
MIB = 2**20


def is_fraction(launch: Launch) -> bool:
    """Return whether the launch has a fraction of a card, not whole cards or MIG slices."""
    return bool(launch.gpus) and launch.gpu_milli < WHOLE_GPU


def gpu_environment(launch: Launch) -> dict[str, str]:
    """Return the variables of CUDA: the visible GPUs by UUID, and the MPS limits of each process for a fraction.

    MPS limits hold per process, so that the fraction of the job is divided among its processes.
    """
    cards = {"CUDA_VISIBLE_DEVICES": ",".join(launch.gpus), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    if not launch.gpus:
        return cards
    if not is_fraction(launch):
        return cards | {"CUDA_MPS_PIPE_DIRECTORY": MPS_DISABLED}
    limits = {
        "CUDA_MPS_PIPE_DIRECTORY": launch.mps_directory,
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": thread_percentage(launch.gpu_milli, processes=launch.processes),
    }
    if launch.gpu_memory_bytes:
        each = launch.gpu_memory_bytes // max(1, launch.processes) // MIB
        # By UUID: with an index that the daemon counts differently there would be no error, and no limit.
        limits["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = f"{launch.gpus[0]}={max(1, each)}M"
    return cards | limits


def thread_percentage(milli: int, *, processes: int) -> str:
    """Return the share of the card's multiprocessors for each process, in percent."""
    return f"{max(0.1, milli / 10 / max(1, processes)):.4g}"


def gpu_devices(launch: Launch, *, root: Path = Path("/")) -> list[Path]:
    """Return the device files that CUDA needs: those of the driver and of the launch's cards.

    If the driver does not map a UUID to a device (for example of a MIG slice), all cards are included, and CUDA selects
    by the environment.
    """
    if not launch.gpus:
        return []
    numbers = [minor_number(root, uuid) for uuid in launch.gpus]
    if None in numbers:
        return machine_devices(root)
    cards = [root / f"dev/nvidia{number}" for number in numbers]
    return [path for path in (*(root / "dev" / name for name in DRIVER_DEVICES), *cards) if path.exists()]


def machine_devices(root: Path = Path("/")) -> list[Path]:
    """Return the device files of the driver and of all cards; none without a card."""
    cards = sorted((root / "dev").glob("nvidia[0-9]*"))
    driver = [root / "dev" / name for name in DRIVER_DEVICES] if cards else []
    return [path for path in (*driver, *cards) if path.exists()]


def gpu_folders(launch: Launch) -> list[Path]:
    """Return further folders that it must be able to read: the directory of the MPS daemon, for a fraction of a card.

    Read access is enough to reach the daemon, and prevents a job from shutting others out.
    """
    return [Path(launch.mps_directory)] if is_fraction(launch) else []


def check_gpus(launch: Launch) -> None:
    """Raise if the limits of a fraction could not be enforced: without its MPS daemon, CUDA ignores them."""
    if not is_fraction(launch):
        return
    from falaj.errors import (
        InvalidInput,
        Unavailable,
    )  # loads pydantic, which would delay every start of a supervisor

    if len(launch.gpus) != 1 or launch.gpu_milli < 1:
        raise InvalidInput.at(
            "gpu_milli", given=f"{launch.gpu_milli} of {len(launch.gpus)} GPUs", allowed="1 to 1000 of 1 GPU"
        )
    if not mps.is_running(Path(launch.mps_directory)):
        raise Unavailable(
            f"{launch.attempt} has a fraction of a GPU, and no MPS daemon is running in {launch.mps_directory}:"
            " start it with nvidia-cuda-mps-control -d, or set node.mps in falaj.toml to where it listens"
        )


def minor_number(root: Path, uuid: str) -> int | None:
    """Return the N of /dev/nvidiaN; none if the driver does not list the UUID."""
    for path in (root / "proc/driver/nvidia/gpus").glob("*/information"):
        try:
            text = path.read_text(errors="replace")
        except OSError:
            continue
        minor = re.search(r"^Device Minor:\s*(\d+)", text, re.MULTILINE)
        if minor and re.search(rf"^GPU UUID:\s*{re.escape(uuid)}\s*$", text, re.MULTILINE):
            return int(minor[1])
    return None
