"""The operation models.export: rights, residency, audit, lineage; and the folder, whole or not at all."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from onnx import TensorProto, helper, numpy_helper

from falaj.errors import (
    AlreadyExists,
    Conflict,
    Damaged,
    Denied,
    FalajError,
    InvalidInput,
    NotFound,
    ResidencyDenied,
    Unavailable,
)
from falaj.governance.operations.caller import Caller, acting_as
from falaj.records.governance.identity import Role
from falaj.records.governance.lineage import Direction
from falaj.records.registry import ExportedFile, ModelExport, TensorSpec
from falaj.sdk import model_exports
from falaj.sdk.model_exports import verify
from model_servers import constant
from platforms import TWO_ZONES, OwnPlatform, make_platform

NETWORKS = """
[zones.local]
jurisdiction = "AE"
default = true
networks = ["10.1.0.0/16"]

[zones.frankfurt]
jurisdiction = "DE"
networks = ["10.2.0.0/16"]

[node]
zone = "local"
"""
CLUSTER = """
[kubernetes.zones]
me-central-1 = "local"
eu-central-1 = "frankfurt"
"""
COLUMNS = (TensorSpec(name="x", dtype="float32", shape=(-1, 2), features=("calls", "minutes")),)


def put_model(platform: OwnPlatform, folder: Path, *, name: str = "churn", **more: Any) -> str:
    """Register a real ONNX model that answers 3 for each row, and return its version."""
    blob = platform.put(f"{name}-file", constant(folder / f"{name}.onnx", 3.0).read_bytes(), **more)
    made = platform.models.register(
        name, files=(blob.id,), paths=("model.onnx",), inputs=COLUMNS, card="# It"
    )
    return made.reference


@pytest.fixture
def version(light_platform: OwnPlatform, tmp_path: Path) -> str:
    return put_model(light_platform, tmp_path)


def listing(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes().hex() for path in files}


# ------------------------------------------------------------------------------------------- the operation


@pytest.mark.slow
def test_an_export_is_in_the_audit_log_and_in_lineage(platform: OwnPlatform, tmp_path: Path) -> None:
    name = put_model(platform, tmp_path)

    made = platform.models.export(name, to="edge")

    (entry,) = [each for each in platform.entries() if each["action"] == "models.export"]
    assert (entry["outcome"], entry["exported_to"], entry["objects"]) == ("done", "edge", [made.id])
    below = list(platform.lineage.graph(made.id, direction=Direction.DOWN))
    assert [(node.kind, node.name) for node in below[1:]] == [("operation", "models.export")]
    assert made.fingerprint == hashlib.sha256(made.public_key.encode()).hexdigest()


@pytest.mark.slow
def test_who_may_read_a_version_may_export_it_and_nobody_else(
    light_platform: OwnPlatform, version: str, tmp_path: Path
) -> None:
    viewer, stranger = light_platform.join("vera", Role.VIEWER), light_platform.join("stan")

    with acting_as(viewer):
        light_platform.export(version, tmp_path / "out", to="edge")
    with acting_as(stranger), pytest.raises(NotFound):
        light_platform.export(version, tmp_path / "other", to="edge")

    assert not (tmp_path / "other").exists()


@pytest.mark.slow
def test_the_right_to_export_alone_is_not_enough(
    light_platform: OwnPlatform, version: str, tmp_path: Path
) -> None:
    viewer = light_platform.join("vera", Role.VIEWER)
    light_platform.policies.publish(
        "no-bytes", text='forbid(principal, action == Action::"models.read", resource);'
    )

    with acting_as(viewer), pytest.raises(Denied, match=r"models\.read"):
        light_platform.models.export(version, to="triton")

    assert light_platform.entries()[-1]["outcome"] == "denied"


@pytest.mark.slow
def test_what_may_not_leave_is_refused_with_the_path_that_made_it_so(tmp_path: Path) -> None:
    with make_platform(tmp_path, toml=NETWORKS) as platform:
        platform.join("sara", Role.ADMIN)
        source = platform.put("calls", b"rows", only=("AE",))
        blob = platform.put("file", constant(tmp_path / "m.onnx", 3.0).read_bytes())
        platform.models.register(
            "churn", files=(blob.id,), paths=("model.onnx",), sources=(f"blob:{source.name}",)
        )
        sara = next(user for user in platform.users.list().items if user.name == "sara")

        with (
            acting_as(Caller(sara.id, "sara", "user", "remote:10.2.0.9")),
            pytest.raises(ResidencyDenied) as refused,
        ):
            platform.export("churn@1", tmp_path / "out", to="edge")
        with acting_as(Caller(sara.id, "sara", "user", "remote:10.1.0.9")):
            made = platform.export("churn@1", tmp_path / "near", to="edge")

        assert not (tmp_path / "out").exists()
        path = refused.value.details["path"]
        assert ("calls" in path[0], "churn@1" in path[-1]) == (True, True)
        assert made.label.only == {"AE"}
        assert json.loads((tmp_path / "near" / "export.json").read_text())["label"] == "only AE"
        assert [entry["outcome"] for entry in platform.entries() if entry["action"] == "models.export"] == [
            "denied",
            "done",
        ]


@pytest.mark.slow
def test_a_restricted_model_is_bound_to_nodes_of_its_zones(tmp_path: Path) -> None:
    with make_platform(tmp_path, toml=TWO_ZONES + CLUSTER) as platform:
        put_model(platform, tmp_path, only=("AE",))

        platform.export("churn@1", tmp_path / "out", to="kserve", storage_uri="s3://a/b")

    manifest = yaml.safe_load((tmp_path / "out" / "inferenceservice.yaml").read_text())
    terms = manifest["spec"]["predictor"]["affinity"]["nodeAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]["nodeSelectorTerms"]
    assert terms[0]["matchExpressions"] == [
        {"key": "topology.kubernetes.io/zone", "operator": "In", "values": ["me-central-1"]}
    ]


@pytest.mark.slow
def test_options_of_another_target_are_refused(light_platform: OwnPlatform, version: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        light_platform.models.export(version, to="edge", gpus=1, storage_uri="s3://a/b")

    assert {fault.where for fault in refused.value.faults} == {"gpus", "storage_uri"}
    for wrong in ({"storage_uri": "ftp://a"}, {"storage_uri": "s3://a\nb"}, {"gpus": -1}, {"cpus": 0}):
        with pytest.raises(InvalidInput):
            light_platform.models.export(version, to="kserve", **wrong)


@pytest.mark.slow
def test_a_version_whose_manifest_was_changed_is_not_exported(
    light_platform: OwnPlatform, version: str, tmp_path: Path
) -> None:
    light_platform.sql("UPDATE registry_versions SET manifest = replace(manifest, '# It', '# Ut')")

    with pytest.raises(Damaged, match="changed after it was signed"):
        light_platform.export(version, tmp_path / "out", to="edge")

    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------------------- what is written


@pytest.mark.slow
@pytest.mark.parametrize("to", ["triton", "kserve", "edge"])
def test_the_same_version_gives_the_same_bytes_and_the_list_covers_them(
    light_platform: OwnPlatform, version: str, tmp_path: Path, to: str
) -> None:
    first = light_platform.export(version, tmp_path / "a", to=to, archive=tmp_path / "a.tar.gz")
    light_platform.models.promote(version, to="champion")
    light_platform.export("churn@champion", tmp_path / "b", to=to, archive=tmp_path / "b.tar.gz")

    assert listing(tmp_path / "a") == listing(tmp_path / "b")
    assert (tmp_path / "a.tar.gz").read_bytes() == (tmp_path / "b.tar.gz").read_bytes()
    assert set(listing(tmp_path / "a")) == {file.path for file in first.files}
    with tarfile.open(tmp_path / "a.tar.gz") as tar:
        names = tar.getnames()
        assert tar.extractfile("churn-1/export.json").read() == (tmp_path / "a/export.json").read_bytes()
    assert names == sorted(f"churn-1/{file.path}" for file in first.files)
    for file in json.loads((tmp_path / "a" / "export.json").read_text())["files"]:
        content = (tmp_path / "a" / file["path"]).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (file["size_bytes"], file["sha256"])


@pytest.mark.slow
def test_a_bundle_predicts_where_it_lies(light_platform: OwnPlatform, version: str, tmp_path: Path) -> None:
    made = light_platform.export(version, tmp_path / "out", to="edge")
    (tmp_path / "rows.csv").write_text("minutes,calls\n" + "1,2\n" * 100_001)
    command = [sys.executable, tmp_path / "out" / "run.py", "--key", made.fingerprint, "--batch", "1000"]

    ran = subprocess.run([*command, "rows.csv"], cwd=tmp_path, capture_output=True, text=True)

    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout == "y\n" + "3.0\n" * 100_001


class LyingModels:
    """A registry that answers as told."""

    def __init__(self, made: ModelExport, content: Iterator[bytes] | None = None) -> None:
        self._made, self._content = made, content

    def export(self, *_: Any, **__: Any) -> ModelExport:
        return self._made

    def read(self, *_: Any) -> Iterator[bytes]:
        return iter(self._content or ())


def lying(platform: OwnPlatform, made: ModelExport, content: Any = None) -> Any:
    class Liar:
        models = LyingModels(made, content)

    return Liar()


def with_another_card(file: ExportedFile) -> ExportedFile:
    text = file.text and file.text.replace("# It", "# Ut")
    return file.model_copy(update={"text": text}) if file.path == "manifest.json" else file


@pytest.mark.slow
def test_an_answer_that_was_changed_on_the_way_is_refused(
    light_platform: OwnPlatform, version: str, tmp_path: Path
) -> None:
    made = light_platform.models.export(version, to="edge")
    others = [
        made.model_copy(update={"files": tuple(map(with_another_card, made.files))}),
        made.model_copy(update={"files": made.files[1:]}),
        made.model_copy(
            update={"files": (*made.files[:-1], made.files[-1].model_copy(update={"text": "{}"}))}
        ),
        made.model_copy(update={"fingerprint": "0" * 64}),
        made.model_copy(update={"public_key": "00" * 32}),
        made.model_copy(
            update={
                "files": tuple(
                    f.model_copy(update={"sha256": "0" * 64}) if f.source else f for f in made.files
                )
            }
        ),
    ]
    verify(made)

    for other in others:
        with pytest.raises(Damaged):
            verify(other)
    for content in ([b"other bytes"], []):
        with pytest.raises(Damaged, match="not those that were signed"):
            model_exports.export_model(
                lying(light_platform, made, content), version, tmp_path / "out", to="edge"
            )
    assert sorted(path.name for path in tmp_path.iterdir() if "out" in path.name) == []


# -------------------------------------------------------------------------------------------- whole or not


@pytest.mark.slow
def test_a_folder_with_anything_in_it_is_left_alone(
    light_platform: OwnPlatform, version: str, tmp_path: Path
) -> None:
    out, photos = tmp_path / "out", tmp_path / "photos"
    out.mkdir()  # an empty one is taken
    photos.mkdir()
    (photos / "cat.jpg").write_bytes(b"cat")

    light_platform.export(version, out, to="triton")

    with pytest.raises(AlreadyExists, match="not empty"):
        light_platform.export(version, out, to="edge")
    with pytest.raises(AlreadyExists, match="no other folder"):
        light_platform.export(version, photos, to="edge", force=True)
    assert listing(photos) == {"cat.jpg": b"cat".hex()}
    light_platform.export(version, out, to="edge", force=True)
    assert (out / "run.py").exists()
    assert not (out / "churn").exists()
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


@pytest.mark.slow
@pytest.mark.parametrize("place", ["file", "link", "absent/out"])
def test_other_places_are_refused(
    light_platform: OwnPlatform, version: str, tmp_path: Path, place: str
) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")

    with pytest.raises(InvalidInput):
        light_platform.export(version, tmp_path / place, to="edge")

    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("force", [False, True])
def test_of_several_exports_to_one_folder_at_once_one_is_whole(
    light_platform: OwnPlatform, version: str, tmp_path: Path, force: bool
) -> None:
    def export(to: str) -> str:
        try:
            return light_platform.export(version, tmp_path / "out", to=to, force=force).to.value
        except (AlreadyExists, Conflict):
            return ""

    with ThreadPoolExecutor(4) as pool:
        done = [to for to in pool.map(export, ["triton", "edge"] * 3) if to]

    assert force or len(done) == 1
    record = json.loads((tmp_path / "out" / "export.json").read_text())
    assert record["to"] in done
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".out")] == []
    assert set(listing(tmp_path / "out")) == {f["path"] for f in record["files"]} | {
        "export.json",
        "model.sig",
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "raised"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), Unavailable),
        (KeyboardInterrupt(), KeyboardInterrupt),
        (Denied("revoked in the middle"), FalajError),
    ],
    ids=["full disk", "Ctrl-C", "revoked"],
)
def test_what_fails_in_the_middle_leaves_nothing(
    light_platform: OwnPlatform,
    version: str,
    tmp_path: Path,
    fault: BaseException,
    raised: type[BaseException],
) -> None:
    made = light_platform.models.export(version, to="edge")
    (tmp_path / "place").mkdir()

    def content() -> Iterator[bytes]:
        yield b"the first bytes"
        raise fault

    with pytest.raises(raised):
        model_exports.export_model(
            lying(light_platform, made, content()), version, tmp_path / "place" / "out", to="edge"
        )

    assert list((tmp_path / "place").iterdir()) == []


KILLED = """
import os, signal, sys
from pathlib import Path
from types import SimpleNamespace
from falaj.records.registry import ModelExport
from falaj.sdk.model_exports import export_model

