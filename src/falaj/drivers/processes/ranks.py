"""Works out what to run: the command and the environment of each rank. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from falaj.ports.launcher import Launch

SCRIPT_LATER = ("-c", "-m")
WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")


def plan_ranks(launch: Launch) -> list[dict[str, Any]]:
    """For each process to start: its command, and the variables that it has alone."""
    if launch.framework == "torch":
        return [{"command": torchrun(launch.command, processes=launch.processes), "environment": {}}]
    if launch.processes == 1:
        return [{"command": list(launch.command), "environment": {}}]
    world = str(launch.processes)
    return [
        {
            "command": list(launch.command),
            "environment": {"FALAJ_RANK": str(rank), "FALAJ_WORLD_SIZE": world},
        }
        for rank in range(launch.processes)
    ]


def torchrun(command: Sequence[str], *, processes: int) -> list[str]:
    """`python [options] script …` or `python -m module …`, run by torchrun as `processes` workers.

    This is --standalone, by address: that option looks up "localhost", which need not have an address.
    """
    python, *rest = command
    options, rest = split_options(rest)
    rendezvous = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    agent = ["-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={processes}", *rendezvous]
    if rest and rest[0] == "-m":
        return [python, *options, *agent, "--module", *rest[1:]]
    return [python, *options, *agent, *rest]


def split_options(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Python's own options, and the script or `-m module` with what follows."""
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] not in SCRIPT_LATER:
        at += 2 if words[at] in WITH_VALUE else 1
    return list(words[:at]), list(words[at:])


def environment(launch: Launch) -> dict[str, str]:
    """The whole environment that the ranks share; what the launch sets wins, but for the GPUs."""
    threads = max(1, launch.cpus // max(1, launch.processes))
    decided = {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
    if launch.framework == "torch" and not launch.network:
        decided |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    # In the order of the bus, CUDA's numbers are NVML's, which the scheduler counts by.
    gpus = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, launch.gpus)), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    return decided | dict(launch.environment) | gpus
