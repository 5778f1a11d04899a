"""MXNet: workers, parameter servers, and the scheduler that connects them."""

from __future__ import annotations

from collections.abc import Sequence

from falaj.drivers.processes.frameworks.process import (
    LOOPBACK,
    PlannedProcess,
    PortAllocator,
    rank_environment,
    rank_gpu_environment,
)
from falaj.drivers.processes.frameworks.torch import split_options
from falaj.ports.launcher import Launch


def processes(launch: Launch, ports: PortAllocator) -> Sequence[PlannedProcess]:
    """Return workers, servers and a scheduler. Without `roles`, all processes are workers, with one server. A process
    with the role of scheduler or server becomes one by importing mxnet."""
    (port,) = ports(1)
    workers, servers = launch.roles.get("worker", launch.processes), launch.roles.get("server", 1)
    shared = {
        "DMLC_PS_ROOT_URI": LOOPBACK,
        "DMLC_PS_ROOT_PORT": str(port),
        "DMLC_NUM_WORKER": str(workers),
        "DMLC_NUM_SERVER": str(servers),
    }
    python, *rest = launch.command
    serve = [python, *split_options(rest)[0], "-c", "import mxnet"]
    return [
        *(
            PlannedProcess(
                launch.command,
                f"worker {rank}",
                {
                    **shared,
                    **rank_environment(rank, of=workers),
                    **rank_gpu_environment(launch, rank, of=workers),
                    "DMLC_ROLE": "worker",
                },
            )
            for rank in range(workers)
        ),
        *(
            PlannedProcess(
                serve, f"server {index}", shared | helper_environment("server"), is_essential=False
            )
            for index in range(servers)
        ),
        PlannedProcess(serve, "scheduler", shared | helper_environment("scheduler"), is_essential=False),
    ]


def helper_environment(role: str) -> dict[str, str]:
    return {"DMLC_ROLE": role, "CUDA_VISIBLE_DEVICES": ""}


def defaults(launch: Launch) -> dict[str, str]:
    return {} if launch.network else {"DMLC_NODE_HOST": LOOPBACK, "DMLC_INTERFACE": "lo"}
