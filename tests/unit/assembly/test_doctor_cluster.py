"""What `falaj doctor` says about a cluster: also where there is none, or one that never answers."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from falaj.assembly.doctor import cluster as cluster_checks
from falaj.assembly.doctor.findings import DoctorContext
from falaj.assembly.home import Home
from falaj.drivers.kubernetes.isolation import examination
from falaj.drivers.kubernetes.isolation.examination import ClusterExamination, ClusterNamespace, policy_engine
from falaj.records.config import Config, KubernetesConfig
from falaj.records.doctor import Finding

FOUND = ClusterExamination(
    server="https://10.0.0.1:6443",
    version="v1.37.0",
    served=("JobSet",),
    missing=(),
    asked=40,
    unasked=0,
    namespaces=(ClusterNamespace("falaj-risk", "restricted"),),
    policy_engine="Cilium",
    sees_daemons=True,
)


def examined(folder: Path, **settings: Any) -> dict[str, Finding]:
    config = Config(kubernetes=KubernetesConfig(**settings))
    context = DoctorContext(Home(folder, folder, ""), config)
    return {each.check: each for each in cluster_checks.check_cluster(context)}


def kubeconfig(folder: Path, port: int) -> Path:
    path = folder / "kubeconfig"
    cluster = {"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}
    path.write_text(
        json.dumps(
            {
                "current-context": "c",
                "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
                "clusters": [cluster],
                "users": [{"name": "u", "user": {"token": "t"}}],
            }
        )
    )
    return path


def test_without_a_cluster_nothing_is_said(tmp_path: Path) -> None:
    context = DoctorContext(Home(tmp_path, tmp_path, ""), Config())

    assert list(cluster_checks.check_cluster(context)) == []


def test_a_cluster_that_never_answers_does_not_hold_up_the_doctor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examination, "ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        found = examined(tmp_path, kubeconfig=kubeconfig(tmp_path, silent.getsockname()[1]), image="w:1")

    assert found["cluster"].status == "fail"
    assert "does not answer in time" in found["cluster"].words
    assert found["image"].status == "warn"


def test_an_unreachable_cluster_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]

    found = examined(tmp_path, kubeconfig=kubeconfig(tmp_path, port))

    assert f"http://127.0.0.1:{port} cannot be reached" in found["cluster"].words


def test_slow_answers_end_the_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow:
        now = 0.0

        def may(self, *given: Any, **options: Any) -> bool:
            self.now += 1
            return True

    slow = Slow()
    monkeypatch.setattr(examination, "time", SimpleNamespace(monotonic=lambda: slow.now))

    missing, asked, unasked = examination._rights(slow, KubernetesConfig(), FOUND.namespaces, 5)  # type: ignore[arg-type]

    assert (missing, asked) == ([], 6)
    assert unasked > 0


@pytest.mark.parametrize(
    ("settings", "check", "status", "words"),
    [
        ({"agent_url": "tls://127.0.0.1:7482"}, "agent", "fail", "which no pod reaches"),
        ({"agent_url": "tls://localhost:7482"}, "agent", "fail", "which no pod reaches"),
        ({"agent_url": "tls://0.0.0.0:7482"}, "agent", "fail", "which no pod reaches"),
        ({"agent_url": "tls://169.254.1.1:7482"}, "agent", "fail", "which no pod reaches"),
        (
            {"agent_url": "tls://10.0.0.5:7482", "agent": "127.0.0.1:7482"},
            *("agent", "fail", "listens at 127.0.0.1:7482 only"),
        ),
        ({"agent_url": "tls://10.0.0.5:7482"}, "agent", "ok", "tls://10.0.0.5:7482"),
        ({"image": "worker@sha256:" + "a" * 64}, "image", "ok", "pinned"),
        ({"objects": "trainjob"}, "cluster objects", "fail", "no TrainJob"),
        ({"scheduler": "kueue"}, "cluster objects", "fail", "no Kueue"),
        ({}, "cluster", "ok", "v1.37.0 and serves JobSet"),
        ({}, "cluster rights", "ok", "all 40"),
        ({}, "cluster network", "ok", "Cilium"),
    ],
)
def test_what_is_found_is_said(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    check: str,
    status: str,
    words: str,
) -> None:
    monkeypatch.setattr(examination, "examine_cluster", lambda config: FOUND)

    found = examined(tmp_path, **settings)[check]

    assert found.status == status
    assert words in found.words


def daemon(name: str, *args: str) -> dict[str, Any]:
    containers = [{"name": "a"}, {"name": "b", "args": list(args)}]
    return {"metadata": {"name": name}, "spec": {"template": {"spec": {"containers": containers}}}}


@pytest.mark.parametrize(
    ("groups", "daemons", "engine"),
    [
        ({"cilium.io"}, None, "Cilium"),
        ({"batch"}, None, None),
        ({"cilium.io"}, [daemon("kindnet")], None),  # its definitions outlived it
        (set(), [daemon("kube-proxy"), daemon("kube-router")], "kube-router"),
        (set(), [daemon("aws-node")], None),
        (set(), [daemon("aws-node", "--enable-network-policy=false")], None),
        (
            *(set(), [daemon("aws-node", "--enable-network-policy=true")]),
            "Amazon VPC CNI with its network policy agent",
        ),
        (set(), [daemon("kube-flannel-ds")], None),
    ],
)
def test_network_plugins_that_enforce_are_recognized(
    groups: set[str], daemons: list[dict[str, Any]] | None, engine: str | None
) -> None:
    assert policy_engine(groups, daemons) == engine
