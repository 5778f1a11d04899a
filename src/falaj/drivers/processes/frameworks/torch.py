"""torchrun: one agent for all workers, or an agent per worker if some may be lost."""

from __future__ import annotations

from collections.abc import Sequence

from falaj.drivers.processes.frameworks.process import (
    LOOPBACK,
    PlannedProcess,
    PortAllocator,
    rank_gpu_environment,
)
from falaj.ports.launcher import Launch

SCRIPT_LATER = ("-c", "-m")
WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")

RENDEZVOUS_FILE = ".falaj-rendezvous"
"""In the attempt's directory. A file store outlives every agent; a TCP store would end with its host."""

RENDEZVOUS_OPTIONS = "store_type=file,last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=2"
"""A lost agent is detected after two seconds. With the defaults of torchrun, it takes 50 s to continue."""


def processes(launch: Launch, ports: PortAllocator) -> Sequence[PlannedProcess]:
    if is_elastic(launch):
        return elastic_agents(launch)
    # Like --standalone, but by address: that option resolves "localhost", which may fail.
    rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint={LOOPBACK}:0", f"--local-addr={LOOPBACK}"]
    options = ["--nnodes=1", f"--nproc-per-node={launch.processes}", *rendezvous]
    return [PlannedProcess(torchrun(launch.command, options))]


def is_elastic(launch: Launch) -> bool:
    least = launch.processes_min
    return launch.framework == "torch" and least is not None and least < launch.processes


def elastic_agents(launch: Launch) -> list[PlannedProcess]:
    """Return an agent with one worker per process: at least `processes_min` of them continue."""
    least, most = launch.processes_min or launch.processes, launch.processes
    options = [
        f"--nnodes={least}:{most}",
        "--nproc-per-node=1",
        f"--max-restarts={most - least}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={launch.directory.absolute() / RENDEZVOUS_FILE}",
        f"--rdzv-conf={RENDEZVOUS_OPTIONS}",
        "--rdzv-id=falaj",
        f"--local-addr={LOOPBACK}",
    ]
    command = torchrun(launch.command, options)
    return [
        PlannedProcess(command, f"agent {number}", rank_gpu_environment(launch, number, of=most))
        for number in range(most)
    ]


def torchrun(command: Sequence[str], options: Sequence[str]) -> list[str]:
    """Return the command that runs `python [options] script …` or `python -m module …` by torchrun."""
    python, *rest = command
    own, rest = split_options(rest)
    agent = [python, *own, "-m", "torch.distributed.run", *options]
    if rest and rest[0] == "-m":
        return [*agent, "--module", *rest[1:]]
    return [*agent, *rest]


def split_options(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return Python's own options, and the script or `-m module` with its arguments."""
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] not in SCRIPT_LATER:
        at += 2 if words[at] in WITH_VALUE else 1
    return list(words[:at]), list(words[at:])


def defaults(launch: Launch) -> dict[str, str]:
    # Sharing the rendezvous store with the workers costs a second restart for each killed worker.
    decided = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    if not launch.network:
        decided |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    return decided
