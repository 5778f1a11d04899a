"""Weights with a reference to the code of their network: pinned, shown, verified, and never imported."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

import falaj as fj
import model_files
from altered_models import stored_file
from falaj.errors import Denied, InvalidInput
from falaj.governance.operations.caller import acting_as
from falaj.records.governance.identity import Role
from falaj.records.models.facts import CodeReference, PackagePin
from falaj.records.registry import FileFormat, ModelVersion
from falaj.registry.service import Models
from platforms import OwnPlatform

HEADER = b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
SOURCE = b"""
import pathlib

pathlib.Path(%r).write_text("imported")


class ChurnNet:
    def __init__(self, width: int) -> None:
        self.width = width
"""


@pytest.fixture
def source(tmp_path: Path) -> bytes:
    """Source that leaves a trace if it is imported."""
    return SOURCE % str(tmp_path / "trace")


def register(platform: OwnPlatform, source: bytes | None = None, **options: Any) -> ModelVersion:
    weights = model_files.safetensors(HEADER, bytes(8))
    named = {"weights.safetensors": weights} | ({} if source is None else {"nets/churn.py": source})
    blobs = [platform.blobs.upload(iter([each])).id for each in named.values()]
    return platform.models.register("churn", files=tuple(blobs), paths=tuple(named), **options)


def in_file(**more: str) -> CodeReference:
    return CodeReference.model_validate({"entry": "nets.churn:ChurnNet", "file": "nets/churn.py", **more})


def test_code_in_a_file_of_the_version_is_pinned_and_shown_everywhere(
    platform: OwnPlatform, source: bytes, tmp_path: Path
) -> None:
    models = platform.models
    made = register(platform, source, code=in_file())
    register(platform, source + b"\n\nWIDTH = 8\n", code=in_file())
    digest = hashlib.sha256(source).hexdigest()

    assert (made.format, made.code) == (FileFormat.SAFETENSORS, in_file(sha256=digest))
    assert f"nets.churn:ChurnNet in file nets/churn.py, sha256 {digest}" in models.card(
        "churn@1"
    ).markdown.replace("\\", "")
    assert "code" not in models.card("churn@1").missing
    properties = models.bom("churn@1").document["metadata"]["component"]["properties"]
    assert {"name": "falaj:code", "value": made.code.describe()} in properties
    (change,) = [each for each in models.diff("churn@1", "churn@2").facts if each.name == "code"]
    assert (change.before, change.after == change.before) == (made.code.describe(), False)
    *_, checked = models.verify("churn@1")
    assert checked.ok
    assert b"".join(models.read("churn@1", "nets/churn.py")) == source
    assert not (tmp_path / "trace").exists()


def test_weights_without_a_reference_have_no_complete_card(light_platform: OwnPlatform) -> None:
    register(light_platform)

    assert "code" in light_platform.models.card("churn@1").missing


def test_code_of_a_commit_and_of_a_package_are_pinned(light_platform: OwnPlatform) -> None:
    commit = CodeReference(entry="nets:Net", repository="https://git.example.com/nets", commit="a" * 40)
    pin = PackagePin(name="Our_Nets", version="1.2", files_sha256="b" * 64)
    package = CodeReference(entry="our_nets.churn:Net", package="our-nets")

    first = register(light_platform, code=commit)
    second = register(light_platform, code=package, packages=(pin,))

    assert (first.code, second.code) == (commit, package)
    document = light_platform.models.bom("churn@1").document
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(json.dumps(document)) is None
    parts = document["components"]
    (found,) = [each for each in parts if each["bom-ref"].endswith("#code")]
    assert {"name": "falaj:commit", "value": "a" * 40} in found["properties"]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ({"file": "nets/other.py"}, "a file of the version"),
        ({"file": "weights.safetensors"}, "weights.safetensors"),
        (
            {"file": "nets/churn.py", "entry": "nets.churn:Other"},
            "does not define Other: it defines ChurnNet",
        ),
        ({"file": "nets/churn.py", "sha256": "0" * 64}, "that of the source"),
        ({"package": "torch"}, "with a hash"),
        ({}, "without a place"),
        ({"archive": "blob_01arz3ndektsv4rrffq69g5fav"}, "name the blob as `archive`"),
        ({"file": "nets/churn.py", "package": "torch"}, "in one of them"),
        ({"commit": "a" * 40}, "together with a commit"),
        ({"repository": "x", "commit": "main"}, "full hash"),
        ({"file": "nets/churn.py", "entry": "os.system('true')"}, "an entry point is a module"),
        ({"file": "nets/churn.py", "entry": "nets.churn"}, "an entry point is a module"),
    ],
    ids=str,
)
def test_a_reference_that_pins_nothing_is_refused(
    light_platform: OwnPlatform, source: bytes, code: dict[str, str], words: str
) -> None:
    with pytest.raises(InvalidInput) as refused:
        register(light_platform, source, code={"entry": "nets.churn:ChurnNet", **code})

    assert words in str(refused.value)
    assert light_platform.models.list().items == ()


def test_source_that_is_not_python_is_refused(light_platform: OwnPlatform) -> None:
    with pytest.raises(InvalidInput, match="not Python"):
        register(light_platform, b"class ChurnNet(:\n", code=in_file())


def test_an_archive_is_kept_with_the_version_and_verified(
    light_platform: OwnPlatform, models: Models
) -> None:
    """A job's version has the code of the job this way."""
    archive = light_platform.blobs.upload(iter([b"a tar.gz, never opened here" * 1000]))
    made = register(light_platform, code=CodeReference(entry="nets:ChurnNet"), archive=archive.id)

    assert made.code is not None
    assert (made.code.archive, made.code.sha256) == (archive.id, archive.sha256)
    *_, sound = models.verify("churn@1")
    stored = stored_file(light_platform.home.path, archive.id)
    stored.write_bytes(stored.read_bytes()[:-1] + b"x")
    *_, altered = models.verify("churn@1")
    assert (sound.ok, altered.ok) == (True, False)
    assert altered.problems[0].startswith("the archive of its code: ")


