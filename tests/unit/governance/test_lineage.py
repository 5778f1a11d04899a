"""Lineage: ancestors and descendants in one call, however many, and labels that follow it exactly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from falaj.governance.lineage.service import HIDDEN
from falaj.governance.operations.caller import acting_as
from falaj.records.governance.identity import Role
from falaj.records.governance.lineage import Direction, LineageNode
from falaj.records.governance.residency import UNRESTRICTED, Label, union
from platforms import TWO_ZONES, OwnPlatform, make_platform

TREE = 25_000


def derive(platform: OwnPlatform, name: str, *sources: str) -> str:
    return platform.put(name, b"x", sources=tuple(f"blob:{source}" for source in sources)).id


def places(nodes: Iterator[LineageNode]) -> dict[str, set[int]]:
    """Return the depths at which each name occurs."""
    found: dict[str, set[int]] = {}
    for node in nodes:
        found.setdefault(node.name, set()).add(node.depth)
    return found


@pytest.fixture
def diamond(platform: OwnPlatform) -> OwnPlatform:
    """raw → left, right → model → report"""
    derive(platform, "raw")
    derive(platform, "left", "raw")
    derive(platform, "right", "raw")
    derive(platform, "model", "left", "right")
    derive(platform, "report", "model")
    return platform


def test_the_graph_goes_both_ways(diamond: OwnPlatform) -> None:
    assert places(diamond.lineage.graph("blob:model")) == {
        "model": {0},
        "left": {-2},
        "right": {-2},
        "raw": {-4},
        "report": {2},
        "blobs.upload": {-5, -3, -1, 1},
    }


def test_the_graph_can_be_limited_to_one_direction(diamond: OwnPlatform) -> None:
    up = places(diamond.lineage.graph("blob:model", direction=Direction.UP))
    down = places(diamond.lineage.graph("blob:raw", direction=Direction.DOWN))

    assert set(up) == {"model", "left", "right", "raw", "blobs.upload"}
    assert down == {
        "raw": {0},
        "left": {2},
        "right": {2},
        "model": {4},
        "report": {6},
        "blobs.upload": {1, 3, 5},
    }


def test_nodes_name_the_adjacent_nodes_one_step_nearer(diamond: OwnPlatform) -> None:
    nodes = {node.id: node for node in diamond.lineage.graph("blob:model")}

    raw = next(node for node in nodes.values() if node.name == "raw")
    makers = [nodes[ident] for ident in raw.next_to]
    below = {nodes[ident].name for maker in makers for ident in maker.next_to}
    assert {maker.kind for maker in makers} == {"operation"}
    assert below == {"left", "right"}


def test_the_graph_is_nearest_first(diamond: OwnPlatform) -> None:
    depths = [abs(node.depth) for node in diamond.lineage.graph("blob:model", direction=Direction.UP)]

    assert depths == sorted(depths)


@pytest.mark.parametrize(("depth", "furthest"), [(1, 1), (2, 2), (3, 3), (100, 5)])
def test_the_graph_ends_at_a_depth(light_platform: OwnPlatform, depth: int, furthest: int) -> None:
    derive(light_platform, "a")
    derive(light_platform, "b", "a")
    derive(light_platform, "c", "b")

    nodes = list(light_platform.lineage.graph("blob:c", depth=depth))

    assert max(abs(node.depth) for node in nodes) == furthest
    assert len(nodes) == 1 + furthest


def test_a_deleted_object_stays_in_the_graph(diamond: OwnPlatform) -> None:
    diamond.blobs.delete("left")

    assert {"left", "raw"} <= set(places(diamond.lineage.graph("blob:model")))


def test_nodes_of_other_workspaces_keep_their_place_but_not_their_name(platform: OwnPlatform) -> None:
    platform.workspaces.create("secret")
    platform.put("plans", b"x", workspace="secret", zone="frankfurt")
    platform.put("summary", b"x", sources=("secret/blob:plans",))
    dana = platform.join("dana", Role.VIEWER)

    with acting_as(dana):
        nodes = list(platform.lineage.graph("blob:summary"))

    (hidden,) = [node for node in nodes if node.depth == -2]
    assert (hidden.name, hidden.zone) == (HIDDEN, None)
    assert "plans" not in "".join(node.model_dump_json() for node in nodes)
    assert "plans" in places(platform.lineage.graph("blob:summary"))


@pytest.mark.slow
def test_a_hundred_thousand_nodes_come_in_one_call(platform: OwnPlatform) -> None:
    start = platform.put("model", b"x").id
    grow_tree(platform, start, side="up")
    grow_tree(platform, start, side="down")

    nodes = list(platform.lineage.graph(start))

    assert len({node.id for node in nodes}) == len(nodes) == 4 * TREE + 2  # and the model, and its upload
    assert {node.depth < 0 for node in nodes if node.name.startswith("up")} == {True}
    assert {node.depth > 0 for node in nodes if node.name.startswith("down")} == {True}


def grow_tree(platform: OwnPlatform, start: str, *, side: str) -> None:
    """Create TREE objects and as many operations on one side of `start`: each object has four beyond it."""
    numbers = f"WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {TREE})"
    nearer = f"CASE WHEN i < 4 THEN '{start}' ELSE '{side}-' || (i / 4) END"
    act, thing = f"'act-{side}-' || i", f"'{side}-' || i"
    edges = [(thing, act), (act, nearer)] if side == "up" else [(nearer, act), (act, thing)]
    home = platform.workspaces.show("default").id
    platform.sql(
        "INSERT INTO governance_objects (id, workspace, kind, name, owner, created_at) "
        f"{numbers} SELECT {thing}, '{home}', 'blob', {thing}, 'user', 0 FROM n"
    )
    platform.sql(
        "INSERT INTO governance_activities (id, action, caller, at) "
        f"{numbers} SELECT {act}, 'job.run', 'user', 0 FROM n"
    )
    for begin, end in edges:
        platform.sql(
            f"INSERT INTO governance_lineage_edges (source, target) {numbers} SELECT {begin}, {end} FROM n"
        )


# ---------------------------------------------------------------------- labels equal a naive recomputation

JURISDICTIONS = st.none() | st.sets(st.sampled_from(["DE", "SA", "US"]), max_size=2).map(lambda s: {"AE", *s})
LABELS = st.builds(Label, only=JURISDICTIONS, classes=st.sets(st.sampled_from(["pii", "health"]), max_size=2))
STEPS = st.one_of(
    st.tuples(st.just("make"), st.sets(st.integers(0, 9), max_size=3), LABELS),
    st.tuples(st.just("label"), st.integers(0, 9), LABELS),
    st.tuples(st.just("unlabel"), st.integers(0, 9)),
    st.tuples(st.just("workspace"), LABELS),
)


@pytest.fixture(scope="module")
def shared_platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnPlatform]:
    with make_platform(tmp_path_factory.mktemp("lineage"), toml=TWO_ZONES) as made:
        yield made


@pytest.mark.slow
@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(steps=st.lists(STEPS, min_size=4, max_size=12))
def test_labels_equal_a_naive_recomputation(shared_platform: OwnPlatform, steps: list[Any]) -> None:
    workspace = f"w{len(shared_platform.entries())}"
    shared_platform.workspaces.create(workspace)
    model = Model(shared_platform, workspace)

    for verb, *rest in steps:
        getattr(model, verb)(*rest)

    assert model.stored() == model.expected()


class Model:
    """Performs each step on the platform, and records it in the simplest way."""

    def __init__(self, platform: OwnPlatform, workspace: str) -> None:
        self._platform = platform
        self._workspace = workspace
        self._home = UNRESTRICTED
        self._ids: list[str] = []
        self._own: list[Label] = []
        self._sources: list[set[int]] = []

    def make(self, wanted: set[int], own: Label) -> None:
        sources = {number for number in wanted if number < len(self._ids)}
        refs = tuple(self._ids[number] for number in sources)
        made = self._platform.blobs.upload(
            iter([b"x"]), workspace=self._workspace, sources=refs, **arguments(own)
        )
        self._ids.append(made.id)
        self._own.append(own)
        self._sources.append(sources)

    def label(self, number: int, added: Label) -> None:
        if number < len(self._ids):
            self._platform.objects.label(self._ids[number], **arguments(added))
            self._own[number] |= added

    def unlabel(self, number: int) -> None:
        if number < len(self._ids):
            self._platform.objects.unlabel(self._ids[number])
            self._own[number] = UNRESTRICTED

    def workspace(self, added: Label) -> None:
        self._platform.objects.label(f"workspace:{self._workspace}", **arguments(added))
        self._home |= added

    def stored(self) -> list[Label]:
        return [self._platform.objects.show(ident).label for ident in self._ids]

    def expected(self) -> list[Label]:
        known: list[Label] = []
        for own, sources in zip(self._own, self._sources, strict=True):
            known.append(union([own, self._home, *(known[number] for number in sources)]))
        return known


def arguments(label: Label) -> dict[str, Any]:
    return {"only": None if label.only is None else tuple(label.only), "classes": tuple(label.classes)}
