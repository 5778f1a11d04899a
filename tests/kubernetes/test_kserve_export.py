"""An API server with KServe's definitions takes the InferenceService of an export, and refuses a misspelled one."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import pytest
import yaml

import falaj as fj
from cluster_testbed import ClusterTestbed
from model_servers import constant
from polling import eventually

DEFINITION = "inferenceservices.serving.kserve.io"
TOML = """
[zones.local]
jurisdiction = "AE"
default = true

[zones.frankfurt]
jurisdiction = "DE"

[node]
zone = "local"

[kubernetes.zones]
me-central-1 = "local"
"""


@pytest.fixture(scope="module")
def kserve(cluster: ClusterTestbed, tmp_path_factory: pytest.TempPathFactory) -> ClusterTestbed:
    """The cluster with the definition of InferenceServices; no controller acts on them."""
    installed = cluster.kubectl("get", "customresourcedefinitions", "--output", "name")
    if DEFINITION in installed:
        return cluster
    archive = Path(os.environ.get("FALAJ_TEST_CLUSTER", "/nonexistent")) / "crds.tar.xz"
    if not archive.is_file():
        pytest.skip("needs a cluster with KServe's definitions, or crds.tar.xz in FALAJ_TEST_CLUSTER")
    folder = tmp_path_factory.mktemp("definitions")
    with tarfile.open(archive) as packed:
        packed.extraction_filter = getattr(tarfile, "data_filter", None)  # since Python 3.11.4
        packed.extractall(folder)
    file = folder / "crds" / "kserve" / "inferenceservices.yaml"
    cluster.kubectl("apply", "--server-side", "--filename", str(file))
    kinds = ("api-resources", "--api-group=serving.kserve.io", "--output", "name")
    eventually(lambda: DEFINITION in cluster.kubectl(*kinds))
    return cluster


def apply(kserve: ClusterTestbed, text: str) -> str:
    return kserve.kubectl(
        "apply", "--dry-run=server", "--validate=strict", "--output", "yaml", "--filename", "-", stdin=text
    )


@pytest.mark.parametrize("name", ["churn", "9_lives.v2"])
def test_the_api_server_takes_an_exported_service(
    kserve: ClusterTestbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("FALAJ_CONFIG_DIR", str(tmp_path / "config"))
    (tmp_path / "home").mkdir(mode=0o700)
    (tmp_path / "home" / "falaj.toml").write_text(TOML)
    with fj.open(tmp_path / "home") as platform:
        blob = platform.put("file", constant(tmp_path / "m.onnx", 3.0), only=("AE",))
        platform.models.register(name, files=(blob.id,), paths=("model.onnx",))
        options = {"storage_uri": "pvc://models/churn", "cpus": 0.5, "memory_bytes": 1 << 30, "gpus": 1}
        platform.export(f"{name}@1", tmp_path / "out", to="kserve", **options)
    text = (tmp_path / "out" / "inferenceservice.yaml").read_text()

    stored = yaml.safe_load(apply(kserve, text))

    wanted = yaml.safe_load(text)
    assert stored["spec"]["predictor"]["affinity"] == wanted["spec"]["predictor"]["affinity"]
    assert wanted["spec"]["predictor"]["model"].items() <= stored["spec"]["predictor"]["model"].items()
    with pytest.raises(AssertionError, match="protocolVersions"):
        apply(kserve, text.replace("protocolVersion:", "protocolVersions:"))
