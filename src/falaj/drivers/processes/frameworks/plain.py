"""Copies of one command that find each other by themselves, or not at all; also scikit-learn's contract."""

from __future__ import annotations

from collections.abc import Sequence

from falaj.drivers.processes.frameworks.process import Ports, Process, numbered
from falaj.ports.launcher import Launch


def processes(launch: Launch, ports: Ports) -> Sequence[Process]:
    if launch.processes == 1:
        return [Process(launch.command)]
    count = launch.processes
    return [Process(launch.command, f"rank {rank}", numbered(rank, of=count)) for rank in range(count)]
