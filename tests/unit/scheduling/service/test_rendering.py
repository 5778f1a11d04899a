"""The operations that render queues for Kueue: what they need, and who may call them."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest

from falaj.drivers.kubernetes.inventory.node_facts import facts_of
from falaj.errors import ConfigInvalid, Denied
from falaj.ports.cluster.manifests import ManifestStore
from falaj.ports.machine.hardware import NodeFacts
from falaj.records.config import KubernetesConfig
from falaj.records.governance.identity import Role
from falaj.records.scheduling.snapshot import Quota
from falaj.scheduling.kueue.sync import KueueCluster
from falaj.scheduling.service import Queues
from recorded_nodes import DGX_H100

if TYPE_CHECKING:
    from conftest import SchedulingServices


class Nodes:
    """An inventory with one node."""

    def nodes(self) -> list[NodeFacts]:
        return [facts_of(DGX_H100, KubernetesConfig())]


def with_kueue(services: SchedulingServices) -> Queues:
    """Return the service of queues on a cluster whose objects nobody can reach."""
    queues = services.queues
    store = cast(ManifestStore, None)
    queues._systems = {"kueue": KueueCluster(KubernetesConfig(), Nodes(), store)}
    return queues


def test_queues_are_rendered_with_the_workspaces_that_they_are_open_to(services: SchedulingServices) -> None:
    services.workspace("risk")
    queues = with_kueue(services)
    queues.set("risk", quota=Quota(gpus=4), workspaces=("risk",))

    made = queues.render().manifests

    local = [
        (each["metadata"]["namespace"], each["metadata"]["name"])
        for each in made
        if each["kind"] == "LocalQueue"
    ]
    assert local == [("falaj-default", "default"), ("falaj-risk", "default"), ("falaj-risk", "risk")]
    assert {each["kind"] for each in made} == {
        *("ResourceFlavor", "Cohort", "ClusterQueue", "LocalQueue", "WorkloadPriorityClass"),
    }


def test_without_a_cluster_there_is_nothing_to_render_for(light_services: SchedulingServices) -> None:
    for call in (light_services.queues.render, light_services.queues.diff, light_services.queues.apply):
        with pytest.raises(ConfigInvalid, match=r"\[kubernetes\] kubeconfig"):
            call()


def test_only_operators_render_and_apply_queues(light_services: SchedulingServices) -> None:
    queues = with_kueue(light_services)

    with light_services.acting("dana", Role.DEVELOPER):
        for call in (queues.render, queues.diff, queues.apply):
            with pytest.raises(Denied):
                call()
