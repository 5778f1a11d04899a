"""MXNet: workers, parameter servers, and the scheduler that connects them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from falaj.drivers.processes.frameworks.process import (
    PlannedProcess,
    PortAllocator,
    is_first_node,
    own_host,
    own_ranks,
    rank_environment,
    rank_gpu_environment,
    rendezvous,
    world_size,
)
from falaj.drivers.processes.frameworks.torch import split_options
from falaj.ports.launcher import Launch


def processes(launch: Launch, ports: PortAllocator) -> Sequence[PlannedProcess]:
    """Return workers, servers and a scheduler. Without `roles`, all processes are workers, with one server. A process
    with the role of scheduler or server becomes one by importing mxnet."""
    host, port = rendezvous(launch, ports)
    workers, servers = launch.roles.get("worker", world_size(launch)), launch.roles.get("server", 1)
    shared = {
        "DMLC_PS_ROOT_URI": host,
        "DMLC_PS_ROOT_PORT": str(port),
        "DMLC_NUM_WORKER": str(workers),
        "DMLC_NUM_SERVER": str(servers),
    }
    own = own_ranks(launch)
    computing = [rank for rank in own if rank < workers]
    planned = [
        PlannedProcess(
            launch.command,
            f"worker {rank}",
            {
                **shared,
                **rank_environment(launch, rank),
                "FALAJ_WORLD_SIZE": str(workers),
                **rank_gpu_environment(launch, place, of=len(computing)),
                "DMLC_ROLE": "worker",
            },
        )
        for place, rank in enumerate(computing)
    ]
    serving = [rank - workers for rank in own if rank >= workers]
    planned += [helper(launch, "server", f"server {index}", shared) for index in serving]
    if is_first_node(launch):
        planned += [] if launch.roles else [helper(launch, "server", "server 0", shared)]
        planned.append(helper(launch, "scheduler", "scheduler", shared))
    return planned


def helper(launch: Launch, role: str, name: str, shared: Mapping[str, str]) -> PlannedProcess:
    python, *rest = launch.command
    command = [python, *split_options(rest)[0], "-c", "import mxnet"]
    own = {"DMLC_ROLE": role, "CUDA_VISIBLE_DEVICES": ""}
    return PlannedProcess(command, name, {**shared, **own}, is_essential=False)


def defaults(launch: Launch) -> dict[str, str]:
    if launch.peers:
        return {"DMLC_NODE_HOST": own_host(launch)}
    return {} if launch.network else {"DMLC_NODE_HOST": own_host(launch), "DMLC_INTERFACE": "lo"}
