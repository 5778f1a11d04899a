"""Model versions: numbered, signed and immutable; tampering is detected."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

import model_files
from falaj.errors import Conflict, Damaged, Denied, InvalidInput, NotFound, ResidencyDenied
from falaj.governance.lineage.service import Lineage
from falaj.governance.operations.caller import acting_as, once
from falaj.governance.operations.operation import operations_of
from falaj.governance.tables import objects
from falaj.records.governance.identity import Role
from falaj.records.governance.lineage import Direction
from falaj.records.governance.residency import Label
from falaj.records.registry import FileFormat, TensorSpec
from falaj.registry.service import Models
from falaj.registry.tables import versions
from platforms import OwnPlatform

if TYPE_CHECKING:
    from conftest import Register  # type: ignore[attr-defined]

DAY = timedelta(days=1)


def verdict(models: Models, version: str):
    *_, last = models.verify(version)
    assert last.finished
    return last


# -------------------------------------------------------------------------------------------- registering


@pytest.mark.slow
def test_a_version_keeps_what_it_was_registered_with(platform: OwnPlatform, models: Models) -> None:
    weights = platform.put("model.onnx", model_files.onnx())
    labels = platform.blobs.upload(iter([b'["late"]']))

    made = models.register(
        "churn",
        files=("model.onnx", labels.id),
        paths=("model.onnx", "meta/labels.json"),
        inputs=(TensorSpec(name="x", dtype="float32", shape=(-1, 4)),),
        outputs=(TensorSpec(name="y", dtype="float32", shape=(-1,)),),
        metrics={"auc": 0.91},
        environment={"torch": "2.13"},
        card="# Churn",
    )

    assert (made.reference, made.number, made.format) == ("churn@1", 1, FileFormat.ONNX)
    assert [(f.path, f.format, f.sha256, f.size_bytes) for f in made.files] == [
        ("meta/labels.json", FileFormat.JSON, labels.sha256, 8),
        ("model.onnx", FileFormat.ONNX, weights.sha256, weights.size_bytes),
    ]
    assert (made.metrics, made.environment, made.card) == ({"auc": 0.91}, {"torch": "2.13"}, "# Churn")
    assert models.version("churn@1") == made == models.versions("churn").items[0]
    assert b"".join(models.read("churn@1", "model.onnx")) == model_files.onnx()
    assert verdict(models, "churn@1").ok


@pytest.mark.slow
def test_a_staged_blob_stays_once_it_is_part_of_a_version(
    light_platform: OwnPlatform, models: Models, register: Register
) -> None:
    register()
    light_platform.clock.advance(3 * DAY)

    light_platform.blobs.cleanup()

    assert verdict(models, "churn@1").ok


@pytest.mark.slow
def test_a_staged_blob_that_expired_is_refused(light_platform: OwnPlatform, models: Models) -> None:
    staged = light_platform.blobs.upload(iter([model_files.onnx()]))
    light_platform.clock.advance(3 * DAY)

    with pytest.raises(Conflict, match="expired"):
        models.register("churn", files=(staged.id,), paths=("model.onnx",))

    assert models.list().items == ()


@pytest.mark.slow
def test_concurrent_registrations_get_distinct_numbers(
    platform: OwnPlatform, models: Models, register: Register
) -> None:
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda n: register(card=str(n)), range(8)))

    assert sorted(version.number for version in made) == list(range(1, 9))
    assert models.show("churn").versions == 8
    assert [version.number for version in models.versions("churn", limit=3).items] == [8, 7, 6]
    assert models.versions("churn", limit=3).next == "6"
    assert [version.number for version in models.versions("churn", before=6, limit=5).items] == [
        5,
        4,
        3,
        2,
        1,
    ]


@pytest.mark.slow
def test_the_same_request_twice_is_one_version(platform: OwnPlatform, models: Models) -> None:
    blob = platform.put("model.onnx", model_files.onnx())

    made = []
    for _ in range(2):
        with once("the-key"):
            made.append(models.register("churn", files=(blob.id,)))

    assert made[0] == made[1]
    assert models.show("churn").versions == 1


def test_a_pickle_is_refused_and_leaves_nothing(
    light_platform: OwnPlatform, models: Models, register: Register
) -> None:
    before = light_platform.count(objects)

    with pytest.raises(InvalidInput) as refused:
        register(data=pickle.dumps({"w": 1}), path="weights/model.onnx")

    (fault,) = refused.value.faults
    assert (fault.where, "pickle" in fault.given, "export" in fault.fix) == ("weights/model.onnx", True, True)
    assert light_platform.count(objects) == before + 1  # the staged blob
    assert models.list().items == ()


def test_all_refused_files_are_named_at_once(light_platform: OwnPlatform, models: Models) -> None:
    data = [model_files.onnx(), pickle.dumps(1), b"\x1f\x8b\x08" + bytes(9)]
    blobs = [light_platform.blobs.upload(iter([each])).id for each in data]

    with pytest.raises(InvalidInput) as refused:
        models.register("churn", files=tuple(blobs), paths=("a", "b", "c"))

    assert [fault.where for fault in refused.value.faults] == ["b", "c"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "Not A Name"},
        {"name": "churn@1"},
        {"files": ()},
        {"paths": ("../escape",)},
        {"paths": ("/root",)},
        {"paths": ("a", "b")},
        {"metrics": {"auc": float("nan")}},
        {"metrics": {"": 1.0}},
        {"inputs": ({"name": "x", "dtype": "complex", "shape": (1,)},)},
        {"inputs": ({"name": "x", "dtype": "bool", "shape": (-2,)},)},
    ],
    ids=str,
)
def test_bad_input_is_refused(light_platform: OwnPlatform, models: Models, wrong: dict[str, object]) -> None:
    blob = light_platform.blobs.upload(iter([model_files.onnx()]))

    with pytest.raises(InvalidInput):
        models.register(**{"name": "churn", "files": (blob.id,), "paths": ("m.onnx",)} | wrong)

    assert models.list().items == ()


def test_one_path_for_two_files_is_refused(light_platform: OwnPlatform, models: Models) -> None:
    blob = light_platform.put("model.onnx", model_files.onnx())

    with pytest.raises(InvalidInput, match="once"):
        models.register("churn", files=(blob.id, "model.onnx"))


@pytest.mark.slow
def test_missing_objects_are_not_found(
    light_platform: OwnPlatform, models: Models, register: Register
) -> None:
    register()

    for call in (
        lambda: models.version("churn@2"),
        lambda: models.show("other"),
        lambda: models.read("churn@1", "other.onnx"),
        lambda: models.register("churn", files=("nothing",)),
        lambda: models.promote("churn@9", to="champion"),
    ):
        with pytest.raises(NotFound):
            call()


# ------------------------------------------------------------------------------------------- immutability


@pytest.mark.slow
def test_no_operation_changes_a_version(platform: OwnPlatform, models: Models, register: Register) -> None:
    first = register()
    noor = platform.join("noor", Role.APPROVER)
    before = platform.rows(versions)

    register()
    models.protect("churn", alias="champion")
    with acting_as(noor):
        models.approve("churn@1", alias="champion")
    models.promote("churn@1", to="champion")
    models.promote("churn@1", to="staging")

    assert platform.rows(versions)[:1] == before
    found = models.version("churn@1")
    assert set(found.aliases) == {"champion", "staging"}  # shown with the version, and no part of it
    assert found.model_copy(update={"aliases": first.aliases}) == first
    verbs = {verb for verb, op in operations_of(Models).items() if not op.mode.reads}
    choose = {"promote", "approve", "protect", "rollback", "set_gates", "waive_gates", "remove_alias"}
    measure = {"record_metrics", "evaluate", "record_evaluation"}
    describe = {
        "create",
        "update",
        "rename",
        "delete",
        "set_tags",
        "delete_tags",
    }  # of the model, not of a version
    make = {"register", "register_artifacts", "compose", "export"}
    assert verbs == make | choose | measure | describe


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        "UPDATE registry_versions SET manifest = replace(manifest, '0.5', '0.9') WHERE number = 1",
        "UPDATE registry_versions SET signature = replace(signature, substr(signature, 1, 8), '00000000')",
        "UPDATE registry_versions SET signature = 'not hex'",
        "UPDATE registry_versions SET key = 'another'",
        "UPDATE registry_versions SET manifest = (SELECT manifest FROM registry_versions WHERE number = 2), "
        "signature = (SELECT signature FROM registry_versions WHERE number = 2) WHERE number = 1",
        "DELETE FROM registry_versions WHERE number = 1",
    ],
)
def test_a_changed_row_is_found_wherever_the_version_is_used(
    light_platform: OwnPlatform, models: Models, register: Register, change: str
) -> None:
    register(metrics={"auc": 0.5})
    register(metrics={"auc": 0.7})

    light_platform.sql(change)

    check = verdict(models, "churn@1")
    assert (check.ok, len(check.problems)) == (False, 1)
    for use in (
        lambda: models.read("churn@1", "model.onnx"),
        lambda: models.version("churn@1"),
        lambda: models.promote("churn@1", to="champion"),
    ):
        with pytest.raises(Damaged):
            use()


def test_changed_bytes_are_found(light_platform: OwnPlatform, models: Models, register: Register) -> None:
    register()
    files = [path for path in light_platform.home.blobs.rglob("*") if path.is_file()]
    (stored,) = [path for path in files if not path.name.startswith(".store.")]
    content = bytearray(stored.read_bytes())
    content[-1] ^= 1
    stored.write_bytes(content)

    with pytest.raises(Damaged):
        b"".join(models.read("churn@1", "model.onnx"))

    assert "model.onnx" in verdict(models, "churn@1").problems[0]


def test_other_bytes_under_the_same_blob_are_found(
    light_platform: OwnPlatform, models: Models, register: Register
) -> None:
    made = register()
    other = light_platform.blobs.upload(iter([model_files.onnx(graph=b"\x12\x03xyz")]))
    light_platform.sql("DELETE FROM governance_blobs WHERE id = :id", {"id": made.files[0].blob})
    light_platform.sql(
        "UPDATE governance_blobs SET id = :id WHERE id = :other",
        {"id": made.files[0].blob, "other": other.id},
    )

    with pytest.raises(Damaged, match="after it was signed"):
        models.read("churn@1", "model.onnx")
    light_platform.sql("UPDATE governance_blobs SET sha256 = :sha256", {"sha256": made.files[0].sha256})
    with pytest.raises(Damaged, match="not those that were signed"):
        b"".join(models.read("churn@1", "model.onnx"))

    assert not verdict(models, "churn@1").ok


def test_a_deleted_blob_is_found(light_platform: OwnPlatform, models: Models, register: Register) -> None:
    light_platform.blobs.delete(register().files[0].blob)

    with pytest.raises(NotFound):
        models.read("churn@1", "model.onnx")

    assert not verdict(models, "churn@1").ok


def test_verify_reports_its_progress(
    light_platform: OwnPlatform, models: Models, register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("falaj.registry.files.REPORT_BYTES", 1)
    header = b'{"w":{"dtype":"U8","shape":[3145728],"data_offsets":[0,3145728]}}'
    made = register(data=model_files.safetensors(header, bytes(3 << 20)))

    checks = list(models.verify("churn@1"))

    assert [check.finished for check in checks] == [False] * (len(checks) - 1) + [True]
    assert checks[-1].checked_bytes == made.size_bytes == checks[-1].size_bytes


# --------------------------------------------------------------------------------------- labels, lineage


def test_labels_flow_from_the_training_set_to_the_version(
    platform: OwnPlatform, models: Models, register: Register
) -> None:
    patients = platform.put("patients", b"x", only=("AE",), classes=("health",))

    made = register(training_set="blob:patients")
    found = list(Lineage(models.gate).graph(made.id, direction=Direction.UP))

    assert made.label == Label(only={"AE"}, classes={"health"})
    assert made.training_set == patients.id
    assert {"patients", "models.register"} <= {node.name for node in found}
    assert models.show("churn").versions == 1


@pytest.mark.slow
def test_a_label_that_comes_later_is_on_the_version_and_breaks_no_signature(
    light_platform: OwnPlatform, models: Models, register: Register
) -> None:
    light_platform.put("patients", b"x")
    register(sources=("blob:patients",))

    light_platform.objects.label("blob:patients", only=("AE",))

    assert models.version("churn@1").label.only == {"AE"}
    assert verdict(models, "churn@1").ok


def test_a_file_in_a_zone_forbidden_to_its_training_set_is_refused(
    light_platform: OwnPlatform, models: Models
) -> None:
    light_platform.put("patients", b"x", only=("AE",))
    light_platform.put("model.onnx", model_files.onnx(), zone="frankfurt")

    with pytest.raises(ResidencyDenied) as refused:
        models.register("churn", files=("model.onnx",), training_set="blob:patients")

    assert refused.value.details["path"] == ["blob:patients"]
    assert models.list().items == ()


def test_files_in_two_zones_are_refused(light_platform: OwnPlatform, models: Models) -> None:
    light_platform.put("a.onnx", model_files.onnx(), zone="frankfurt")
    light_platform.put("b.txt", b"text")

    with pytest.raises(InvalidInput, match="one zone"):
        models.register("churn", files=("a.onnx", "b.txt"))


# ---------------------------------------------------------------------------------------------- tenancy


@pytest.mark.slow
def test_another_workspace_is_hidden(light_platform: OwnPlatform, models: Models, register: Register) -> None:
    light_platform.workspaces.create("other")
    made = register()
    omar = light_platform.join("omar", Role.ADMIN, Role.APPROVER, workspace="other")

    with acting_as(omar):
        for call in (
            lambda: models.show("default/churn"),
            lambda: models.version(made.id),
            lambda: models.versions("default/churn"),
            lambda: models.read("default/churn@1", "model.onnx"),
            lambda: models.verify(made.id),
            lambda: models.promote(made.id, to="champion"),
            lambda: models.approve(made.id, alias="champion"),
            lambda: models.rollback("default/churn", alias="champion"),
            lambda: models.resolve("default/churn", alias="champion"),
            lambda: models.register("mine", files=(made.files[0].blob,), workspace="other"),
        ):
            with pytest.raises(NotFound):
                call()
        assert models.list(workspace="other").items == ()


@pytest.mark.slow
def test_one_name_in_two_workspaces_is_two_models(light_platform: OwnPlatform, models: Models) -> None:
    light_platform.workspaces.create("other")
    for place in ("default", "other"):
        light_platform.put("model.onnx", model_files.onnx(), workspace=place)
        models.register("churn", files=(f"{place}/model.onnx",), paths=("m.onnx",), workspace=place)

    assert models.version("churn@1").id != models.version("other/churn@1").id


def test_a_blob_of_another_workspace_is_refused(light_platform: OwnPlatform, models: Models) -> None:
    light_platform.workspaces.create("other")
    light_platform.put("model.onnx", model_files.onnx(), workspace="other")

    with pytest.raises(InvalidInput, match="workspace default"):
        models.register("churn", files=("other/model.onnx",))


@pytest.mark.slow
def test_a_blob_hidden_from_the_caller_cannot_be_registered(
    light_platform: OwnPlatform, models: Models
) -> None:
    light_platform.put("secret.onnx", model_files.onnx())
    rule = 'forbid (principal, action == Action::"blobs.read", resource) when { resource.name == "secret.onnx" };'
    light_platform.policies.publish("no-reading", text=rule)
    dana = light_platform.join("dana", Role.DEVELOPER)

    with acting_as(dana), pytest.raises(Denied):
        models.register("churn", files=("secret.onnx",))


@pytest.mark.slow
def test_a_viewer_reads_but_does_not_register(
    light_platform: OwnPlatform, models: Models, register: Register
) -> None:
    register()
    light_platform.put("model.onnx", model_files.onnx())
    vera = light_platform.join("vera", Role.VIEWER)

    with acting_as(vera):
        assert b"".join(models.read("churn@1", "model.onnx")) == model_files.onnx()
        for call in (
            lambda: models.register("churn", files=("model.onnx",)),
            lambda: models.promote("churn@1", to="champion"),
            lambda: models.approve("churn@1", alias="champion"),
            lambda: models.protect("churn", alias="champion"),
        ):
            with pytest.raises(Denied):
                call()