made = ModelExport.model_validate_json(Path(sys.argv[1]).read_text())

def read(*_):
    yield b"the first bytes"
    os.kill(os.getpid(), signal.SIGKILL)

models = SimpleNamespace(export=lambda *_, **__: made, read=read)
export_model(SimpleNamespace(models=models), "churn@1", Path(sys.argv[2]), to="edge", force=True)
"""


@pytest.mark.slow
def test_after_a_kill_in_the_middle_the_earlier_export_is_whole(
    light_platform: OwnPlatform, version: str, tmp_path: Path
) -> None:
    made = light_platform.export(version, tmp_path / "out", to="edge")
    before = listing(tmp_path / "out")
    (tmp_path / "made.json").write_text(made.model_dump_json())

    ran = subprocess.run([sys.executable, "-c", KILLED, tmp_path / "made.json", tmp_path / "out"])

    assert ran.returncode == -9
    assert listing(tmp_path / "out") == before
    light_platform.export(version, tmp_path / "out", to="edge", force=True)
    assert listing(tmp_path / "out") == before


@pytest.mark.slow
def test_too_little_space_is_said_before_the_first_byte(
    light_platform: OwnPlatform, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_exports.shutil, "disk_usage", lambda _: Usage())

    with pytest.raises(Unavailable, match=r"takes .* and 7 bytes are free"):
        light_platform.export(version, tmp_path / "out", to="edge")

    assert not (tmp_path / "out").exists()


class Usage:
    free = 7


@pytest.mark.slow
def test_a_large_model_is_streamed(light_platform: OwnPlatform, tmp_path: Path) -> None:
    """It arrives in pieces, however large it is; its weights are neither parsed nor held."""
    weights = np.zeros((256 << 20) // 8, np.float64)
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 1]) for name in "xy"]
    graph = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"])],
        "g",
        values[:1],
        values[1:],
        [numpy_helper.from_array(weights, "w")],
    )
    blob = light_platform.put("large", io.BytesIO(helper.make_model(graph).SerializeToString()))
    light_platform.models.register("large", files=(blob.id,), paths=("model.onnx",))
    largest: list[int] = []

    made = light_platform.export("large@1", tmp_path / "out", to="edge", advance=largest.append)

    assert made.size_bytes > 256 << 20
    assert (tmp_path / "out" / "files" / "model.onnx").stat().st_size > 256 << 20
    assert max(largest) <= 4 << 20
