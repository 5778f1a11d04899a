"""Edges between objects and operations, and the walks over them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from sqlalchemy import insert, literal, select

from falaj.governance import objects
from falaj.governance.operations.call import Call
from falaj.governance.policy.epochs import advance_epoch
from falaj.governance.tables import activities, lineage_edges
from falaj.governance.tables import objects as objects_table
from falaj.ports.metadata import Transaction
from falaj.records.governance.lineage import LineageNode
from falaj.records.governance.objects import StoredObject
from falaj.records.governance.residency import UNRESTRICTED, Label, union
from falaj.records.names import ROOT, ObjectId, new_id

BATCH = 900
"""Ids per IN list: under every database's limit on bound values."""


def record(call: Call) -> None:
    """The edges of a finished call: from what it read, through the operation, to what it made."""
    made = [new for new in call.created if new.kind not in objects.PLATFORM_KINDS]
    if not made:
        return
    activity = new_id("act")
    fields = {"id": activity, "action": call.operation.name, "caller": call.caller.id, "at": call.now}
    call.tx.insert(activities, fields)
    sources = [{"source": found.id, "target": activity} for found in _distinct(call.sources())]
    targets = [{"source": activity, "target": new.id} for new in made]
    for edge in [*sources, *targets]:
        call.tx.insert(lineage_edges, edge)


def leave(call: Call, sources: Sequence[StoredObject]) -> None:
    """Record that data of `sources` leaves the platform: an operation from which nothing in it was made."""
    activity = new_id("act")
    fields = {"id": activity, "action": call.operation.name, "caller": call.caller.id, "at": call.now}
    call.tx.insert(activities, fields)
    for found in _distinct(sources):
        call.tx.insert(lineage_edges, {"source": found.id, "target": activity})


def flow(call: Call, sources: Sequence[StoredObject], target: StoredObject) -> None:
    """Record that data of `sources` flows into the existing `target`: edges, and the labels of the sources."""
    activity = new_id("act")
    fields = {"id": activity, "action": call.operation.name, "caller": call.caller.id, "at": call.now}
    call.tx.execute(insert(activities), fields)
    edges = [{"source": source.id, "target": activity} for source in sources]
    call.tx.execute(insert(lineage_edges), [*edges, {"source": activity, "target": target.id}])
    label = union([target.label, *(source.label for source in sources)])
    if label != target.label:
        objects.relabel(call.tx, target.id, label=label)
        advance_epoch(call.tx)  # cached decisions know the earlier label


def walk(
    tx: Transaction, start: ObjectId, *, up: bool, depth: int | None
) -> dict[ObjectId, tuple[int, list[ObjectId]]]:
    """Return every node that `start` reaches, with its distance and the nodes it was reached from, nearest first."""
    near, far = ("target", "source") if up else ("source", "target")
    beyond: dict[ObjectId, list[ObjectId]] = defaultdict(list)
    for here, there in _reachable(tx, start, near, far, depth):
        beyond[here].append(there)
    reached: dict[ObjectId, tuple[int, list[ObjectId]]] = {start: (0, [])}
    frontier, distance = [start], 0
    while frontier and (depth is None or distance < depth):
        distance += 1
        following: dict[ObjectId, list[ObjectId]] = defaultdict(list)
        for here in frontier:
            for there in beyond[here]:
                known = reached.get(there)
                (following[there] if known is None else known[1]).append(here)
        reached |= {node: (distance, nearer) for node, nearer in following.items()}
        frontier = list(following)
    return reached


_REACHABLE = """
WITH RECURSIVE reach(node) AS (
  VALUES (CAST(? AS TEXT))
  UNION SELECT edge.{far} FROM reach JOIN governance_lineage_edges AS edge ON edge.{near} = reach.node
)
SELECT edge.{near}, edge.{far} FROM reach JOIN governance_lineage_edges AS edge ON edge.{near} = reach.node
"""
FEW_LEVELS = 16
"""Up to here a query per level is quicker than one that finds everything."""


