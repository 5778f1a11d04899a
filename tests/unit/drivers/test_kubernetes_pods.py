"""The pods of an attempt as manifests: names, labels, security and the three kinds of objects."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from falaj.drivers.kubernetes.inventory.node_facts import facts_of
from falaj.drivers.kubernetes.launcher import check_for_pods
from falaj.drivers.kubernetes.pods import (
    PodSettings,
    credentials,
    gpu_resources,
    label_value,
    object_name,
)
from falaj.drivers.kubernetes.remote_attempt import Objects
from falaj.drivers.kubernetes.renderings import RENDERINGS, choose
from falaj.errors import InvalidInput
from falaj.ports.launcher import Launch, VolumeMount
from falaj.records.config import KubernetesConfig
from recorded_nodes import DGX_H100, MIG_MIXED, MIG_SINGLE, RENAMED, TIME_SLICED

ATTEMPT = "job_01m7hrvf7pkpmtydws1kt40kg7/12"
LAUNCH = Launch(
    attempt=ATTEMPT,
    directory=Path("/x"),
    command=["python3", "train.py"],
    cpus=4,
    memory_bytes=1 << 30,
    gpus=("a", "b"),
    timeout_s=60,
    hosts=("node-1",),
    labels={"name": "fitting", "workspace": "default", "queue": "a queue with spaces, and " + "x" * 80},
)
SETTINGS = PodSettings("worker:1", "falaj", "tls://10.0.0.1:7482", "home_1")
DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")


def template_of(kind: Objects, launch: Launch = LAUNCH, settings: PodSettings = SETTINGS) -> dict[str, Any]:
    """Return the template of the pods in what a rendering makes."""
    found = RENDERINGS[kind].render(launch, settings)[0]["spec"]
    while "template" in found or "replicatedJobs" in found:
        found = found["replicatedJobs"][0] if "replicatedJobs" in found else found["template"]
        found = found["spec"] if "spec" in found and "containers" not in found.get("spec", {}) else found
        if "containers" in found.get("spec", {}):
            break
    return dict(found)


@pytest.mark.parametrize("kind", RENDERINGS)
def test_every_kind_has_the_same_restricted_pods(kind: Objects) -> None:
    template = template_of(kind)

    pod, container = template["spec"], template["spec"]["containers"][0]
    assert pod["restartPolicy"] == "Never"
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert container["resources"]["requests"] == {"cpu": "4", "memory": str(1 << 30), "nvidia.com/gpu": "2"}
    assert pod["activeDeadlineSeconds"] > 60
    assert template["metadata"]["labels"]["falaj.dev/job"] == "job_01m7hrvf7pkpmtydws1kt40kg7"
    assert template["metadata"]["annotations"]["falaj.dev/attempt-name"] == ATTEMPT
    assert template["metadata"]["annotations"]["cluster-autoscaler.kubernetes.io/safe-to-evict"] == "false"
    assert template["metadata"]["annotations"]["karpenter.sh/do-not-disrupt"] == "true"
    terms = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert terms["nodeSelectorTerms"][0]["matchFields"][0]["values"] == ["node-1"]


@pytest.mark.parametrize("kind", RENDERINGS)
def test_pods_of_several_nodes_find_each_other_and_run_apart(kind: Objects) -> None:
    launch = replace(LAUNCH, nodes=2, hosts=("node-0", "node-1"))

    peers = RENDERINGS[kind].peers(launch)

    assert len(set(peers)) == 2
    assert all(DNS_LABEL.fullmatch(part) and len(part) <= 63 for peer in peers for part in peer.split("."))
    affinity = template_of(kind, launch)["spec"]["affinity"]
    assert (
        len(affinity["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"])
        == 2
    )
    assert "podAntiAffinity" in affinity


@pytest.mark.parametrize("recorded", [DGX_H100, MIG_MIXED, MIG_SINGLE, TIME_SLICED, RENAMED])
def test_pods_ask_for_the_resource_whose_units_were_placed(recorded: dict[str, Any]) -> None:
    gpus = facts_of(recorded, KubernetesConfig()).gpus
    offered = recorded["status"]["allocatable"]

    for profile in {gpu.profile for gpu in gpus}:
        placed = tuple(gpu.id for gpu in gpus if gpu.profile == profile)
        asked = template_of("job", replace(LAUNCH, gpus=placed))["spec"]["containers"][0]["resources"]
        named = {name: count for name, count in asked["limits"].items() if name.startswith("nvidia.com/")}

        assert named == {name: offered[name] for name in named}
        assert len(named) == 1
        assert asked["requests"].items() >= named.items()


@pytest.mark.parametrize(
    ("gpus", "resource"),
    [
        (("a/mig-1g.10gb-0", "b/mig-1g.10gb-6"), "nvidia.com/mig-1g.10gb"),
        (("a/mig-1g.10gb.shared-0", "b/mig-1g.10gb.shared-11"), "nvidia.com/mig-1g.10gb.shared"),
        (("a/gpu.shared-3", "b/gpu.shared-0"), "nvidia.com/gpu.shared"),
        (("a/mig-1g.10gb.me-0", "b/mig-1g.10gb.me-0"), "nvidia.com/mig-1g.10gb.me"),
    ],
)
def test_each_pod_of_several_asks_for_its_own_part(gpus: tuple[str, ...], resource: str) -> None:
    assert gpu_resources(replace(LAUNCH, nodes=2, gpus=gpus)) == {resource: 1}


def test_gpus_that_one_template_cannot_ask_for_are_refused() -> None:
    mixed = replace(LAUNCH, nodes=2, gpus=("a/mig-1g.10gb-0", "b/gpu-3"))
    of_dra = replace(LAUNCH, gpus=("GPU-4cf8db2d-06c0-7d70-1a51-e59b25b2c160",))

    with pytest.raises(InvalidInput, match=r"nvidia\.com/gpu and nvidia\.com/mig-1g\.10gb"):
        check_for_pods(mixed, SETTINGS)
    with pytest.raises(InvalidInput, match="DRA"):
        check_for_pods(of_dra, SETTINGS)


def test_pods_tolerate_what_the_configuration_says_and_nothing_else() -> None:
    settings, plain = replace(SETTINGS, tolerate=("nvidia.com/gpu", "dedicated")), replace(LAUNCH, gpus=())
    keys = [{"key": "nvidia.com/gpu", "operator": "Exists"}, {"key": "dedicated", "operator": "Exists"}]

    assert "tolerations" not in template_of("job")["spec"]
    assert template_of("job", settings=settings)["spec"]["tolerations"] == keys
    assert template_of("job", plain, settings)["spec"]["tolerations"] == keys
    kueue = replace(settings, scheduler="kueue")
    assert "tolerations" not in template_of("job", plain, kueue)["spec"]  # its flavor brings them


def test_labels_of_a_launch_cannot_lie_about_the_job_or_its_network() -> None:
    lying = replace(
        LAUNCH, labels=dict(LAUNCH.labels) | {"network": "allowed", "job": "job_2", "home": "home_2"}
    )

    labels = template_of("job", lying)["metadata"]["labels"]

    assert labels["falaj.dev/network"] == "none"
    assert labels["falaj.dev/job"] == "job_01m7hrvf7pkpmtydws1kt40kg7"
    assert labels["falaj.dev/home"] == "home_1"


@pytest.mark.parametrize(
    "attempt", [ATTEMPT, "job_1/1", "x" * 190 + "/1", "Ünïcode job/1", "a_b/1", "a-b/1", "-/-"]
)
def test_names_and_labels_are_valid_whatever_the_attempt_is_called(attempt: str) -> None:
    name = object_name(attempt)

    assert DNS_LABEL.fullmatch(name)
    assert len(name) <= 40
    assert re.fullmatch(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?", label_value(attempt))


def test_names_of_different_attempts_differ() -> None:
    names = {
        object_name(each)
        for each in ("a_b/1", "a-b/1", "a_b/11", "a_b1/1", "x" * 190 + "/1", "x" * 190 + "/2")
    }

    assert len(names) == 6


def test_the_secret_is_all_that_a_pod_knows() -> None:
    made = credentials(LAUNCH, SETTINGS, secret="s3cret", certificate="PEM")

    assert made["stringData"] == {"secret": "s3cret", "certificate": "PEM"}
    assert "s3cret" not in str([RENDERINGS[kind].render(LAUNCH, SETTINGS) for kind in RENDERINGS])


def test_auto_takes_the_highest_kind_that_is_served() -> None:
    assert choose("auto", served={"batch"}) == "job"
    assert choose("auto", served={"jobset.x-k8s.io"}) == "jobset"
    assert choose("auto", served={"jobset.x-k8s.io", "trainer.kubeflow.org"}) == "trainjob"
    assert choose("job", served={"trainer.kubeflow.org"}) == "job"


@pytest.mark.parametrize("kind", RENDERINGS)
def test_pods_mount_the_claims_of_the_job_and_no_folder_of_their_node(kind: Objects) -> None:
    volumes = (
        VolumeMount("raw", claim="data", path="a/raw"),
        VolumeMount("made", claim="data", path="a/made", read_only=False),
        VolumeMount("models.v2", claim="models.v2"),
    )
    settings = replace(SETTINGS, scratch_bytes=1 << 30, scratch_class="fast")

    pod = template_of(kind, replace(LAUNCH, volumes=volumes), settings)["spec"]

    found = {each["name"]: each for each in pod["volumes"]}
    mounted = {each["mountPath"]: each for each in pod["containers"][0]["volumeMounts"]}
    assert not any("hostPath" in each for each in found.values())
    data, models = (found[mounted[f"/volumes/{name}"]["name"]] for name in ("raw", "models.v2"))
    assert data["persistentVolumeClaim"] == {"claimName": "data"}
    assert models["persistentVolumeClaim"] == {"claimName": "models.v2", "readOnly": True}
    assert mounted["/volumes/made"]["name"] == data["name"]
    assert [mounted[f"/volumes/{name}"]["readOnly"] for name in ("raw", "made", "models.v2")] == [
        True,
        False,
        True,
    ]
    assert mounted["/volumes/raw"]["subPath"] == "a/raw"
    claim = found["work"]["ephemeral"]["volumeClaimTemplate"]["spec"]
    assert (claim["storageClassName"], claim["resources"]["requests"]["storage"]) == ("fast", str(1 << 30))
    assert found["tmp"]["emptyDir"] == {"sizeLimit": str(1 << 30)}
    assert all(DNS_LABEL.fullmatch(name) for name in found)


def test_more_disk_than_pods_have_is_refused() -> None:
    settings = replace(SETTINGS, scratch_bytes=1 << 30)

    check_for_pods(replace(LAUNCH, disk_bytes=1 << 30), settings)
    with pytest.raises(InvalidInput, match=r"kubernetes\.scratch"):
        check_for_pods(replace(LAUNCH, disk_bytes=(1 << 30) + 1), settings)
