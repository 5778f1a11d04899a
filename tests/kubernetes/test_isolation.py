"""Workspaces of a real cluster are kept apart: by the standard of pods, by rights, and by who owns a namespace."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from cluster_testbed import ClusterTestbed
from falaj.drivers.kubernetes.isolation.policies import NAMESPACE, NETWORK_POLICY
from falaj.drivers.kubernetes.isolation.rights import ROLE_BINDING, role_binding
from falaj.drivers.kubernetes.manifests import KubernetesManifests
from falaj.drivers.kubernetes.pods import PodSettings, pod_template
from falaj.errors import Conflict, FalajError, Unavailable
from falaj.ports.cluster.namespaces import Tenant
from falaj.ports.launcher import Launch
from falaj.records.scheduling.snapshot import Quota
from falaj.records.training.jobs import JobState
from platform_account import PlatformAccount, platform_account
from pod_jobs import pod_jobs
from polling import eventually

DIGEST = "sha256:" + "a" * 64
IMAGE = f"registry.example.com/falaj-worker@{DIGEST}"
SETTINGS: dict[str, Any] = {
    "image": IMAGE,
    "images": ("registry.example.com/falaj-worker",),
    "agent_url": "tls://10.0.0.1:7482",
    "egress": ("0.0.0.0/0",),
}


@pytest.fixture(scope="module")
def account(
    cluster: ClusterTestbed, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[PlatformAccount, str]]:
    """Return the platform's account, and the namespace of its workspace `risk`."""
    prefix = f"fi-{uuid.uuid4().hex[:8]}"
    with (
        platform_account(cluster, tmp_path_factory.mktemp("account"), prefix=prefix, **SETTINGS) as made,
        closing(made.namespaces()) as namespaces,
    ):
        yield made, namespaces.ensure(Tenant("risk", Quota(gpus=4)))


def pod(namespace: str, prefix: str, **changes: Any) -> dict[str, Any]:
    """Return a pod of a job as the launcher makes it, with `changes` of its spec."""
    launch = Launch("job_1/1", Path("/x"), ["python3"], labels={"workspace": "risk"}, memory_bytes=1 << 20)
    template = pod_template(launch, PodSettings(IMAGE, prefix, "tls://10.0.0.1:7482", "home"))
    name = {"name": f"p-{uuid.uuid4().hex[:8]}", "namespace": namespace}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": name,
        "spec": template["spec"] | changes,
    }


def admit(cluster: ClusterTestbed, manifest: dict[str, Any]) -> str:
    return cluster.kubectl("create", "--dry-run=server", "-f", "-", stdin=json.dumps(manifest))


def test_a_pod_of_ours_is_admitted_and_others_are_not(account: tuple[PlatformAccount, str]) -> None:
    made, namespace = account
    prefix, spec = made.config.prefix, pod(namespace, account[0].config.prefix)["spec"]
    host = {"volumes": [*spec["volumes"], {"name": "host", "hostPath": {"path": "/etc"}}]}
    other = {"containers": [spec["containers"][0] | {"image": f"evil.example.com/falaj-worker@{DIGEST}"}]}
    moved = {"containers": [spec["containers"][0] | {"image": "registry.example.com/falaj-worker:1"}]}

    assert "created" in eventually(lambda: admit(made.cluster, pod(namespace, prefix)))
    with pytest.raises(AssertionError, match=r"violates PodSecurity.*hostPath"):
        admit(made.cluster, pod(namespace, prefix, **host))
    for image in (other, moved):  # an admission policy is known after some seconds
        eventually(lambda image=image: is_refused(made.cluster, pod(namespace, prefix, **image)))


def is_refused(cluster: ClusterTestbed, manifest: dict[str, Any]) -> bool:
    try:
        admit(cluster, manifest)
    except AssertionError as error:
        return "the image is not in kubernetes.images" in str(error)
    return False


def test_the_account_reaches_nothing_outside_its_namespaces(account: tuple[PlatformAccount, str]) -> None:
    made, namespace = account
    prefix = made.config.prefix

    for elsewhere in ("kube-system", "default", prefix):
        for verb in ("get", "list", "create"):
            assert not made.client.may(verb, "secrets", group="", namespace=elsewhere)
    assert made.client.may("get", "secrets", group="", namespace=namespace)
    for right in (
        ("delete", "namespaces", ""),
        ("create", "pods", ""),
        ("create", "clusterrolebindings", "rbac"),
    ):
        assert not made.client.may(right[0], right[1], group=right[2])
    with closing(KubernetesManifests(made.config)) as store:
        for error in (
            refusal(store, ROLE_BINDING, role_binding(made.config, "kube-system")),
            refusal(store, NAMESPACE, {"metadata": {"name": "evil"}}),
        ):
            assert "begin with" in error.message
        loose = {"metadata": {"name": f"{prefix}-loose"}}
        assert "enforce the Pod Security Standard" in refusal(store, NAMESPACE, loose).message
        stranger = {"kind": "User", "apiGroup": "rbac.authorization.k8s.io", "name": "mallory"}
        binding = role_binding(made.config, namespace, stranger)
        assert "to itself only" in refusal(store, ROLE_BINDING, binding).message