def _reachable(
    tx: Transaction, start: ObjectId, near: str, far: str, depth: int | None
) -> Iterator[tuple[ObjectId, ObjectId]]:
    """The edges on the way from `start`; without a depth in one query, however deep the graph is."""
    if depth is None or depth > FEW_LEVELS:
        rows = tx.execute_sql(_REACHABLE.format(near=near, far=far), (start,))
        yield from ((ObjectId(here), ObjectId(there)) for here, there in rows)
        return
    frontier, seen = [start], {start}
    for _ in range(depth):
        edges = list(_edges(tx, frontier, near, far))
        yield from edges
        frontier = [there for there in dict.fromkeys(there for _, there in edges) if there not in seen]
        seen.update(frontier)


def nodes(
    tx: Transaction, reached: dict[ObjectId, tuple[int, list[ObjectId]]], *, sign: int
) -> Iterator[LineageNode]:
    """`reached` as records, nearest first; `sign` is -1 upstream."""
    facts = _facts(tx, list(reached))
    for node, (distance, nearer) in reached.items():
        if node in facts:
            yield LineageNode(id=node, depth=sign * distance, next_to=tuple(nearer), **facts[node])


def path_from_restriction(tx: Transaction, found: StoredObject, jurisdiction: str) -> list[StoredObject]:
    """The shortest path from an object whose own label forbids `jurisdiction` down to `found`."""
    reached = walk(tx, found.id, up=True, depth=None)
    for node in reached:
        upstream = objects.ever(tx, node)
        if upstream is None:
            continue
        if not upstream.own_label.permits(jurisdiction):
            return [upstream, *_downwards(tx, reached, node)]
        home = objects.ever(tx, upstream.workspace)
        if home is not None and not home.own_label.permits(jurisdiction):
            return [home, upstream, *_downwards(tx, reached, node)]
    return [found]


def reflow(tx: Transaction, changed: StoredObject) -> list[StoredObject]:
    """Recompute the labels of everything downstream of `changed`; what got a new label, in order of flow."""
    starts = objects_in(tx, changed.id) if changed.kind == "workspace" else []
    roots = [changed, *starts]
    affected = _downstream(tx, [root.id for root in roots])
    inputs = _inputs(tx, affected)
    known = {found.id: found for found in _objects(tx, {*affected, *(s for i in inputs.values() for s in i)})}
    homes = {found.id: found for found in _objects(tx, {found.workspace for found in known.values()})}
    renewed: list[StoredObject] = []
    for ident in affected:
        found = known.get(ident)
        if found is None or found.id == changed.id:
            continue
        above = [known[source].label for source in inputs.get(ident, ()) if source in known]
        label = union([found.own_label, _home_label(found, homes, changed), *above])
        if label != found.label:
            objects.relabel(tx, found.id, label=label)
            known[ident] = found.model_copy(update={"label": label})
            renewed.append(known[ident])
    return renewed


def objects_in(tx: Transaction, workspace: ObjectId) -> list[StoredObject]:
    query = select(objects_table).where(
        objects_table.c.workspace == workspace,
        objects_table.c.kind != "workspace",
        objects_table.c.deleted_at.is_(None),
    )
    return [objects.stored_object(row) for row in tx.execute(query).mappings()]


def _home_label(found: StoredObject, homes: dict[ObjectId, StoredObject], changed: StoredObject) -> Label:
    if found.workspace == changed.id:
        return changed.label
    home = homes.get(found.workspace)
    return UNRESTRICTED if home is None or home.id == ROOT else home.label


