"""The GPUs of an attempt: what its environment says of them, and which devices it may open."""

from __future__ import annotations

import re
from pathlib import Path

from falaj.drivers.machine import mps
from falaj.ports.launcher import WHOLE_GPU, Launch

MPS_DISABLED = "/nonexistent"
"""Where no daemon listens: CUDA would else look in /tmp, and share a card that a job has for itself."""

DRIVER_DEVICES = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset", "nvidia-caps")
MIB = 2**20


def is_fraction(launch: Launch) -> bool:
    """Whether it has a part of a card, rather than whole cards or slices."""
    return bool(launch.gpus) and launch.gpu_milli < WHOLE_GPU


def gpu_environment(launch: Launch) -> dict[str, str]:
    """What CUDA reads: the visible GPUs by their UUIDs, and the limits of each process that has a part of one.

    The processes of a job share its part, so that each may have that much less: a limit holds for one process.
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
        # By UUID: a number that the daemon counts otherwise would be no error, and no limit either.
        limits["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = f"{launch.gpus[0]}={max(1, each)}M"
    return cards | limits


def thread_percentage(milli: int, *, processes: int) -> str:
    """Of the card's multiprocessors, for each process."""
    return f"{max(0.1, milli / 10 / max(1, processes)):.4g}"


def gpu_devices(launch: Launch, *, root: Path = Path("/")) -> list[Path]:
    """The devices that CUDA needs: those of the driver, and of its own cards.

    Where the driver does not say which device a UUID belongs to (a slice's, say), all cards are shown, and CUDA
    chooses by the environment.
    """
    if not launch.gpus:
        return []
    numbers = [minor_number(root, uuid) for uuid in launch.gpus]
    cards = [root / f"dev/nvidia{number}" for number in numbers]
    if None in numbers:
        cards = sorted((root / "dev").glob("nvidia[0-9]*"))
    return [path for path in (*(root / "dev" / name for name in DRIVER_DEVICES), *cards) if path.exists()]


def gpu_folders(launch: Launch) -> list[Path]:
    """What else it must be able to read: where the MPS daemon listens, for a part of a card.

    To read is enough to reach the daemon, and keeps a job from shutting others out.
    """
    return [Path(launch.mps_directory)] if is_fraction(launch) else []


def check_gpus(launch: Launch) -> None:
    """Refuse what would not be kept: without its daemon, CUDA takes no notice of the limits of a part."""
    if not is_fraction(launch):
        return
    from falaj.errors import InvalidInput, Unavailable  # not for the shim: pydantic would slow every start

    if len(launch.gpus) != 1 or launch.gpu_milli < 1:
        raise InvalidInput.at(
            "gpu_milli", given=f"{launch.gpu_milli} of {len(launch.gpus)} GPUs", allowed="1 to 1000 of 1 GPU"
        )
    if not mps.is_running(Path(launch.mps_directory)):
        raise Unavailable(
            f"{launch.attempt} has a part of a GPU, and no MPS daemon answers in {launch.mps_directory}: start it"
            " with nvidia-cuda-mps-control -d, or set node.mps in falaj.toml to where it listens"
        )


def minor_number(root: Path, uuid: str) -> int | None:
    """The N of /dev/nvidiaN, as the driver tells it."""
    for told in (root / "proc/driver/nvidia/gpus").glob("*/information"):
        try:
            text = told.read_text(errors="replace")
        except OSError:
            continue
        minor = re.search(r"^Device Minor:\s*(\d+)", text, re.MULTILINE)
        if minor and re.search(rf"^GPU UUID:\s*{re.escape(uuid)}\s*$", text, re.MULTILINE):
            return int(minor[1])
    return None
