"""Machines of LightGBM: one address for each rank. It reads no variables: the script hands them on as parameters."""

from __future__ import annotations

from collections.abc import Sequence

from falaj.drivers.processes.frameworks.process import Ports, Process, addresses, numbered, share_of_gpus
from falaj.ports.launcher import Launch


def processes(launch: Launch, ports: Ports) -> Sequence[Process]:
    count = launch.processes
    chosen = ports(count)
    shared = {
        "LIGHTGBM_MACHINES": ",".join(addresses(chosen)),
        "LIGHTGBM_NUM_MACHINES": str(count),
    }
    return [
        Process(
            launch.command,
            f"rank {rank}",
            {
                **shared,
                **numbered(rank, of=count),
                **share_of_gpus(launch, rank, of=count),
                "LIGHTGBM_LOCAL_LISTEN_PORT": str(port),
            },
        )
        for rank, port in enumerate(chosen)
    ]
