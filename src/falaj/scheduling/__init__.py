"""The room that decides who computes where and when, and can say why: pure functions over a snapshot."""

from falaj.scheduling.decision.backlog import Backlog
from falaj.scheduling.decision.decide import decide, decide_from, in_order
from falaj.scheduling.explanation.explain import explain
from falaj.scheduling.explanation.forecast import expected_start
from falaj.scheduling.nodes import node_from

__all__ = ["Backlog", "decide", "decide_from", "expected_start", "explain", "in_order", "node_from"]
