"""Objects of attempts that Kueue places: suspended, labelled as the rendered queues are, and limited to their zones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from falaj.drivers.kubernetes.pods import PodSettings
from falaj.drivers.kubernetes.renderings import RENDERINGS
from falaj.ports.launcher import Launch, OpenPlacement
from falaj.records.config import KubernetesConfig
from falaj.records.scheduling.snapshot import Queue
from falaj.scheduling.kueue.render import SharedQueue, render

SETTINGS = PodSettings("worker:1", "acme", "tls://10.0.0.1:7482", "home_1", scheduler="kueue")
ZONES = {"me-1": "dubai", "me": "dubai", "eu-1": "frankfurt", "eu": "frankfurt"}
QUEUE = "risk.models_of_" + "x" * 80


def launch(placement: OpenPlacement, *, nodes: int = 1) -> Launch:
    return Launch(
        attempt="job_1/1",
        directory=Path("/work"),
        command=["python3"],
        nodes=nodes,
        labels={"queue": QUEUE, "workspace": "default"},
        open_placement=placement,
    )


def pod_template(placement: OpenPlacement, *, nodes: int = 1, **settings: Any) -> dict[str, Any]:
    (job,) = RENDERINGS["job"].render(launch(placement, nodes=nodes), replace(SETTINGS, **settings))
    template: dict[str, Any] = job["spec"]["template"]
    return template


def terms(placement: OpenPlacement, **settings: Any) -> list[dict[str, Any]]:
    affinity = pod_template(placement, **settings)["spec"].get("affinity", {})
    limits: dict[str, Any] = affinity.get("nodeAffinity", {})
    found: list[dict[str, Any]] = limits.get("requiredDuringSchedulingIgnoredDuringExecution", {}).get(
        "nodeSelectorTerms", []
    )
    return found


@pytest.mark.parametrize("kind", ["trainjob", "jobset", "job"])
@pytest.mark.parametrize(("priority", "name"), [(0, "acme-normal"), (1000, "acme-high"), (1500, "acme-high")])
def test_queue_and_priority_have_the_names_of_the_rendered_objects(
    kind: Any, priority: int, name: str
) -> None:
    shared = SharedQueue(Queue(name=QUEUE), ("default",))
    rendered = render([shared], [], KubernetesConfig(prefix="acme"))
    names = {(each["kind"], each["metadata"]["name"]) for each in rendered}

    owner = RENDERINGS[kind].render(launch(OpenPlacement(priority=priority)), SETTINGS)[-1]

    labels = owner["metadata"]["labels"]
    assert owner["spec"]["suspend"] is True
    assert ("LocalQueue", labels["kueue.x-k8s.io/queue-name"]) in names
    assert labels["kueue.x-k8s.io/priority-class"] == name
    assert ("WorkloadPriorityClass", name) in names


def matches(node: dict[str, str], found: list[dict[str, Any]]) -> bool:
    """Return whether a node with these labels satisfies one of the terms, as the scheduler of the cluster sees it."""

    def holds(each: dict[str, Any]) -> bool:
        value = node.get(each["key"])
        if each["operator"] == "In":
            return value in each["values"]
        return value is None if each["operator"] == "DoesNotExist" else value not in each["values"]

    return any(all(holds(each) for each in term["matchExpressions"]) for term in found)


@pytest.mark.parametrize(
    ("zone", "region", "is_permitted"),
    [
        ("me-1", None, True),
        ("me-1", "eu", True),  # the zone counts
        ("unmapped", "me", True),
        (None, "me", True),
        ("eu-1", "me", False),
        ("eu-1", None, False),
        (None, "eu", False),
        ("unmapped", None, False),
        (None, None, False),
    ],
)
def test_a_restricted_job_runs_only_in_its_zones(
    zone: str | None, region: str | None, is_permitted: bool
) -> None:
    labels = {"topology.kubernetes.io/zone": zone, "topology.kubernetes.io/region": region}
    node = {key: value for key, value in labels.items() if value is not None}

    assert matches(node, terms(OpenPlacement(zones=("dubai",)), zones=ZONES)) is is_permitted
    assert not matches(node, terms(OpenPlacement(zones=()), zones=ZONES))


def test_an_unrestricted_job_and_a_platform_with_one_zone_need_no_affinity() -> None:
    assert terms(OpenPlacement(), zones=ZONES) == []
    assert terms(OpenPlacement(zones=("local",))) == []


def test_a_job_that_names_kinds_of_nodes_is_limited_to_those_that_are_so() -> None:
    found = terms(OpenPlacement(zones=("dubai",), machines=("a", "b")), zones=ZONES)

    assert {term["matchFields"][0]["values"][0] for term in found} == {"a", "b"}
    assert all(term["matchExpressions"] for term in found)


def test_gangs_are_kept_together_by_topology_or_spread_over_nodes() -> None:
    levels = ("cloud/block", "cloud/rack")

    def notes(placement: OpenPlacement, **options: Any) -> dict[str, str]:
        found: dict[str, str] = pod_template(placement, **options)["metadata"]["annotations"]
        return {key: value for key, value in found.items() if key.startswith("kueue")}

    assert notes(OpenPlacement(), nodes=2, topology=levels) == {
        "kueue.x-k8s.io/podset-preferred-topology": "cloud/rack"
    }
    assert notes(OpenPlacement(together=True), nodes=2, topology=levels) == {
        "kueue.x-k8s.io/podset-required-topology": "cloud/rack"
    }
    assert notes(OpenPlacement(), nodes=1, topology=levels) == notes(OpenPlacement(), nodes=2) == {}
    spread = pod_template(OpenPlacement(spread=True), nodes=2)["spec"]["affinity"]
    assert "podAntiAffinity" in spread
