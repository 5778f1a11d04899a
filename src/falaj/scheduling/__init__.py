"""The scheduler: decides which jobs start where, explains why others wait, and accounts for their usage."""

from falaj.scheduling.decision.backlog import Backlog
from falaj.scheduling.decision.decide import decide, decide_from, in_order
from falaj.scheduling.decision.handover import hand_over
from falaj.scheduling.explanation.explain import explain
from falaj.scheduling.explanation.forecast import expected_start
from falaj.scheduling.explanation.handover import explain_handover
from falaj.scheduling.nodes import node_from

__all__ = [
    "Backlog",
    "decide",
    "decide_from",
    "expected_start",
    "explain",
    "explain_handover",
    "hand_over",
    "in_order",
    "node_from",
]
