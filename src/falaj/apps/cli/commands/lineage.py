"""`falaj lineage`: the lineage graph of an object as a tree."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Annotated

import typer

from falaj.apps.cli.generation import parsing
from falaj.apps.cli.generation.presentation import Presentation
from falaj.apps.cli.output.results import show_json_lines
from falaj.apps.cli.output.values import encodable, format_value, printable
from falaj.apps.cli.session import Session
from falaj.control.services import all_operations
from falaj.records.governance.lineage import LineageNode

PRESENTATION = Presentation(
    columns={LineageNode: ("depth", "kind", "name", "zone", "label", "id")},
    help={
        "depth": "At most so many steps away.",
        "direction": "Its sources, what was made from it, or both.",
    },
)


@PRESENTATION.command("show")
def show(
    session: Session,
    object: Annotated[str, typer.Argument(metavar="OBJECT", help="An id, or kind:name.")],
    *,
    direction: Annotated[
        str | None,
        typer.Option(metavar="DIRECTION", help="Only its sources (up), or what was made from it (down)."),
    ] = None,
    depth: Annotated[str | None, typer.Option(metavar="DEPTH", help=PRESENTATION.help["depth"])] = None,
) -> None:
    """Print the sources of an object and what was made from it, as a tree."""
    graph = all_operations()["lineage.graph"]
    given = parsing.parse(graph, {"object": object, "direction": direction, "depth": depth})
    parsing.check(graph, given, command="lineage show")
    with session.platform() as platform:
        nodes = platform.lineage.graph(**given)
        if session.json:
            show_json_lines(nodes)
        else:
            print(encodable("\n".join(draw_lineage(list(nodes)))))


Branches = dict[str, list[LineageNode]]


def draw_lineage(nodes: Sequence[LineageNode]) -> list[str]:
    """Return the lines of a tree: the object, its sources, and what was made from it."""
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
    return lines if sides else [*lines, "   nothing is recorded upstream or downstream of it"]


def _branches(nodes: Sequence[LineageNode], sign: int) -> Branches:
    """Return the nodes that are one step further than each node, on one side of the start."""
    further: Branches = defaultdict(list)
    for node in nodes:
        if node.depth * sign > 0:
            for nearer in node.next_to:
                further[nearer].append(node)
    return further


def _draw(branches: Branches, start: str, indent: str) -> list[str]:
    """Return the lines of the subtree below `start`; a node that is reached twice is drawn once.

    Without recursion, because lineage may be deeper than Python's stack.
    """
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
    """Return the children from the last to the first, each with whether it is the last."""
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
