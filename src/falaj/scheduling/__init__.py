"""The room that decides who computes where and when, and can say why: pure functions over a snapshot."""

from falaj.scheduling.deciding.backlog import Backlog
from falaj.scheduling.deciding.decide import decide, decide_from, in_order
from falaj.scheduling.deciding.explain import explain
from falaj.scheduling.deciding.forecast import expected_start
from falaj.scheduling.nodes import node_from

__all__ = ["Backlog", "decide", "decide_from", "expected_start", "explain", "in_order", "node_from"]
