"""XGBoost: workers, and the tracker that connects them."""

from __future__ import annotations

from collections.abc import Sequence

from falaj.drivers.processes.frameworks.process import (
    PlannedProcess,
    PortAllocator,
    copies,
    is_first_node,
    rendezvous,
    world_size,
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
    host, port = rendezvous(launch, ports)
    count = str(world_size(launch))
    shared = {"DMLC_TRACKER_URI": host, "DMLC_TRACKER_PORT": str(port), "DMLC_NUM_WORKER": count}
    workers = copies(launch, shared, lambda rank: {"DMLC_TASK_ID": str(rank)})
    if not is_first_node(launch):
        return workers
    python, *rest = launch.command
    own, _ = split_options(rest)
    tracker = [python, *own, "-c", TRACKER, count, host, str(port)]
    return [*workers, PlannedProcess(tracker, "tracker", {"CUDA_VISIBLE_DEVICES": ""}, is_essential=False)]
