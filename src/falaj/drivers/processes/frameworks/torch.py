"""torchrun: one agent for all workers of a machine, or an agent per worker if some may be lost."""

from __future__ import annotations

from collections.abc import Sequence

from falaj.drivers.processes.frameworks.process import (
    RENDEZVOUS_PORT,
    PlannedProcess,
    PortAllocator,
    address,
    is_first_node,
    own_host,
    own_ranks,
    rank_gpu_environment,
)
from falaj.ports.launcher import Launch

SCRIPT_LATER = ("-c", "-m")
WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")

RENDEZVOUS_FILE = ".falaj-rendezvous"
"""In the attempt's directory. A file store outlives every agent; a TCP store would end with its host."""

LOSS_DETECTION = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=2"
"""A lost agent is detected after two seconds. With the defaults of torchrun, it takes 50 s to continue."""

STORE = """
import signal, sys
from torch.distributed import TCPStore
store = TCPStore(sys.argv[1], int(sys.argv[2]), is_master=True, wait_for_workers=False)
signal.pause()
"""
"""The store of the agents of several machines: a process of its own, so that it outlives every agent."""

JOIN_TIMEOUT_S = 600
"""How long agents wait for a machine that starts later than theirs."""


def processes(launch: Launch, ports: PortAllocator) -> Sequence[PlannedProcess]:
    if is_elastic(launch):
        return elastic_agents(launch)
    if launch.peers:
        # Ranks follow the numbers of the machines; the backend c10d would number them by their addresses.
        rendezvous = [
            f"--node-rank={launch.node_rank}",
            "--rdzv-backend=static",
            f"--rdzv-endpoint={address(launch.peers[0], RENDEZVOUS_PORT)}",
            f"--rdzv-conf=timeout={JOIN_TIMEOUT_S}",
        ]
    else:
        # Like --standalone, but by address: that option resolves "localhost", which may fail.
        rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint={address(own_host(launch), 0)}"]
    options = [f"--nnodes={max(1, len(launch.peers))}", f"--nproc-per-node={launch.processes}", *rendezvous]
    return [PlannedProcess(torchrun(launch.command, [*options, f"--local-addr={own_host(launch)}"]))]


def is_elastic(launch: Launch) -> bool:
    least = launch.processes_min
    return launch.framework == "torch" and least is not None and least < launch.processes


def elastic_agents(launch: Launch) -> list[PlannedProcess]:
    """Return an agent with one worker per process: at least `processes_min` of each machine continue."""
    nodes, each = max(1, len(launch.peers)), launch.processes
    least, most = nodes * (launch.processes_min or each), nodes * each
    options = [
        f"--nnodes={least}:{most}",
        "--nproc-per-node=1",
        f"--max-restarts={most - least}",
        "--rdzv-backend=c10d",
        *elastic_rendezvous(launch),
        "--rdzv-id=falaj",
        f"--local-addr={own_host(launch)}",
    ]
    command = torchrun(launch.command, options)
    agents = [
        PlannedProcess(command, f"agent {number}", rank_gpu_environment(launch, place, of=each))
        for place, number in enumerate(own_ranks(launch))
    ]
    return [*agents, store(launch)] if launch.peers and is_first_node(launch) else agents


def elastic_rendezvous(launch: Launch) -> list[str]:
    """Return the options that name the store: a file on one machine, a process of the first of several."""
    if not launch.peers:
        file = launch.directory.absolute() / RENDEZVOUS_FILE
        return [f"--rdzv-endpoint={file}", f"--rdzv-conf=store_type=file,{LOSS_DETECTION}"]
    settings = f"is_host=false,read_timeout={JOIN_TIMEOUT_S},{LOSS_DETECTION}"
    return [
        f"--rdzv-endpoint={address(launch.peers[0], RENDEZVOUS_PORT)}",
        f"--rdzv-conf={settings}",
    ]


def store(launch: Launch) -> PlannedProcess:
    python, *rest = launch.command
    command = [python, *split_options(rest)[0], "-c", STORE, launch.peers[0], str(RENDEZVOUS_PORT)]
    return PlannedProcess(command, "rendezvous", {"CUDA_VISIBLE_DEVICES": ""}, is_essential=False)


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
    if not launch.network and not launch.peers:
        decided |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    return decided
