"""Lineage as the console shows it: objects with operations as edges, and pages that nodes lead to."""

from __future__ import annotations

from datetime import UTC

import pytest

from console_data import make_features, make_version
from falaj.apps.console.components.lineage import (
    FEW,
    LineageItem,
    LineagePicture,
    graph_nodes,
    lineage_picture,
    object_page,
)
from falaj.apps.console.pages.lineage import LineageRecords, lineage_view
from falaj.apps.console.times import Times
from falaj.records.governance.lineage import Direction
from platforms import OwnPlatform

TIMES = Times(UTC)


def test_objects_are_joined_by_the_operations_between_them(light_platform: OwnPlatform) -> None:
    data = make_features(light_platform, "churn")
    version = make_version(light_platform, "churn", auc=0.9, training_set=data.training.id)

    picture = lineage_picture(
        light_platform.lineage.graph(version.id), workspace=version.workspace, times=TIMES
    )

    names = {item.name: item for item in picture.items}
    assert names["churn-training"].made_by == "models.register"
    assert names["churn-training"].page == ("training-sets", "churn-training")
    assert names["churn-calls"].page == ("features", "churn-calls")
    assert (data.training.id, version.id) in picture.edges
    assert (data.calls.id, data.training.id) in picture.edges
    assert {item.kind for item in picture.items} == {
        "model version",
        "training set",
        "feature view",
        "uploaded file",
    }
    assert picture.downstream == ()


def test_downstream_of_a_source_is_what_was_made_from_it(light_platform: OwnPlatform) -> None:
    data = make_features(light_platform, "churn")
    version = make_version(light_platform, "churn", auc=0.9, training_set=data.training.id)

    nodes = light_platform.lineage.graph(data.calls.id, direction=Direction.DOWN)
    picture = lineage_picture(nodes, workspace=version.workspace, times=TIMES)

    assert [item.name for item in picture.downstream] == ["churn-training", "churn@1"]
    assert picture.items[-1].page == ("models", "churn", "versions", "1")


def item(ident: str, kind: str, depth: int) -> LineageItem:
    return LineageItem(ident, kind, ident, depth, "", "", "", ())


def test_many_alike_objects_are_one_node_of_the_graph() -> None:
    jobs = [f"job{at}" for at in range(FEW + 1)]
    items = [item("set", "training set", 0), *(item(job, "job", 2) for job in jobs)]
    items += [item(f"file of {job}", "uploaded file", 4) for job in jobs]
    items += [item("source", "uploaded file", -2), item("model", "model version", 4)]
    edges = [("source", "set"), ("job0", "model"), *(("set", job) for job in jobs)]
    edges += [(job, f"file of {job}") for job in jobs]

    nodes = graph_nodes(LineagePicture(tuple(items), tuple(edges)))

    assert {key: len(members) for key, members in nodes.items()} == {
        "set": 1,
        "job0": FEW + 1,
        "file of job0": FEW + 1,
        "source": 1,
        "model": 1,
    }


def test_a_few_alike_objects_and_those_of_different_sources_stay_apart() -> None:
    items = [item("middle", "job", 0), item("left", "run", 2), item("right", "run", 2)]
    items += [item(f"{side}{at}", "uploaded file", 4) for side in ("left", "right") for at in range(FEW)]
    edges = [("middle", "left"), ("middle", "right")]
    edges += [(each.id[:-1], each.id) for each in items if each.kind == "uploaded file"]

    assert len(graph_nodes(LineagePicture(tuple(items), tuple(edges)))) == len(items)


def test_an_export_stays_as_the_operation_that_it_is(light_platform: OwnPlatform) -> None:
    version = make_version(light_platform, "churn", auc=0.9)
    light_platform.models.export(version.id, to="files")

    picture = lineage_picture(
        light_platform.lineage.graph(version.id), workspace=version.workspace, times=TIMES
    )

    (left,) = picture.downstream
    assert (left.kind, left.name, left.page) == ("operation", "models.export", ())
    assert (version.id, left.id) in picture.edges


def test_what_is_far_away_is_counted(light_platform: OwnPlatform) -> None:
    data = make_features(light_platform, "churn")

    nodes = [*light_platform.lineage.graph(data.training.id)]
    picture = lineage_picture(nodes, workspace=None, times=TIMES, most=1)

    assert [item.depth for item in picture.items] == [0]
    assert (picture.left_out, picture.edges) == (2, ())


@pytest.mark.parametrize(
    ("kind", "name", "here", "page"),
    [
        ("view", "calls", True, ("features", "calls")),
        ("view", "calls", False, ("lineage", "x_1")),
        ("run", "night", True, ("runs", "x_1")),
        ("model_version", "churn@14", True, ("models", "churn", "versions", "14")),
        ("model_version", "hidden", True, ("lineage", "x_1")),
        ("blob", "", True, ("lineage", "x_1")),
    ],
)
def test_each_kind_of_object_has_its_page(kind: str, name: str, here: bool, page: tuple[str, ...]) -> None:
    assert object_page(kind, name, "x_1", here=here) == page


def test_the_columns_of_a_training_set_name_their_origin(light_platform: OwnPlatform) -> None:
    data = make_features(light_platform, "churn")
    records = LineageRecords(
        light_platform.objects.show(data.training.id),
        [*light_platform.lineage.graph(data.training.id)],
        light_platform.features.column_lineage(data.training.id),
    )

    view = lineage_view(records, times=TIMES)

    assert ("churn-calls__minutes_7d", "churn-calls", "version 2", "minutes_7d") in view.columns
    assert view.title == "churn-training"
    assert dict(view.about)["restriction"] == "any jurisdiction; personal"
