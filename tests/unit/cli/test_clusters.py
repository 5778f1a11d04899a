"""`falaj clusters`: what an administrator applies, printed without a cluster, and namespaces that cannot be made."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from command_line import command_line, make_template

TOML = """
[kubernetes]
kubeconfig = "/nowhere/kubeconfig"
image = "worker:1"
agent_url = "tls://10.0.0.5:7482"
namespaces = "given"
"""


def test_manifests_are_yaml_and_need_no_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_template(tmp_path)
    (tmp_path / "home" / "falaj.toml").write_text(TOML)

    with command_line(tmp_path, capsys) as falaj:
        made = list(yaml.safe_load_all(falaj.done("clusters", "render").out))
        listed = falaj.json("clusters", "render")["manifests"]
        refused = falaj("clusters", "apply")

    assert made == listed
    kinds = {each["kind"] for each in made}
    assert {"ServiceAccount", "ClusterRole", "ClusterRoleBinding", "RoleBinding", "NetworkPolicy"} <= kinds
    assert "falaj-default" in {each["metadata"]["name"] for each in made if each["kind"] == "Namespace"}
    assert refused.status == 2
    assert "kubernetes.kubeconfig" in refused.err
