"""Simulate the scheduler on a virtual clock: replay jobs on given nodes and queues, and compare two settings."""

from falaj.scheduling.simulator.changes import apply_changes, describe_changes
from falaj.scheduling.simulator.comparison import what_if
from falaj.scheduling.simulator.engine import simulate
from falaj.scheduling.simulator.policies import Scheduler

__all__ = ["Scheduler", "apply_changes", "describe_changes", "simulate", "what_if"]
