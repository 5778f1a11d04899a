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
from falaj.drivers.processes.frameworks.process import Ports, Process
from falaj.ports.launcher import Launch

if TYPE_CHECKING:  # records take pydantic, for which every start of an attempt would wait
    from falaj.records.training.jobs import Framework

__all__ = ["defaults_of", "name_of", "plan", "tolerates"]


@dataclass(frozen=True)
class Contract:
    """`defaults` are variables that the job may set otherwise."""

    processes: Callable[[Launch, Ports], Sequence[Process]]
    defaults: Callable[[Launch], dict[str, str]] = lambda _: {}


CONTRACTS: dict[Framework, Contract] = {
    "plain": Contract(plain.processes),
    "torch": Contract(torch.processes, torch.defaults),
    "tensorflow": Contract(tensorflow.processes, tensorflow.defaults),
    "jax": Contract(jax.processes, jax.defaults),
    "mpi": Contract(mpi.processes, mpi.defaults),
    "horovod": Contract(horovod.processes, horovod.defaults),
    "xgboost": Contract(xgboost.processes),
    "lightgbm": Contract(lightgbm.processes),
    "mxnet": Contract(mxnet.processes, mxnet.defaults),
}


def plan(launch: Launch, ports: Ports) -> Sequence[Process]:
    return CONTRACTS[launch.framework].processes(launch, ports)


def defaults_of(launch: Launch) -> dict[str, str]:
    return CONTRACTS[launch.framework].defaults(launch)


def tolerates(launch: Launch) -> int:
    """How many of the processes may be lost while the others go on."""
    return launch.processes - launch.processes_min if torch.is_elastic(launch) and launch.processes_min else 0


def name_of(launch: Launch, rank: int) -> str:
    """What people call a process of the plan; empty for one that starts the ranks itself."""
    planned = plan(launch, lambda count: [0] * count)
    return planned[rank].name if rank < len(planned) else f"rank {rank}"
