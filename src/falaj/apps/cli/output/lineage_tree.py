"""The lineage graph as a tree of text; a node that is reached twice is drawn once, and referred to after that."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from falaj.apps.cli.output.values import format_value, printable
from falaj.records.governance.lineage import LineageNode

ASCII = str.maketrans({"├": "|", "└": "`", "─": "-", "│": "|"})

Branches = dict[str, list[LineageNode]]


def draw_lineage(nodes: Sequence[LineageNode]) -> list[str]:
    """The start, then what it came from, then what came from it."""
    start = next((node for node in nodes if node.depth == 0), None)
    if start is None:
        return []
    lines = [_label(start)]
    sides = [
        (title, branches)
        for title, sign in (("came from", -1), ("went into", 1))
        if (branches := _branches(nodes, sign)).get(start.id)
    ]
    for number, (title, branches) in enumerate(sides):
        last = number == len(sides) - 1
        lines.append(f"{'└─' if last else '├─'} {title}")
        lines += _draw(branches, start.id, "   " if last else "│  ")
    return lines if sides else [*lines, "   nothing is known upstream or downstream of it"]


def encodable(tree: str, *, encoding: str) -> str:
    """`tree` with the lines that `encoding` can show."""
    try:
        tree.encode(encoding)
    except UnicodeEncodeError:
        return tree.translate(ASCII)
    return tree


def _branches(nodes: Sequence[LineageNode], sign: int) -> Branches:
    """The nodes one step further than each, on one side of the start."""
    further: Branches = defaultdict(list)
    for node in nodes:
        if node.depth * sign > 0:
            for nearer in node.next_to:
                further[nearer].append(node)
    return further


def _draw(branches: Branches, start: str, indent: str) -> list[str]:
    """The subtree below `start`; without recursion, because lineage may be deeper than Python's stack."""
    lines: list[str] = []
    drawn: set[str] = {start}
    waiting = [(child, indent, last) for child, last in _reversed(branches.get(start, []))]
    while waiting:
        node, indent, last = waiting.pop()
        seen = node.id in drawn and bool(branches.get(node.id))
        lines.append(f"{indent}{'└─' if last else '├─'} {_label(node)}{' (drawn above)' if seen else ''}")
        if node.id not in drawn:
            drawn.add(node.id)
            below = indent + ("   " if last else "│  ")
            waiting += [(child, below, last) for child, last in _reversed(branches.get(node.id, []))]
    return lines


def _reversed(children: list[LineageNode]) -> list[tuple[LineageNode, bool]]:
    """Children from the last to the first, each with whether it is the last."""
    return [(child, number == 0) for number, child in enumerate(reversed(children))]


def _label(node: LineageNode) -> str:
    if node.kind == "operation":
        return f"{printable(node.name)}  {format_value(node.at)}"
    parts = [f"{node.kind}:{printable(node.name)}"]
    if node.zone:
        parts.append(f"zone {node.zone}")
    if node.label.only is not None or node.label.classes:
        parts.append(node.label.describe())
    return "  ".join(parts)
