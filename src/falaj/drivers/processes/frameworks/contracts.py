"""The launch contract of each framework: from a launch to the processes to start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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

if TYPE_CHECKING:  # records load pydantic, which would delay the start of every attempt
    from falaj.records.training.jobs import Framework


@dataclass(frozen=True)
class LaunchContract:
    """How to start one framework. `defaults` are variables that the job may override. `needs_one_machine` says why its
    processes cannot run on several, if so."""

    processes: Callable[[Launch, PortAllocator], Sequence[PlannedProcess]]
    defaults: Callable[[Launch], dict[str, str]] = lambda _: {}
    needs_one_machine: str | None = None


CONTRACTS: dict[Framework, LaunchContract] = {
    "plain": LaunchContract(plain.processes),
    "torch": LaunchContract(torch.processes, torch.defaults),
    "tensorflow": LaunchContract(tensorflow.processes, tensorflow.defaults),
    "jax": LaunchContract(jax.processes, jax.defaults),
    "mpi": LaunchContract(mpi.processes, mpi.defaults),
    "horovod": LaunchContract(horovod.processes, horovod.defaults, horovod.NEEDS_ONE_MACHINE),
    "xgboost": LaunchContract(xgboost.processes),
    "lightgbm": LaunchContract(lightgbm.processes),
    "mxnet": LaunchContract(mxnet.processes, mxnet.defaults),
}


def plan_processes(launch: Launch, ports: PortAllocator) -> Sequence[PlannedProcess]:
    """Return the processes to start."""
    return CONTRACTS[launch.framework].processes(launch, ports)


def default_environment(launch: Launch) -> dict[str, str]:
    """Return the default variables of all processes."""
    return CONTRACTS[launch.framework].defaults(launch)


def machine_fault(launch: Launch) -> str | None:
    """Return why the framework of a launch cannot run on several machines, if it is to."""
    return CONTRACTS[launch.framework].needs_one_machine if launch.peers else None


def deciding_nodes(launch: Launch) -> list[int]:
    """Return the nodes whose end decides: those with an essential process. The others are to be stopped when all of
    these have ended."""
    plans = [plan_processes(replace(launch, node_rank=node), fake_ports) for node in range(len(launch.peers))]
    return [node for node, plan in enumerate(plans) if any(each.is_essential for each in plan)]


def tolerated_losses(launch: Launch) -> int:
    """Return how many processes of this machine may be lost while the others continue."""
    return launch.processes - launch.processes_min if torch.is_elastic(launch) and launch.processes_min else 0


def process_name(launch: Launch, rank: int) -> str:
    """Return the name of a process of the plan; empty for a launcher that starts the ranks itself."""
    planned = plan_processes(launch, fake_ports)
    return planned[rank].name if rank < len(planned) else f"rank {rank}"


def fake_ports(count: int) -> list[int]:
    """Return ports for a plan that is only looked at."""
    return [0] * count