def _downstream(tx: Transaction, starts: Sequence[ObjectId]) -> list[ObjectId]:
    """The starts and all below them, every node after all of its own inputs among them."""
    children: dict[ObjectId, list[ObjectId]] = {}
    frontier = list(dict.fromkeys(starts))
    while frontier:
        children |= {node: [] for node in frontier}
        for here, there in _edges(tx, frontier, "source", "target"):
            children[here].append(there)
        frontier = list({c for node in frontier for c in children[node] if c not in children})
    waiting: dict[ObjectId, int] = defaultdict(int)
    for below in children.values():
        for child in below:
            waiting[child] += 1
    ready, ordered = [node for node in children if not waiting[node]], []
    while ready:
        node = ready.pop()
        ordered.append(node)
        for child in children[node]:
            waiting[child] -= 1
            if not waiting[child]:
                ready.append(child)
    return ordered


def _inputs(tx: Transaction, targets: Sequence[ObjectId]) -> dict[ObjectId, set[ObjectId]]:
    """For each object, the objects that flowed into it, whatever operations lie between."""
    makers: dict[ObjectId, list[ObjectId]] = defaultdict(list)
    for target, maker in _edges(tx, targets, "target", "source"):
        makers[target].append(maker)
    feeds: dict[ObjectId, set[ObjectId]] = defaultdict(set)
    for maker, source in _edges(tx, list({m for ms in makers.values() for m in ms}), "target", "source"):
        feeds[maker].add(source)
    return {t: {s for maker in ms for s in feeds[maker]} for t, ms in makers.items()}


def _downwards(
    tx: Transaction, reached: dict[ObjectId, tuple[int, list[ObjectId]]], node: ObjectId
) -> list[StoredObject]:
    """Return the objects from below `node` to the start of the traversal."""
    path: list[StoredObject] = []
    while reached[node][1]:
        node = reached[node][1][0]
        below = objects.ever(tx, node)
        path += [below] if below is not None else []
    return path


def _edges(
    tx: Transaction, ids: Sequence[ObjectId], near: str, far: str
) -> Iterator[tuple[ObjectId, ObjectId]]:
    query = select(lineage_edges.c[near], lineage_edges.c[far])
    for batch in _batches(ids):
        yield from ((row[0], row[1]) for row in tx.execute(query.where(lineage_edges.c[near].in_(batch))))


def _objects(tx: Transaction, ids: Iterable[ObjectId]) -> Iterator[StoredObject]:
    for batch in _batches(sorted(ids)):
        rows = tx.execute(select(objects_table).where(objects_table.c.id.in_(batch))).mappings()
        yield from (objects.stored_object(row) for row in rows)


def _facts(tx: Transaction, ids: Sequence[ObjectId]) -> dict[ObjectId, dict[str, Any]]:
    found: dict[ObjectId, dict[str, Any]] = {}
    for thing in _objects(tx, ids):
        found[thing.id] = {
            "kind": thing.kind,
            "name": thing.name,
            "workspace": thing.workspace,
            "zone": thing.zone,
            "label": thing.label,
            "at": thing.created_at,
        }
    for batch in _batches([ident for ident in ids if ident not in found]):
        query = select(activities.c.id, literal("operation"), activities.c.action, activities.c.at)
        for ident, kind, name, at in tx.execute(query.where(activities.c.id.in_(batch))):
            found[ident] = {"kind": kind, "name": name, "at": at}
    return found


def _batches(ids: Sequence[ObjectId]) -> Iterator[Sequence[ObjectId]]:
    return (ids[i : i + BATCH] for i in range(0, len(ids), BATCH))


def _distinct(found: Iterable[StoredObject]) -> list[StoredObject]:
    return list({thing.id: thing for thing in found}.values())


def inherited_label(tx: Transaction, found: StoredObject) -> Label:
    """Return the label that an object inherits from its workspace and its sources."""
    sources = _objects(tx, _inputs(tx, [found.id]).get(found.id, ()))
    home = objects.by_id(tx, found.workspace) if found.kind not in objects.PLATFORM_KINDS else None
    return union([home.label if home else UNRESTRICTED, *(source.label for source in sources)])
