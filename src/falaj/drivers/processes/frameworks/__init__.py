"""Launch contracts: what each framework wants to be started as. Pure: from a launch to its processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from falaj.drivers.processes.frameworks import (
    horovod,
    jax,
    lightgbm,
    mpi,
    mxnet,
    plain,
    tensorflow,
    torch,
    xgboost,
)
from falaj.drivers.processes.frameworks.process import PlannedProcess, PortAllocator
from falaj.ports.launcher import Launch

if TYPE_CHECKING:  # records take pydantic, for which every start of an attempt would wait
    from falaj.records.training.jobs import Framework

__all__ = ["defaults_of", "name_of", "plan", "tolerated_losses"]


@dataclass(frozen=True)
class LaunchContract:
    """`defaults` are variables that the job may set otherwise."""

    processes: Callable[[Launch, PortAllocator], Sequence[PlannedProcess]]
    defaults: Callable[[Launch], dict[str, str]] = lambda _: {}


CONTRACTS: dict[Framework, LaunchContract] = {
    "plain": LaunchContract(plain.processes),
    "torch": LaunchContract(torch.processes, torch.defaults),
    "tensorflow": LaunchContract(tensorflow.processes, tensorflow.defaults),
    "jax": LaunchContract(jax.processes, jax.defaults),
    "mpi": LaunchContract(mpi.processes, mpi.defaults),
    "horovod": LaunchContract(horovod.processes, horovod.defaults),
    "xgboost": LaunchContract(xgboost.processes),
    "lightgbm": LaunchContract(lightgbm.processes),
    "mxnet": LaunchContract(mxnet.processes, mxnet.defaults),
}


def plan_processes(launch: Launch, ports: PortAllocator) -> Sequence[PlannedProcess]:
    return CONTRACTS[launch.framework].processes(launch, ports)


def default_environment(launch: Launch) -> dict[str, str]:
    return CONTRACTS[launch.framework].defaults(launch)


def tolerated_losses(launch: Launch) -> int:
    """How many of the processes may be lost while the others go on."""
    return launch.processes - launch.processes_min if torch.is_elastic(launch) and launch.processes_min else 0


def process_name(launch: Launch, rank: int) -> str:
    """What people call a process of the plan; empty for one that starts the ranks itself."""
    planned = plan_processes(launch, lambda count: [0] * count)
    return planned[rank].name if rank < len(planned) else f"rank {rank}"
