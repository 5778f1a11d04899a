"""XGBoost: workers, and the tracker that connects them."""

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

TRACKER = """
import sys
from xgboost.tracker import RabitTracker
tracker = RabitTracker(n_workers=int(sys.argv[1]), host_ip=sys.argv[2], port=int(sys.argv[3]), sortby="task")
tracker.start()
tracker.wait_for()
"""


def processes(launch: Launch, ports: PortAllocator) -> Sequence[PlannedProcess]:
    (port,) = ports(1)
    count = launch.processes
    python, *rest = launch.command
    own, _ = split_options(rest)
    shared = {
        "DMLC_TRACKER_URI": LOOPBACK,
        "DMLC_TRACKER_PORT": str(port),
        "DMLC_NUM_WORKER": str(count),
    }
    workers = [
        PlannedProcess(
            launch.command,
            f"rank {rank}",
            {
                **shared,
                **rank_environment(rank, of=count),
                **rank_gpu_environment(launch, rank, of=count),
                "DMLC_TASK_ID": str(rank),
            },
        )
        for rank in range(count)
    ]
    tracker = [python, *own, "-c", TRACKER, str(count), LOOPBACK, str(port)]
    return [*workers, PlannedProcess(tracker, "tracker", {"CUDA_VISIBLE_DEVICES": ""}, is_essential=False)]
