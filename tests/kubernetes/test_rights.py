"""The platform's account needs each of its rights: with all of them jobs run, and without one something named fails."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cluster_testbed import ClusterTestbed
from falaj.drivers.kubernetes.client import connect
from falaj.drivers.kubernetes.cluster import ApiCluster
from falaj.drivers.kubernetes.isolation.policies import NAMESPACE
from falaj.drivers.kubernetes.isolation.rights import Right, owned, rights_for
from falaj.drivers.kubernetes.launcher import KubernetesLauncher
from falaj.drivers.kubernetes.maintenance import KubernetesMaintenance
from falaj.drivers.kubernetes.manifests import KubernetesManifests
from falaj.drivers.kubernetes.nodes import KubernetesNodes
from falaj.drivers.kubernetes.pods import PodSettings, object_name
from falaj.drivers.kubernetes.watches import ObjectCache
from falaj.drivers.kubernetes.workloads import KueueWorkloads
from falaj.errors import FalajError, Unavailable
from falaj.ports.cluster.maintenance import CordonNote
from falaj.ports.cluster.manifests import ObjectKind
from falaj.ports.cluster.namespaces import Tenant
from falaj.ports.launcher import Launch, VolumeMount
from falaj.records.config import KubernetesConfig
from falaj.records.scheduling.cluster_names import namespace_of
from falaj.records.scheduling.snapshot import Quota
from falaj.records.training.jobs import JobState
from falaj.scheduling.kueue.render import KINDS as QUEUE_KINDS
from platform_account import PlatformAccount, platform_account
from pod_jobs import pod_jobs
from polling import eventually
from worker_image import IMAGE

SETTINGS: dict[str, Any] = {
    "scheduler": "kueue",
    "image": IMAGE,
    "agent_url": "tls://10.0.0.1:7482",
    "topology": ("kubernetes.io/hostname",),
    "volumes": {"data": {"claim": "data", "workspaces": ["rights"]}},
}
WORKSPACE = "rights"


@pytest.fixture(scope="module")
def account(
    addons: ClusterTestbed, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[PlatformAccount, str]]:
    """Return the platform's account, and the namespace of a workspace."""
    folder, prefix = tmp_path_factory.mktemp("account"), f"fr-{uuid.uuid4().hex[:8]}"
    with platform_account(addons, folder, prefix=prefix, **SETTINGS) as made:
        with closing(made.namespaces()) as namespaces:
            name = namespaces.ensure(Tenant(WORKSPACE))
        yield made, name


def test_with_all_rights_jobs_run_and_queues_are_applied(
    addons: ClusterTestbed, worker_image: ClusterTestbed, namespace: str, tmp_path: Path
) -> None:
    with (
        platform_account(addons, tmp_path, prefix=namespace, **SETTINGS) as account,
        pod_jobs(addons, namespace, tmp_path, objects="auto", kubeconfig=account.config.kubeconfig) as jobs,
    ):
        job = jobs.ends(jobs.submit("print('hello', flush=True)"))

        assert (job.state, job.reason) == (JobState.DONE, None), jobs.log(job)
        assert not jobs.platform.queues.apply().left
        assert [each.state for each in jobs.platform.clusters.apply().namespaces] == ["kept"]
        assert not jobs.platform.queues.diff().objects


# -------------------------------------------------------------------------------------------- one less


@pytest.mark.parametrize(
    "right",
    rights_for(KubernetesConfig(**SETTINGS)),
    ids=lambda right: f"{right.scope}-{right.verb}-{right.full_resource}",
)
def test_each_right_is_needed(account: tuple[PlatformAccount, str], right: Right, tmp_path: Path) -> None:
    made, namespace = account
    right = right._replace(name=f"{made.config.prefix}-workspace" if right.name else None)

    with made.without(right, namespace):
        refused = needs(right)(made, tmp_path, right)

    assert isinstance(refused, Unavailable)
    assert f"may not {right.verb} {right.full_resource}" in refused.message
    assert "falaj clusters render" in refused.message


Probe = Callable[[PlatformAccount, Path, Right], FalajError | None]


def needs(right: Right) -> Probe:
    """Return what the platform does that needs a right."""
    if right.resource == "workloads":
        return follow_workloads
    if right.group == "kueue.x-k8s.io":
        return keep_queue
    if right.resource == "nodes" and right.verb in ("get", "patch"):
        return cordon
    if right.resource in ("nodes", "resourceslices", "pods"):
        return follow
    if right.resource in MADE_WITH_NAMESPACES and (right.resource, right.verb) != ("networkpolicies", "get"):
        return make_namespace
    return launch


MADE_WITH_NAMESPACES = (
    *("namespaces", "rolebindings", "clusterroles", "networkpolicies", "resourcequotas", "limitranges"),
)


def follow(account: PlatformAccount, folder: Path, right: Right) -> FalajError | None:
    """Watch nodes, GPUs and pods, and return what was refused."""
    with (
        closing(KubernetesNodes(account.config)) as nodes,
        closing(ApiCluster(partial(connect, account.config), home="rights")) as cluster,
    ):
        cluster.pods("job_1/1")
        nodes._slices.known()
        nodes._nodes.known()
        caches: dict[str, ObjectCache[Any]] = {
            "nodes": nodes._nodes,
            "resourceslices": nodes._slices,
            "pods": cluster._cache,
        }
        return eventually(lambda: caches[right.resource].fault)


