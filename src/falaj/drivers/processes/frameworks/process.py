"""One process of an attempt as a launch contract plans it, and where the processes of several machines meet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from falaj.ports.launcher import Launch

LOOPBACK = "127.0.0.1"

RENDEZVOUS_PORT = 20_000
"""Where the processes of several machines meet, on the first of them. It is fixed: they could not ask each other."""
FIRST_PORT = RENDEZVOUS_PORT + 1
"""Rank 0 of several machines listens here, if its framework wants an address of each rank, and rank N at N ports more.
No two ranks have the same, also if they share an address. The last one is below the ports that systems hand out."""

PortAllocator = Callable[[int], Sequence[int]]
"""Returns the given number of free ports."""


@dataclass(frozen=True)
class PlannedProcess:
    """A command and its own variables.

    `name` is shown to people ("rank 1", "ps 0"); it is empty for a launcher that starts the ranks itself. The attempt
    ends when all essential processes have ended; the others are killed then, and their exit status does not matter.
    """

    command: Sequence[str]
    name: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    is_essential: bool = True


def world_size(launch: Launch) -> int:
    """Return the processes on all machines."""
    return launch.processes * max(1, len(launch.peers))


def own_ranks(launch: Launch) -> range:
    """Return the ranks that run here."""
    first = launch.node_rank * launch.processes
    return range(first, first + launch.processes)


def own_host(launch: Launch) -> str:
    """Return the address at which the processes of this launch are reached."""
    return launch.peers[launch.node_rank] if launch.peers else LOOPBACK


def is_first_node(launch: Launch) -> bool:
    return launch.node_rank == 0


def rendezvous(launch: Launch, ports: PortAllocator) -> tuple[str, int]:
    """Return host and port where the processes meet: on the first machine, or on a free port of the only one."""
    if launch.peers:
        return launch.peers[0], RENDEZVOUS_PORT
    (port,) = ports(1)
    return LOOPBACK, port


def rank_ports(launch: Launch, ports: PortAllocator) -> Sequence[int]:
    """Return a port for each rank of all machines."""
    size = world_size(launch)
    return range(FIRST_PORT, FIRST_PORT + size) if launch.peers else ports(size)


def rank_addresses(launch: Launch, ports: Sequence[int]) -> list[str]:
    """Return host and port of each rank of all machines."""
    hosts = [host for host in launch.peers or (LOOPBACK,) for _ in range(launch.processes)]
    return [address(host, port) for host, port in zip(hosts, ports, strict=True)]


def address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def rank_environment(launch: Launch, rank: int) -> dict[str, str]:
    """Return the variables of Falaj for one rank."""
    return {
        "FALAJ_RANK": str(rank),
        "FALAJ_WORLD_SIZE": str(world_size(launch)),
        "FALAJ_NODE_RANK": str(launch.node_rank),
        "FALAJ_LOCAL_RANK": str(rank - own_ranks(launch).start),
    }


def rank_gpu_environment(launch: Launch, place: int, *, of: int) -> dict[str, str]:
    """Return the GPUs of one of the processes that run here; empty if they do not divide evenly: every process sees
    all of them then."""
    each, rest = divmod(len(launch.gpus), of)
    if each == 0 or rest:
        return {}
    own = launch.gpus[place * each : (place + 1) * each]
    return {"CUDA_VISIBLE_DEVICES": ",".join(own)}


def copies(
    launch: Launch, shared: Mapping[str, str], own: Callable[[int], Mapping[str, str]]
) -> list[PlannedProcess]:
    """Return the command once for each rank that runs here, with `shared` variables and those of its rank."""
    return [
        PlannedProcess(
            launch.command,
            f"rank {rank}",
            {
                **shared,
                **rank_environment(launch, rank),
                **rank_gpu_environment(launch, place, of=launch.processes),
                **own(rank),
            },
        )
        for place, rank in enumerate(own_ranks(launch))
    ]