def test_an_archive_needs_an_entry_point_and_the_right_to_read_it(light_platform: OwnPlatform) -> None:
    light_platform.workspaces.create("secret")
    foreign = light_platform.put("code", b"code", workspace="secret")
    own = light_platform.blobs.upload(iter([b"code"]))
    developer = light_platform.join("dina", Role.DEVELOPER)

    with pytest.raises(InvalidInput, match="together with the entry point"):
        register(light_platform, archive=own.id)
    with pytest.raises(InvalidInput, match="blobs of workspace"):
        register(light_platform, code=CodeReference(entry="a:b"), archive=foreign.id)
    with acting_as(developer), pytest.raises((Denied, fj.errors.NotFound)):
        register(light_platform, code=CodeReference(entry="a:b"), archive=foreign.id)


TRAIN = """
import json, os, pathlib
import torch
from safetensors.torch import save_file
from nets import ChurnNet

torch.manual_seed(0)
out = pathlib.Path(os.environ["FALAJ_OUTPUTS"])
save_file(ChurnNet().state_dict(), out / "weights.safetensors")
(out / "model.json").write_text(json.dumps({"files": ["weights.safetensors"], "code": {"entry": "nets:ChurnNet"}}))
"""
NETS = """
import torch


class ChurnNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

    def forward(self, x):
        return self.layer(x)
"""
SCORE = """
import os, pathlib
import torch
from safetensors.torch import load_file
from nets import ChurnNet

net = ChurnNet()
net.load_state_dict(load_file(pathlib.Path(os.environ["FALAJ_INPUTS"], "model", "weights.safetensors")))
print("score", net(torch.ones(1, 3)).item())
"""


@pytest.mark.slow
def test_weights_of_a_job_refer_to_its_code_and_are_loaded_by_another_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FALAJ_CONFIG_DIR", str(tmp_path / "config"))
    folder = tmp_path / "code"
    folder.mkdir()
    for name, text in (("train.py", TRAIN), ("nets.py", NETS), ("score.py", SCORE)):
        (folder / name).write_text(text)
    with fj.open(tmp_path / "home") as platform:
        *_, job = platform.jobs.wait(platform.train(folder / "train.py").id)
        made = platform.register(job.id, "churn")
        *_, scored = platform.jobs.wait(
            platform.train(folder / "score.py", inputs={"model": "model_version:churn@1"}).id
        )
        log = b"".join(platform.jobs.logs(scored.id)) if scored.state == "done" else b""
        *_, checked = platform.models.verify("churn@1")

    assert made.code is not None
    assert (made.code.entry, made.code.archive) == ("nets:ChurnNet", job.code)
    assert scored.state == "done", scored.reason
    assert checked.ok
    assert b"score" in log
