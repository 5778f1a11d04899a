"""TensorFlow: TF_CONFIG with the cluster and the task of each process."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from falaj.drivers.processes.frameworks.process import (
    PlannedProcess,
    PortAllocator,
    own_ranks,
    rank_addresses,
    rank_environment,
    rank_gpu_environment,
    rank_ports,
    world_size,
)
from falaj.ports.launcher import Launch

ROLES = ("chief", "worker", "ps")


def processes(launch: Launch, ports: PortAllocator) -> Sequence[PlannedProcess]:
    """Return workers, or the processes of `roles`, which are spread over the machines in that order. Parameter servers
    and their workers run until they are killed."""
    asked = {role: launch.roles[role] for role in ROLES if launch.roles.get(role)}
    roles = asked or {"worker": world_size(launch)}
    chosen = iter(rank_addresses(launch, rank_ports(launch, ports)))
    cluster = {role: [next(chosen) for _ in range(count)] for role, count in roles.items()}
    tasks = [(role, index) for role, count in roles.items() for index in range(count)]
    own = own_ranks(launch)
    gpus = gpu_environments(launch, [tasks[rank] for rank in own], has_servers="ps" in roles)
    return [
        PlannedProcess(
            launch.command,
            f"{role} {index}",
            {
                **rank_environment(launch, rank),
                **gpus[place],
                "TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": role, "index": index}}),
            },
            is_essential=role in essential_roles(roles),
        )
        for place, rank in enumerate(own)
        for role, index in [tasks[rank]]
    ]


def essential_roles(roles: Mapping[str, int]) -> tuple[str, ...]:
    """Return the essential roles: with parameter servers, only the chief knows when training is done."""
    if "ps" not in roles:
        return ("chief", "worker")
    return ("chief",) if "chief" in roles else ("worker",)


def gpu_environments(
    launch: Launch, tasks: Sequence[tuple[str, int]], *, has_servers: bool
) -> list[dict[str, str]]:
    """Return the GPUs of each task here: divided among all tasks, or with parameter servers among the workers."""
    computing = [task for task in tasks if task[0] == "worker" or not has_servers]
    return [
        rank_gpu_environment(launch, computing.index(task), of=len(computing))
        if task in computing
        else {"CUDA_VISIBLE_DEVICES": ""}
        for task in tasks
    ]


def defaults(launch: Launch) -> dict[str, str]:
    return {"TF_CPP_MIN_LOG_LEVEL": "1", "GRPC_VERBOSITY": "ERROR"}