def refusal(store: KubernetesManifests, kind: Any, manifest: dict[str, Any]) -> FalajError:
    """Return why an object is not admitted; an admission policy is known after some seconds."""

    def refused() -> FalajError | None:
        try:
            store.apply(kind, {"apiVersion": kind.api_version, "kind": kind.kind, **manifest}, dry_run=True)
        except Conflict as error:
            return error
        return None

    return eventually(refused)


def test_what_others_changed_is_put_back_and_what_is_theirs_is_left_alone(
    account: tuple[PlatformAccount, str],
) -> None:
    made, namespace = account
    label = "pod-security.kubernetes.io/enforce"
    made.cluster.kubectl("label", "namespace", namespace, f"{label}=privileged", "--overwrite")
    opened = json.dumps({"spec": {"ingress": [{}], "egress": [{}]}})
    name = f"{made.config.prefix}-isolation"
    made.cluster.kubectl("patch", "networkpolicy", name, "-n", namespace, "--type=merge", "-p", opened)

    with closing(made.namespaces()) as namespaces:
        namespaces.ensure(Tenant("risk"))

        there = made.cluster.get("namespace", namespace)["metadata"]
        policy = made.cluster.get(NETWORK_POLICY.plural, name, "-n", namespace)["spec"]
        assert there["labels"][label] == "restricted"
        assert "ingress" not in policy or policy["ingress"] == []
        assert len(policy["egress"]) == 2
        assert made.cluster.get("resourcequota,limitrange", "-n", namespace)["items"] == []
        theirs = f"{made.config.prefix}-theirs"
        made.cluster.kubectl("create", "namespace", theirs)
        try:
            with pytest.raises(Unavailable, match="does not carry the labels of this platform"):
                namespaces.ensure(Tenant("theirs"))
            assert made.cluster.get("networkpolicies", "-n", theirs)["items"] == []
        finally:
            made.cluster.kubectl("delete", "namespace", theirs, "--wait=false")


def test_a_workspace_that_is_given_no_namespace_waits_and_says_what_to_do(
    cluster: ClusterTestbed, tmp_path: Path
) -> None:
    prefix = f"fg-{uuid.uuid4().hex[:8]}"
    with (
        platform_account(cluster, tmp_path, prefix=prefix, namespaces="given", **SETTINGS) as account,
        closing(account.namespaces()) as namespaces,
    ):
        with pytest.raises(Unavailable, match="an administrator makes it: falaj clusters render"):
            namespaces.ensure_for("risk")
        listed = {"apiVersion": "v1", "kind": "List", "items": namespaces.render([Tenant("risk")])}
        cluster.kubectl("apply", "--server-side", "-f", "-", stdin=json.dumps(listed))

        there = namespaces.ensure_for("risk")
        assert there == f"{prefix}-risk"
        eventually(lambda: account.client.may("create", "secrets", group="", namespace=there))
        assert not account.client.may("create", "namespaces", group="")


# ------------------------------------------------------------------------------------------- running jobs

WAITS = """
import os, time
print("token", os.path.exists("/var/run/secrets/kubernetes.io"), flush=True)
print("hello", os.environ["FALAJ_ATTEMPT"], flush=True)
while os.environ["FALAJ_ATTEMPT"] == "1":
    time.sleep(0.1)
"""


@pytest.mark.slow
def test_a_job_survives_the_deletion_of_its_namespace(
    worker_image: ClusterTestbed, namespace: str, tmp_path: Path
) -> None:
    with pod_jobs(worker_image, namespace, tmp_path) as jobs:
        job = jobs.submit(WAITS)
        eventually(lambda: "hello 1" in jobs.log(job))
        assert "token False" in jobs.log(job)

        worker_image.kubectl("delete", "namespace", jobs.namespace, "--wait=false")

        ended = jobs.ends(job)
        assert (ended.state, ended.attempt) == (JobState.DONE, 2), ended.reason
        labels = worker_image.get("namespace", jobs.namespace)["metadata"]["labels"]
        assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
