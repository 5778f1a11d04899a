"""The queue on a virtual clock: replay jobs in a world of machines and queues, and compare two worlds."""

from falaj.scheduling.simulator.compare import what_if
from falaj.scheduling.simulator.desk import Scheduler
from falaj.scheduling.simulator.engine import simulate
from falaj.scheduling.simulator.world import changed, in_words

__all__ = ["Scheduler", "changed", "in_words", "simulate", "what_if"]
