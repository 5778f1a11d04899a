"""The nodes of clusters get the zones that their labels map to, and those that take no jobs are cordoned."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest

from falaj.assembly.cluster_nodes import ClusterPools
from falaj.assembly.compute import LocalCompute
from falaj.assembly.drivers import open_manifests
from falaj.assembly.home import open_home
from falaj.drivers.kubernetes.inventory.gpu_devices import resource_of_device
from falaj.drivers.kubernetes.inventory.node_facts import facts_of
from falaj.errors import FalajError, Unavailable
from falaj.ports.machine.hardware import ClusterNode, NodeFacts
from falaj.records.config import Config, KubernetesConfig, ZoneConfig
from falaj.records.governance.residency import Zone
from falaj.records.scheduling.snapshot import Node, Price
from recorded_nodes import CONTROL_PLANE, CPU_ONLY, DGX_H100, MIG_MIXED

DUBAI, FRANKFURT = ZoneConfig(jurisdiction="AE"), ZoneConfig(jurisdiction="DE")


@dataclass
class FakeInventory:
    """The nodes of a cluster; none: it has not answered yet."""

    found: list[NodeFacts] | None
    fault: FalajError | None = None

    def __call__(self) -> FakeInventory:
        return self

    def begin(self) -> None:
        return

    def nodes(self) -> list[NodeFacts]:
        if self.found is None:
            raise Unavailable("cannot list nodes: the API server cannot be reached")
        return list(self.found)


def machines(found: list[NodeFacts], config: Config) -> tuple[tuple[NodeFacts, Node], ...]:
    return ClusterPools({None: FakeInventory(found)}, config).machines()


def zones(config: Config) -> dict[str, tuple[str, str]]:
    assert config.kubernetes is not None
    recorded = (DGX_H100, CPU_ONLY, MIG_MIXED, CONTROL_PLANE)
    found = [facts_of(each, config.kubernetes) for each in recorded]
    return {node.name: (node.zone, node.jurisdiction) for _, node in machines(found, config)}


def test_nodes_are_in_the_zones_of_their_labels() -> None:
    cluster = KubernetesConfig(zones={"me-central-1": "dubai", "eu-central-1": "frankfurt"})
    config = Config(zones={"dubai": DUBAI, "frankfurt": FRANKFURT}, kubernetes=cluster)

    assert zones(config) == {
        "dgx-01": ("dubai", "AE"),
        "cpu-7": ("frankfurt", "DE"),
        "a100-mig": ("unknown", "ZZ"),  # without a label, nothing that is restricted runs there
        "cp-0": ("unknown", "ZZ"),
    }


def test_a_node_that_takes_no_pods_or_is_lost_takes_no_jobs() -> None:
    cluster = KubernetesConfig()
    cordoned, ready = facts_of(CONTROL_PLANE, cluster), facts_of(CPU_ONLY, cluster)
    lost = replace(facts_of(DGX_H100, cluster), cluster=ClusterNode(state="lost"))

    found = machines([cordoned, ready, lost], Config(zones={"dubai": DUBAI}, kubernetes=cluster))

    assert {node.name: node.cordoned for _, node in found} == {"cp-0": True, "cpu-7": False, "dgx-01": True}


def test_nodes_that_have_not_changed_are_not_converted_again(tmp_path: Path) -> None:
    """A controller asks for them ten times a second."""
    cluster = KubernetesConfig()
    config = Config(zones={"dubai": DUBAI}, kubernetes=cluster)
    home = open_home(tmp_path / "home", tmp_path / "config")
    compute: Any = LocalCompute(home, config, cast(Any, None), Zone(name="dubai", jurisdiction="AE"))
    listed = [facts_of(each, cluster) for each in (CPU_ONLY, DGX_H100)]
    pools = ClusterPools({None: FakeInventory(listed)}, config)
    vars(compute).update(_clusters={None: object()}, _pools=pools)

    first, again = compute.nodes(), compute.nodes()
    listed[0] = replace(listed[0], cluster=ClusterNode(state="lost"))
    changed = compute.nodes()

    assert [one is other for one, other in zip(first, again, strict=True)] == [True, True]
    assert [node.name for node in changed] == ["dgx-01"]
    assert changed[0] is first[1]


# ------------------------------------------------------------------------------------------ several clusters


def several(**clusters: dict[str, Any]) -> Config:
    made = {name: {"context": name} | each for name, each in clusters.items()}
    return Config.model_validate(
        {
            "zones": {"dubai": {"jurisdiction": "AE"}, "frankfurt": {"jurisdiction": "DE"}},
            "prices": {"currency": "AED", "cpu_hour": 1.0, "gpu_hour": 10.0},
            "kubernetes": {"kubeconfig": "/etc/k", "clusters": made},
        }
    )


def test_each_cluster_is_a_pool_with_its_zone_price_and_burst_mark() -> None:
    config = several(
        home={"zone": "dubai"}, cloud={"zone": "frankfurt", "burst": True, "prices": {"gpu_hour": 30.0}}
    )
    dgx = facts_of(DGX_H100, KubernetesConfig())

    found = ClusterPools({"home": FakeInventory([dgx]), "cloud": FakeInventory([dgx])}, config).machines()

    home, cloud = (node for _, node in found)
    assert [(each.name, each.pool, each.cluster, each.zone) for each in (home, cloud)] == [
        ("home.dgx-01", "home", "home", "dubai"),
        ("cloud.dgx-01", "cloud", "cloud", "frankfurt"),
    ]
    assert [each.burst for each in (home, cloud)] == ["burst" in home.labels, "burst" in cloud.labels]
    assert (home.burst, cloud.burst) == (False, True)
    assert (home.price, cloud.price) == (Price(cpu=1.0, gpu=10.0), Price(cpu=1.0, gpu=30.0))
    ids = [gpu.id for each in (home, cloud) for gpu in each.gpus]
    assert len(set(ids)) == len(ids) == 16
    assert (ids[0], resource_of_device(ids[0])) == ("home.dgx-01/gpu-0", "nvidia.com/gpu")


def test_a_label_that_maps_to_a_zone_comes_before_the_zone_of_the_cluster() -> None:
    config = several(home={"zone": "dubai"})
    assert config.kubernetes is not None
    mapped = config.kubernetes.model_copy(update={"zones": {"eu-central-1": "frankfurt"}})
    found = [facts_of(each, mapped) for each in (CPU_ONLY, MIG_MIXED)]

    made = ClusterPools({"home": FakeInventory(found)}, config.model_copy(update={"kubernetes": mapped}))

    assert [node.zone for _, node in made.machines()] == ["frankfurt", "dubai"]


def test_a_cluster_that_does_not_answer_takes_no_jobs_and_disturbs_no_other() -> None:
    config, plain = several(home={}, cloud={}), KubernetesConfig()
    home = FakeInventory([facts_of(CPU_ONLY, plain)])
    cloud = FakeInventory(None, fault=Unavailable("cannot list nodes"))
    pools = ClusterPools({"home": home, "cloud": cloud}, config)

    assert [node.name for _, node in pools.machines()] == ["home.cpu-7"]
    assert pools.is_unseen("cloud.dgx-01")
    assert not pools.is_unseen("home.cpu-7")
    cloud.found, cloud.fault = [facts_of(DGX_H100, plain)], None
    assert [(node.name, node.cordoned) for _, node in pools.machines()] == [
        ("home.cpu-7", False),
        ("cloud.dgx-01", False),
    ]
    assert not pools.is_unseen("cloud.dgx-01")
    cloud.fault = Unavailable("it cannot be reached")
    _, (facts, node) = pools.machines()
    assert node.cordoned
    assert facts.cluster is not None
    assert facts.cluster.reason == "cluster cloud does not answer: it cannot be reached"
    home.found, cloud.found = None, None
    with pytest.raises(Unavailable):
        pools.machines()


def test_without_a_mapping_a_single_zone_is_meant() -> None:
    one = Config(zones={"dubai": DUBAI}, kubernetes=KubernetesConfig())
    two = Config(zones={"dubai": DUBAI, "frankfurt": FRANKFURT}, kubernetes=KubernetesConfig())

    assert set(zones(one).values()) == {("dubai", "AE")}
    assert set(zones(two).values()) == {("unknown", "ZZ")}


def test_a_missing_client_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [each for each in sys.modules if each.startswith("falaj.drivers.kubernetes")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lightkube", None)

    with pytest.raises(Unavailable, match=r"needs the package lightkube: pip install 'falaj\[kubernetes\]'"):
        open_manifests(KubernetesConfig())
