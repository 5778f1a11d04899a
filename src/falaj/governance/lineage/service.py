"""The operation on lineage: what an object was made from, and what was made from it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from falaj.governance import objects
from falaj.governance.lineage import graph as lineage_graph
from falaj.governance.operations.call import current_call
from falaj.governance.operations.gate import Gate
from falaj.governance.operations.operation import Mode, operation
from falaj.governance.residency.zones import HIDDEN
from falaj.records.governance.lineage import Direction, LineageNode
from falaj.records.governance.objects import StoredObject
from falaj.records.names import AnyRef

Depth = Annotated[int, Field(ge=1, le=1_000_000)]


class Lineage:
    """Traverse the graph of objects and operations."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    @operation("lineage.graph", resource="object", mode=Mode.READ)
    def graph(
        self, object: AnyRef, *, direction: Direction = Direction.BOTH, depth: Depth | None = None
    ) -> Iterator[LineageNode]:
        """List every object and operation upstream, downstream or both, nearest first; operations count as a step."""
        call = current_call()
        found: list[LineageNode] = []
        for side, sign in ((Direction.UP, -1), (Direction.DOWN, 1)):
            if direction in (side, Direction.BOTH):
                reached = lineage_graph.walk(call.tx, call.target.id, up=sign < 0, depth=depth)
                skip = 1 if found else 0
                found += list(lineage_graph.nodes(call.tx, reached, sign=sign))[skip:]
        return iter(self._hide(found))

    def _hide(self, nodes: list[LineageNode]) -> list[LineageNode]:
        """Nodes of workspaces that the caller may not see keep their place but not their name."""
        call = current_call()
        seen: dict[str, bool] = {}
        for workspace in {node.workspace for node in nodes if node.workspace is not None}:
            home = objects.by_id(call.tx, workspace)
            seen[workspace] = home is not None and self._may_see(home)
        if self.gate.authorizer.state(call.tx).has_custom:  # rules may then differ from object to object
            hidden = {node.id for node in nodes if node.workspace and not self._may_see_node(node)}
        else:
            hidden = {node.id for node in nodes if node.workspace and not seen[node.workspace]}
        blank = {"name": HIDDEN, "zone": None}
        return [node.model_copy(update=blank) if node.id in hidden else node for node in nodes]

    def _may_see_node(self, node: LineageNode) -> bool:
        found = objects.ever(current_call().tx, node.id)
        return found is not None and self._may_see(found)

    def _may_see(self, home: StoredObject) -> bool:
        call = current_call()
        return self.gate.authorizer.sees(call.tx, call.caller, home)
