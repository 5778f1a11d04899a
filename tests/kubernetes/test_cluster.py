"""The cluster of the tests is a real one, with nodes, GPUs and the addons."""

from __future__ import annotations

import pytest

from cluster_testbed import ADDONS, ClusterTestbed


def test_the_nodes_are_ready_and_offer_gpus(cluster: ClusterTestbed) -> None:
    nodes = cluster.get("nodes")["items"]

    assert len(nodes) >= 2
    for node in nodes:
        ready = next(each for each in node["status"]["conditions"] if each["type"] == "Ready")
        assert ready["status"] == "True"


@pytest.mark.parametrize("addon", ADDONS)
def test_the_addons_are_served(addons: ClusterTestbed, addon: str) -> None:
    assert addons.serves(addon)
