"""The GPUs of a drained node are cut and shared: by the tool of one machine, or by the labels of a cluster's node."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from falaj.control.gpu_settings import cut_cards, set_labels
from falaj.drivers.kubernetes.inventory.node_facts import facts_of
from falaj.errors import InvalidInput
from falaj.ports.cluster.maintenance import CordonNote, Uncordoned
from falaj.ports.machine.hardware import NodeFacts, Places
from falaj.records.config import KubernetesConfig
from falaj.records.scheduling.hardware import GpuCard, NodePod
from falaj.records.scheduling.mig import CardSlices, GpuSettings
from recorded_machines import machine
from recorded_nodes import DGX_H100, patched


class RecordedTool:
    """Keeps what it was asked to cut."""

    def __init__(self) -> None:
        self.cuts: list[tuple[dict[int, Places], dict[int, Places]]] = []

    def cut(self, cards: Mapping[GpuCard, Places], *, before: Mapping[GpuCard, Places]) -> None:
        by_index = [{card.index: places for card, places in each.items()} for each in (cards, before)]
        self.cuts.append((by_index[0], by_index[1]))


class LabelledNode:
    """A node of a cluster of which only labels are changed."""

    def __init__(self) -> None:
        self.node = DGX_H100

    def label(self, node: str, labels: Mapping[str, str | None]) -> None:
        self.node = patched(self.node, {"metadata": {"labels": dict(labels)}})

    def cordon(self, node: str, note: CordonNote) -> None:
        raise AssertionError

    def uncordon(self, node: str) -> Uncordoned:
        raise AssertionError

    def pods(self, node: str) -> list[NodePod]:
        raise AssertionError

    @property
    def facts(self) -> NodeFacts:
        return facts_of(self.node, KubernetesConfig())


@pytest.fixture
def facts(tmp_path: Path) -> NodeFacts:
    (found,) = machine("h200-mig", tmp_path).nodes()
    return found


def settings(card: int, *slices: str) -> GpuSettings:
    return GpuSettings(cards=(CardSlices(card=card, slices=slices),))


def test_the_cards_of_a_machine_are_cut_at_places_that_fit_and_what_they_were_is_returned(
    facts: NodeFacts,
) -> None:
    tool = RecordedTool()

    before = cut_cards(tool, facts, settings(0, "1g.18gb", "3g.71gb", "1g.18gb", "1g.18gb", "1g.18gb"))

    cut, restores = tool.cuts[0]
    assert cut == {0: (*((("1g.18gb", start)) for start in range(4)), ("3g.71gb", 4))}
    assert restores == {0: tuple(("1g.18gb", start) for start in range(7))}
    assert before == settings(0, *["1g.18gb"] * 7)
    cut_cards(tool, facts, before)
    assert tool.cuts[1][0] == restores


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (settings(0, *["1g.18gb"] * 8), "8 × 1g.18gb do not fit on one H200-141GB"),
        (settings(0, "1g.10gb"), "H200-141GB has no profile 1g.10gb"),
        (settings(9), "a GPU of this machine that MIG can cut"),
        (GpuSettings(mig="all-disabled"), "on one machine the slices of its cards"),
        (GpuSettings(), "on one machine the slices of its cards"),
    ],
)
def test_what_is_not_possible_is_refused_before_anything_is_cut(
    facts: NodeFacts, asked: GpuSettings, words: str
) -> None:
    tool = RecordedTool()

    with pytest.raises(InvalidInput) as refused:
        cut_cards(tool, facts, asked)

    assert words in str(refused.value)
    assert tool.cuts == []


def test_a_node_of_a_cluster_is_labelled_and_its_old_labels_are_returned() -> None:
    there = LabelledNode()

    before = set_labels(there, "dgx-01", there.facts, GpuSettings(mig="falaj-1", sharing="mps-4"))

    labels = there.node["metadata"]["labels"]
    assert (labels["nvidia.com/mig.config"], labels["nvidia.com/device-plugin.config"]) == (
        "falaj-1",
        "mps-4",
    )
    assert "nvidia.com/mig.config.state" not in labels  # the MIG manager says anew how it fares
    assert before == GpuSettings(mig="all-disabled")
    assert there.facts.cluster is not None
    assert (there.facts.cluster.mig_config, there.facts.cluster.mig_state) == ("falaj-1", "")


def test_a_node_of_a_cluster_takes_names_only() -> None:
    there = LabelledNode()

    with pytest.raises(InvalidInput, match="on a cluster the name of a configuration"):
        set_labels(there, "dgx-01", there.facts, settings(0))
    assert there.node is DGX_H100
