"""The memory and disk limits of jobs that name none: a share of the machine. Pure."""

from __future__ import annotations

from falaj.records.scheduling.snapshot import WHOLE_GPU, Node
from falaj.records.training.jobs import JobSpec

RESERVE = 0.1
"""The part of the machine's memory that no default gives away: the platform and the system need it."""
LEAST_MEMORY_BYTES = 4 << 30
"""Of each process, unless that is more than half of the machine: Python with a framework takes one GiB by itself."""
LEAST_DISK_BYTES = 10 << 30


def machine_share(spec: JobSpec, node: Node, replicas: int) -> float:
    """Return the larger of the shares of a node's CPUs and GPUs that `replicas` of a job have, at most 1."""
    gpus = spec.gpus * spec.gpu_milli / WHOLE_GPU
    shares = [spec.cpus / node.cpus if node.cpus else 0.0, gpus / len(node.gpus) if node.gpus else 0.0]
    return min(1.0, replicas * max(shares))


def default_memory_bytes(spec: JobSpec, node: Node, *, replicas: int = 1) -> int:
    """Return the memory limit of a replica of a job that names none, where `replicas` of it share the node."""
    left_bytes = node.memory_bytes - (0 if node.others is None else node.others.memory_bytes)
    most = int(left_bytes * (1 - RESERVE))
    least = min(LEAST_MEMORY_BYTES * spec.processes * replicas, left_bytes // 2)
    return max(1, max(least, int(most * machine_share(spec, node, replicas))) // replicas)


def default_disk_bytes(spec: JobSpec, node: Node, *, free_bytes: int, replicas: int = 1) -> int:
    """Return the disk limit of a replica of a job that names none, of what is free on the volume."""
    least = min(LEAST_DISK_BYTES, free_bytes // 2)
    return max(1, max(least, int(free_bytes * machine_share(spec, node, replicas))) // replicas)
