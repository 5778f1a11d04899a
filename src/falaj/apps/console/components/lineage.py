"""The lineage of an object as a graph of objects: operations are the edges, and each node leads to its page."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from nicegui import ui

from falaj.apps.console.charts.element import chart
from falaj.apps.console.charts.graphs import GraphNode, graph, layered
from falaj.apps.console.charts.palette import palette
from falaj.apps.console.components.states import empty_state
from falaj.apps.console.page import PageContext
from falaj.apps.console.times import Times
from falaj.records.governance.lineage import LineageNode

OPERATION = "operation"
KINDS = {
    "view": "feature view",
    "dataset": "training set",
    "model_version": "model version",
    "predictions": "predictions",
    "blob": "uploaded file",
    "work": "workflow run",
}
"""Words for kinds of objects, where the kind alone is not one."""
MOST_NODES = 200
"""Nodes of a picture, the nearest first; the rest are counted."""
FEW = 3
"""Alike objects are shown one by one up to this number; more are one node of the graph, and one line of the tree."""
LAYER_PX, ACROSS_PX, LEAST_PX, MOST_PX = 84, 112, 240, 640


@dataclass(frozen=True)
class LineageItem:
    """An object of the graph; `made_by` are the operations between it and the next one, `page` is its page."""

    id: str
    kind: str
    name: str
    depth: int
    made_by: str
    at: str
    place: str
    page: tuple[str, ...]


@dataclass(frozen=True)
class LineagePicture:
    """A lineage graph: its objects, nearest first, edges from sources to what came of them, and how many are left."""

    items: tuple[LineageItem, ...]
    edges: tuple[tuple[str, str], ...]
    left_out: int = 0

    @property
    def upstream(self) -> tuple[LineageItem, ...]:
        return tuple(each for each in self.items if each.depth < 0)

    @property
    def downstream(self) -> tuple[LineageItem, ...]:
        return tuple(each for each in self.items if each.depth > 0)


def lineage_picture(
    nodes: Iterable[LineageNode], *, workspace: str | None, times: Times, most: int = MOST_NODES
) -> LineagePicture:
    """Return the graph of objects; `workspace` is the id of the one whose pages nodes lead to.

    An operation between two objects becomes the edge between them; one that made nothing of the object, like an export,
    stays a node.
    """
    known = {node.id: node for node in nodes}
    edges: dict[tuple[str, str], None] = {}
    words: dict[str, list[str]] = {}
    passed: set[str] = set()
    for node in known.values():
        for nearer in node.next_to:
            step = known.get(nearer)
            if step is None or node.kind == OPERATION:
                continue
            ends = step.next_to if step.kind == OPERATION else (step.id,)
            if step.kind == OPERATION:
                passed.add(step.id)
                words.setdefault(node.id, []).append(step.name)
            for end in ends:
                edges[(node.id, end) if node.depth < 0 else (end, node.id)] = None
    for node in known.values():
        if node.kind == OPERATION and node.id not in passed and node.depth > 0:
            edges |= {(end, node.id): None for end in node.next_to}
    kept = [
        node
        for node in known.values()
        if node.id not in passed and (node.kind != OPERATION or node.depth > 0)
    ]
    shown = {node.id for node in kept[:most]}
    return LineagePicture(
        items=tuple(_item(node, words.get(node.id, ()), workspace, times) for node in kept[:most]),
        edges=tuple(each for each in edges if each[0] in shown and each[1] in shown),
        left_out=max(len(kept) - most, 0),
    )


def graph_nodes(picture: LineagePicture) -> dict[str, tuple[LineageItem, ...]]:
    """Return the nodes of the graph with their objects; those of one kind that lead to the same nodes are one."""
    depth = {each.id: each.depth for each in picture.items}
    nearer: dict[str, set[str]] = defaultdict(set)
    for source, target in picture.edges:
        near, far = sorted((source, target), key=lambda end: abs(depth[end]))
        nearer[far].add(near)
    node_of: dict[str, str] = {}
    by_distance = sorted(picture.items, key=lambda each: abs(each.depth))
    for _, ring in groupby(by_distance, key=lambda each: abs(each.depth)):
        alike: dict[object, list[LineageItem]] = defaultdict(list)
        for each in ring:
            ways = frozenset(node_of.get(near, near) for near in nearer[each.id])
            alike[each.kind, each.depth > 0, ways].append(each)
        for members in alike.values():
            node_of |= {each.id: members[0].id if len(members) > FEW else each.id for each in members}
    nodes: dict[str, tuple[LineageItem, ...]] = {}
    for each in picture.items:
        nodes[node_of[each.id]] = (*nodes.get(node_of[each.id], ()), each)
    return nodes


def _plural(kind: str) -> str:
    return kind if kind.endswith("s") else f"{kind[:-1]}ies" if kind.endswith("y") else f"{kind}s"


def _item(node: LineageNode, made_by: Sequence[str], workspace: str | None, times: Times) -> LineageItem:
    label = "" if node.label.only is None and not node.label.classes else node.label.describe()
    return LineageItem(
        id=node.id,
        kind=KINDS.get(node.kind, node.kind),
        name=node.name or node.id,
        depth=node.depth,
        made_by=", ".join(dict.fromkeys(made_by)),
        at=times.moment(node.at),
        place=" · ".join(part for part in (node.zone or "", label) if part),
        page=()
        if node.kind == OPERATION
        else object_page(node.kind, node.name, node.id, here=node.workspace == workspace),
    )


def object_page(kind: str, name: str, ident: str, *, here: bool = True) -> tuple[str, ...]:
    """Return the page of an object; that of its lineage where there is no other, or its workspace is not this one."""
    named: Mapping[str, str] = {
        "view": "features",
        "dataset": "training-sets",
        "model": "models",
        "endpoint": "endpoints",
        "pipeline": "pipelines",
    }
    identified: Mapping[str, str] = {"run": "runs", "job": "jobs"}
    if here and kind in named and name:
        return named[kind], name
    if here and kind in identified:
        return identified[kind], ident
    model, at, number = name.rpartition("@")
    if here and kind == "model_version" and at and number.isdecimal():
        return "models", model, "versions", number
    return "lineage", ident


def draw_lineage(context: PageContext, picture: LineagePicture, *, title: str, start: str) -> None:
    """Draw the graph; a click on a node opens its page."""
    if len(picture.items) < 2:
        empty_state(
            "Nothing was made from it yet, and it was made from nothing that the platform knows.",
            command=f"falaj lineage show {start}",
            icon="account_tree",
        )
        return
    grouped = graph_nodes(picture)
    nodes = [_graph_node(context, key, items) for key, items in grouped.items()]
    node_of = {each.id: key for key, items in grouped.items() for each in items}
    between = [(node_of[source], node_of[target]) for source, target in picture.edges]
    edges = [*dict.fromkeys(each for each in between if each[0] != each[1])]
    options = graph(nodes, edges, palette(context.is_dark), title=title)

    options["series"][0] |= {"preserveAspect": "contain", "left": 90, "right": 90, "top": 56, "bottom": 40}

    def clicked(data: dict[str, object]) -> None:
        target = data.get("target")
        if isinstance(target, str) and target.startswith("/w/"):
            ui.navigate.to(target)

    places = layered([*grouped], edges).values()
    layers = 1 + max((layer for layer, _ in places), default=0)
    height = min(max(LAYER_PX * max(Counter(layer for layer, _ in places).values()), LEAST_PX), MOST_PX)
    with ui.element("div").classes("scroll"):  # names need their width, on a phone too
        chart(options, height_px=height, on_click=clicked).style(f"min-width: {ACROSS_PX * layers}px")
    if picture.left_out:
        ui.label(f"{picture.left_out} objects that are farther away are not shown.").classes("muted small")


def _graph_node(context: PageContext, key: str, items: Sequence[LineageItem]) -> GraphNode:
    first = items[0]
    if len(items) > 1:
        return GraphNode(key, f"{len(items)} {_plural(first.kind)}", first.kind)
    target = context.href(*first.page) if first.page and first.depth != 0 else ""
    return GraphNode(key, first.name, "this object" if first.depth == 0 else first.kind, target)


def draw_side(context: PageContext, items: Sequence[LineageItem]) -> None:
    """Draw what lies on one side of an object."""
    if items:
        draw_tree(context, items)
    else:
        ui.label("Nothing that the platform knows.").classes("muted")


def draw_tree(context: PageContext, items: Sequence[LineageItem]) -> None:
    """Draw objects as a tree: nearest first, each step further to the right; many alike ones unfold."""
    alike: dict[object, list[LineageItem]] = defaultdict(list)
    for each in items:
        alike[each.depth, each.kind, each.made_by].append(each)
    with ui.element("div").classes("tree"):
        for members in alike.values():
            indent = min(max((abs(members[0].depth) + 1) // 2 - 1, 0), 8)
            with ui.element("div").style(f"padding-left: {1.25 * indent}rem"):
                if len(members) <= FEW:
                    _draw_rows(context, members)
                    continue
                words = f"{len(members)} {_plural(members[0].kind)}"
                words += f", through {members[0].made_by}" if members[0].made_by else ""
                with ui.expansion(words).classes("tree-more").props("dense"):
                    _draw_rows(context, members)


def _draw_rows(context: PageContext, items: Sequence[LineageItem]) -> None:
    for each in items:
        with ui.element("div").classes("tree-row"):
            ui.label(each.kind).classes("muted small")
            if each.page:
                ui.link(each.name, context.href(*each.page)).classes("wrap")
            else:
                ui.label(each.name).classes("wrap")
            words = (f"through {each.made_by}" if each.made_by else "", each.at, each.place)
            ui.label(" · ".join(part for part in words if part)).classes("muted small wrap")
