"""MPI: ranks started by the mpiexec of the job's environment, MPICH or Open MPI."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from falaj.drivers.processes.frameworks import mpi_nodes
from falaj.drivers.processes.frameworks.process import (
    FIRST_PORT,
    PlannedProcess,
    PortAllocator,
    is_first_node,
    own_host,
)
from falaj.ports.launcher import Launch


def processes(launch: Launch, ports: PortAllocator) -> Sequence[PlannedProcess]:
    if not launch.peers:
        return [PlannedProcess(["mpiexec", "-n", str(launch.processes), *launch.command])]
    program = [sys.executable, "-I", mpi_nodes.__file__]
    if is_first_node(launch):
        hosts = ",".join(launch.peers)
        return [PlannedProcess([*program, "start", hosts, str(launch.processes), *launch.command])]
    port = FIRST_PORT + launch.node_rank
    return [PlannedProcess([*program, "serve", own_host(launch), str(port)])]


def defaults(launch: Launch) -> dict[str, str]:
    """Return settings as variables, since the two programs have different options."""
    # The scheduler decides how many ranks share a core. Jobs may run as root of a container.
    open_mpi = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    if launch.peers:
        return open_mpi
    mpich = {"HYDRA_LAUNCHER": "fork"}
    if not launch.network:
        mpich |= {"HYDRA_IFACE": "lo", "FI_TCP_IFACE": "lo"}
        open_mpi |= {"OMPI_MCA_btl_tcp_if_include": "lo", "OMPI_MCA_oob_tcp_if_include": "lo"}
    return mpich | open_mpi
