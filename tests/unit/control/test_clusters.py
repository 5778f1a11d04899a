"""The operations on the cluster that jobs run on: what they need, and who may call them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from falaj.control.clusters import Clusters
from falaj.errors import ConfigInvalid, Denied, InvalidInput, NotFound, Unavailable
from falaj.governance.operations.caller import acting_as
from falaj.ports.cluster.namespaces import Tenant
from falaj.records.governance.identity import Role
from falaj.records.scheduling.snapshot import Quota
from platforms import OwnPlatform


class FakeNamespaces:
    """Namespaces in memory; that of `refused` is someone else's."""

    def __init__(self) -> None:
        self.made: dict[str, Tenant] = {}
        self.refused = ""

    def render(self, tenants: Iterable[Tenant]) -> list[Any]:
        return [{"kind": "Namespace", "metadata": {"name": each.workspace}} for each in tenants]

    def ensure(self, tenant: Tenant) -> str:
        if tenant.workspace == self.refused:
            raise Unavailable("namespace falaj-risk exists, and does not carry the labels of this platform")
        self.made[tenant.workspace] = tenant
        return f"falaj-{tenant.workspace}"

    def existing(self) -> dict[str, str]:
        return {f"falaj-{name}": name for name in (*self.made, "gone")}


def test_namespaces_of_all_workspaces_are_kept_and_one_that_is_refused_stops_no_other(
    light_platform: OwnPlatform,
) -> None:
    namespaces = FakeNamespaces()
    clusters = Clusters(light_platform.parts.gate, {None: namespaces}, prefix="falaj")
    for name in ("risk", "fraud"):
        light_platform.workspaces.create(name)
    light_platform.queues.set("default", quota=Quota(gpus=4))
    namespaces.refused = "risk"

    done = clusters.apply().namespaces

    assert {(each.namespace, each.state) for each in done} == {
        *(("falaj-default", "kept"), ("falaj-fraud", "kept"), ("falaj-risk", "refused")),
        ("falaj-gone", "extra"),
    }
    assert namespaces.made["fraud"].limits == Quota(gpus=4)
    assert [each["metadata"]["name"] for each in clusters.render().manifests] == ["default", "risk", "fraud"]


def test_without_a_cluster_the_fix_is_named(light_platform: OwnPlatform) -> None:
    for call in (light_platform.clusters.render, light_platform.clusters.apply):
        with pytest.raises(ConfigInvalid, match=r"\[kubernetes\] kubeconfig"):
            call()


def test_only_operators_see_and_change_the_cluster(light_platform: OwnPlatform) -> None:
    clusters = Clusters(light_platform.parts.gate, {None: FakeNamespaces()}, prefix="falaj")

    with acting_as(light_platform.join("dana", Role.DEVELOPER)):
        for call in (clusters.render, clusters.apply):
            with pytest.raises(Denied):
                call()


def test_of_several_clusters_all_are_made_and_one_is_rendered(light_platform: OwnPlatform) -> None:
    home, cloud = FakeNamespaces(), FakeNamespaces()
    clusters = Clusters(light_platform.parts.gate, {"home": home, "cloud": cloud}, prefix="falaj")

    done = clusters.apply().namespaces

    assert [(each.cluster, each.workspace, each.state) for each in done] == [
        *(("home", "default", "kept"), ("home", "gone", "extra")),
        *(("cloud", "default", "kept"), ("cloud", "gone", "extra")),
    ]
    assert {each.cluster for each in clusters.apply(cluster="cloud").namespaces} == {"cloud"}
    assert len(clusters.render(cluster="home").manifests) == 1
    with pytest.raises(InvalidInput, match="one of home, cloud: each has its own"):
        clusters.render()
    with pytest.raises(NotFound, match="there is no cluster mars; the clusters are: home, cloud"):
        clusters.render(cluster="mars")