def follow_workloads(account: PlatformAccount, folder: Path, right: Right) -> FalajError | None:
    with closing(KueueWorkloads(partial(connect, account.config))) as workloads:
        workloads.find("job", namespace="none")
        return eventually(lambda: workloads._open()[1].fault)


def cordon(account: PlatformAccount, folder: Path, right: Right) -> FalajError | None:
    """Cordon a node; if that is not refused, undo it."""
    note = CordonNote(by="test", since=datetime.now(UTC), reason="")
    with (
        closing(KubernetesNodes(account.config)) as nodes,
        closing(KubernetesMaintenance(account.config, home="rights")) as maintenance,
    ):
        node = nodes.nodes()[0].name
        try:
            maintenance.cordon(node, note)
            maintenance.uncordon(node)
        except FalajError as error:
            return error
    return None


def make_namespace(account: PlatformAccount, folder: Path, right: Right) -> FalajError | None:
    workspace = uuid.uuid4().hex[:8]
    with closing(account.namespaces()) as namespaces:
        try:
            namespaces.ensure(Tenant(workspace, Quota(gpus=1)))
            namespaces.ensure(Tenant(workspace))
            namespaces.existing()
        except FalajError as error:
            return error
        finally:
            name = namespace_of(workspace, prefix=account.config.prefix)
            account.admin.delete(NAMESPACE, {"metadata": {"name": name}})
    return None


def launch(account: PlatformAccount, folder: Path, right: Right) -> FalajError | None:
    """Start an attempt twice, as after a kill, then ask about it, sweep it and delete it."""
    kinds = {"jobsets": "jobset", "trainjobs": "trainjob", "trainingruntimes": "trainjob"}
    for part in ("code", "inputs", "outputs"):
        (folder / "job" / part).mkdir(parents=True)
    given = Launch(
        attempt=f"job_{uuid.uuid4().hex[:8]}/1",
        directory=folder / "job",
        command=["python3", "x.py"],
        nodes=2,
        labels={"workspace": WORKSPACE, "queue": "none"},
        volumes=(VolumeMount("data", claim="data"),) if right.resource == "persistentvolumeclaims" else (),
    )
    with (
        closing(ApiCluster(partial(connect, account.config), home=given.attempt)) as cluster,
        closing(account.namespaces()) as namespaces,
    ):
        launcher = KubernetesLauncher(
            folder / "state",
            cluster,
            PodSettings(
                IMAGE, account.config.prefix, "tls://10.0.0.1:7482", given.attempt, scheduler="kueue"
            ),
            namespaces=namespaces,
            objects=kinds.get(right.resource, "job"),  # type: ignore[arg-type]
            secret_of=lambda attempt: "secret",
            certificate=lambda: "PEM",
            lease_left_s=lambda: 10.0,
            fence_s=20.0,
        )
        created = launcher._attempt(given.attempt).created_file
        try:
            start(launcher, given)
            created.unlink()  # as if it had been killed before that was written
            start(launcher, given)
            cluster.explain(object_name(given.attempt), namespace=namespaces.ensure_for(WORKSPACE))
            launcher.sweep(lambda attempt: True)
            created.unlink()
            launcher.delete(given.attempt)
        except FalajError as error:
            return error
    return None


def start(launcher: KubernetesLauncher, given: Launch) -> None:
    """Start an attempt; again while a webhook has not seen what was created for it, as the platform does later."""

    def is_seen() -> bool:
        try:
            launcher.start(given)
        except Unavailable as error:
            if "has not seen" not in error.message:
                raise
            return False
        return True

    eventually(is_seen)


def keep_queue(account: PlatformAccount, folder: Path, right: Right) -> FalajError | None:
    """Keep an object of Kueue as `falaj queues apply` does: look for it, create it, change it, delete it."""
    kind = next(each for each in QUEUE_KINDS.values() if each.plural == right.resource)
    manifest = queue_object(account, kind)
    with closing(KubernetesManifests(account.config)) as store:
        try:
            store.owned(kind)
            store.find(kind, manifest)
            store.apply(kind, manifest)
            store.delete(kind, manifest)
        except FalajError as error:
            return error
    return None


def queue_object(account: PlatformAccount, kind: ObjectKind) -> dict[str, Any]:
    config, name = account.config, f"{account.config.prefix}-{uuid.uuid4().hex[:8]}"
    within = f"{config.prefix}-{WORKSPACE}" if kind.namespaced else None
    specs: dict[str, dict[str, Any]] = {
        "Topology": {"spec": {"levels": [{"nodeLabel": "kubernetes.io/hostname"}]}},
        "LocalQueue": {"spec": {"clusterQueue": "none"}},
        "WorkloadPriorityClass": {"value": 1},
    }
    return {
        "apiVersion": kind.api_version,
        "kind": kind.kind,
        "metadata": owned(config, name, namespace=within),
        **specs.get(kind.kind, {"spec": {}}),
    }
