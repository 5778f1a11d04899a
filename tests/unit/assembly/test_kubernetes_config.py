"""The settings of jobs on Kubernetes, and what the platform makes of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from falaj.assembly.compute import secret_files
from falaj.assembly.config import read_config
from falaj.errors import ConfigInvalid, InvalidInput
from platforms import make_platform

COMPLETE = """
[jobs]
launcher = "kubernetes"

[kubernetes]
kubeconfig = "/nowhere/kubeconfig"
image = "worker:1"
agent = "127.0.0.1:0"
agent_url = "tls://falaj.example.com:7482"
"""


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ('[jobs]\nlauncher = "kubernetes"', "kubernetes.image and kubernetes.agent_url"),
        (COMPLETE.replace('image = "worker:1"', ""), "kubernetes.image and kubernetes.agent_url"),
        (COMPLETE.replace("tls://falaj.example.com:7482", "falaj.example.com"), "tls://HOST:PORT"),
        (COMPLETE.replace("tls://falaj.example.com:7482", "tls://falaj.example.com"), "a host and a port"),
        (COMPLETE.replace("127.0.0.1:0", "127.0.0.1"), "a host and a port"),
        (COMPLETE + 'objects = "pod"', "job"),
        (COMPLETE + '[kubernetes.environments]\nvision = "localhost/vision:1"', "an image by its digest"),
        (COMPLETE + '[kubernetes.environments]\nvision = "/opt/virtualenv"', "an image by its digest"),
        (COMPLETE + 'namespace = "falaj"', "namespace"),
        (COMPLETE + 'prefix = "kube"', "belong to the cluster"),
        (COMPLETE + 'prefix = "kube-falaj"', "belong to the cluster"),
        (COMPLETE + 'images = ["worker:1"]', "tags can be moved"),
        (COMPLETE + 'images = ["worker"]', "kubernetes.image worker:1 is not in kubernetes.images"),
        (COMPLETE + 'egress = ["pypi.example.com"]', "knows no names"),
        (COMPLETE + "[kubernetes.clusters.Home]", "the name of a cluster is a-z, 0-9 and '-'"),
        (
            COMPLETE + "[kubernetes.clusters.a]\n[kubernetes.clusters.b]",
            "b is the same cluster as a: set its context",
        ),
        (
            COMPLETE + '[kubernetes.clusters.a]\nzone = "mars"',
            "clusters.a.zone mars is none of the zones local",
        ),
        (
            COMPLETE + "[kubernetes.clusters.a.prices]\ngpu_hour = 2.0",
            "clusters.a.prices needs prices.currency",
        ),
        (COMPLETE + 'scheduler = "kueue"\n[kubernetes.clusters.a]', "with several the platform decides"),
        (
            COMPLETE + 'pool_label = "x/pool"\n[kubernetes.clusters.a]',
            "kubernetes.pool_label is for one cluster",
        ),
        (COMPLETE + 'context = "c"\n[kubernetes.clusters.a]', "kubernetes.context is for one cluster"),
    ],
)
def test_a_wrong_setting_is_named(tmp_path: Path, toml: str, words: str) -> None:
    (tmp_path / "falaj.toml").write_text(toml)

    with pytest.raises(ConfigInvalid) as refused:
        read_config(tmp_path / "falaj.toml")

    assert words in str(refused.value)


def test_jobs_in_pods_need_no_sandbox_here_and_know_no_virtualenvs(tmp_path: Path) -> None:
    with make_platform(tmp_path, toml=COMPLETE) as platform:
        compute = platform.parts.compute

        compute.require_isolation(users=100)
        assert compute.refusal() is None
        with pytest.raises(InvalidInput, match=r"kubernetes\.image") as refused:
            compute.require_environment("jax")
        assert "[kubernetes.environments] in falaj.toml" in str(refused.value)
        with pytest.raises(InvalidInput, match=r"kubernetes\.egress"):
            compute.require_network()
        host = compute.job_host(platform.parts.parsers, agent_key=b"k")

        assert host.remote is not None
        assert host.remote.certificate.stat().st_mode & 0o777 == 0o600
        assert host.fence_s == 120
        assert Path("/nowhere/kubeconfig") in host.hidden
        assert platform.home.path in host.hidden


def test_an_environment_of_a_cluster_is_an_image_by_its_digest(tmp_path: Path) -> None:
    pinned = f"localhost/vision@sha256:{'1' * 64}"
    toml = f'{COMPLETE}\n[kubernetes.environments]\nvision = "{pinned}"\n'
    with make_platform(tmp_path, toml=toml) as platform:
        compute = platform.parts.compute

        compute.require_environment("vision")
        host = compute.job_host(platform.parts.parsers, agent_key=b"k")

        assert host.remote is not None
        assert host.remote.environments == {"vision": pinned}
        with pytest.raises(InvalidInput, match="vision"):
            compute.require_environment("jax")


def test_clusters_have_their_own_settings_and_else_those_of_all(tmp_path: Path) -> None:
    clusters = """
[kubernetes.clusters.home]
context = "desert"
[kubernetes.clusters.cloud]
kubeconfig = "/nowhere/cloud"
agent_url = "tls://falaj.example.com:7483"
burst = true
"""
    (tmp_path / "falaj.toml").write_text(COMPLETE + clusters)

    config = read_config(tmp_path / "falaj.toml")

    assert config.kubernetes is not None
    found = config.kubernetes.each_cluster()
    assert {name: (str(each.kubeconfig), each.context, each.agent_url) for name, each in found.items()} == {
        "home": ("/nowhere/kubeconfig", "desert", "tls://falaj.example.com:7482"),
        "cloud": ("/nowhere/cloud", None, "tls://falaj.example.com:7483"),
    }
    assert {str(each) for each in secret_files(config)} >= {"/nowhere/kubeconfig", "/nowhere/cloud"}
    (tmp_path / "falaj.toml").write_text(COMPLETE)
    alone = read_config(tmp_path / "falaj.toml").kubernetes
    assert alone is not None
    assert alone.each_cluster() == {None: alone}
