"""The room that decides who computes where and when, and can say why: pure functions over a snapshot."""

from falaj.scheduling.decide import decide, in_order
from falaj.scheduling.explain import explain
from falaj.scheduling.forecast import expected_start
from falaj.scheduling.nodes import node_from

__all__ = ["decide", "expected_start", "explain", "in_order", "node_from"]
