"""Workers of MXNet with their parameter servers, and the scheduler that introduces them to each other."""

from __future__ import annotations

from collections.abc import Sequence

from falaj.drivers.processes.frameworks.process import LOOPBACK, Ports, Process, numbered, share_of_gpus
from falaj.drivers.processes.frameworks.torch import split_options
from falaj.ports.launcher import Launch


def processes(launch: Launch, ports: Ports) -> Sequence[Process]:
    """Without `roles`, all processes are workers, and one server runs beside them. Whoever imports mxnet as a
    scheduler or a server becomes one."""
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
            Process(
                launch.command,
                f"worker {rank}",
                {
                    **shared,
                    **numbered(rank, of=workers),
                    **share_of_gpus(launch, rank, of=workers),
                    "DMLC_ROLE": "worker",
                },
            )
            for rank in range(workers)
        ),
        *(
            Process(serve, f"server {index}", shared | beside("server"), decides=False)
            for index in range(servers)
        ),
        Process(serve, "scheduler", shared | beside("scheduler"), decides=False),
    ]


def beside(role: str) -> dict[str, str]:
    return {"DMLC_ROLE": role, "CUDA_VISIBLE_DEVICES": ""}


def defaults(launch: Launch) -> dict[str, str]:
    return {} if launch.network else {"DMLC_NODE_HOST": LOOPBACK, "DMLC_INTERFACE": "lo"}
