"""Exports for Triton are read by Triton's own protobuf messages; those for KServe have names and places it takes."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from falaj.errors import InvalidInput
from falaj.records.governance.residency import UNRESTRICTED, Label
from falaj.records.record import utc_now
from falaj.records.registry import FileFormat, ModelFile, ModelVersion, TensorSpec
from falaj.registry.exports.edge import edge_layout
from falaj.registry.exports.kserve import UNSET, kserve_layout, service_name
from falaj.registry.exports.layout import ExportOptions, ExportSubject, TreeFacts
from falaj.registry.exports.triton import triton_layout

OPTIONS = ExportOptions()
X = TensorSpec(name="x", dtype="float32", shape=(-1, 4))
Y = TensorSpec(name="y", dtype="float32", shape=(-1,))


def subject(
    kind: FileFormat = FileFormat.ONNX,
    *,
    name: str = "churn",
    label: Label = UNRESTRICTED,
    trees: TreeFacts | None = None,
    inputs: tuple[TensorSpec, ...] = (X,),
    outputs: tuple[TensorSpec, ...] = (Y,),
) -> ExportSubject:
    file = ModelFile(path="weights/Model.bin", format=kind, blob="blob_1", size_bytes=3, sha256="ab" * 32)
    version = ModelVersion.model_validate(
        {
            "platform": "p",
            "workspace": "w",
            "id": "version_1",
            "model": "model_1",
            "name": name,
            "number": 14,
            "format": kind,
            "files": (file,),
            "author": "user_1",
            "created_at": utc_now(),
            "key": "k",
            "signature": "s",
            "label": label,
        }
    )
    return ExportSubject(version=version, file=file, trees=trees, inputs=inputs, outputs=outputs)


def trees(**facts: Any) -> TreeFacts:
    return TreeFacts.model_validate(
        {"layout": "json", "features": 5, "classes": 1, "booster": "gbtree"} | facts
    )


def triton_config(found: ExportSubject, options: ExportOptions = OPTIONS) -> Any:
    """The configuration as Triton's own messages read it; an unknown field or value raises."""
    (text,) = triton_layout(found, options).texts.values()
    return text_format.Parse(text, model_config_pb2.ModelConfig())


# -------------------------------------------------------------------------------------------------- Triton


def test_onnx_with_rows_is_batched_without_its_first_dimension() -> None:
    layout = triton_layout(subject(), OPTIONS)
    config = triton_config(subject())

    assert list(layout.texts) == ["churn/config.pbtxt"]
    assert list(layout.sources) == ["churn/14/model.onnx"]
    assert (config.name, config.backend, config.platform) == ("churn", "onnxruntime", "onnxruntime_onnx")
    assert (config.max_batch_size, config.HasField("dynamic_batching")) == (64, True)
    assert [(t.name, t.data_type, list(t.dims)) for t in config.input] == [
        ("x", model_config_pb2.TYPE_FP32, [4])
    ]
    (output,) = config.output
    assert (list(output.dims), output.HasField("reshape"), list(output.reshape.shape)) == ([1], True, [])
    assert [group.kind for group in config.instance_group] == [model_config_pb2.ModelInstanceGroup.KIND_CPU]


@pytest.mark.parametrize(
    ("inputs", "outputs", "options"),
    [
        ((TensorSpec(name="x", dtype="float32", shape=(1, 4)),), (Y,), OPTIONS),
        ((X,), (TensorSpec(name="total", dtype="float32", shape=()),), OPTIONS),
        ((X,), (Y,), ExportOptions(max_batch_rows=0)),
    ],
    ids=["a fixed first dimension", "an output without rows", "0 rows were asked for"],
)
def test_without_rows_all_dimensions_stay(
    inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...], options: ExportOptions
) -> None:
    config = triton_config(subject(inputs=inputs, outputs=outputs), options)

    assert (config.max_batch_size, config.HasField("dynamic_batching")) == (0, False)
    assert list(config.input[0].dims) == list(inputs[0].shape)
    assert list(config.output[0].dims) == list(outputs[0].shape or (1,))


@pytest.mark.parametrize("name", ['a"b', "a\\b", "a\nb", "قيمة", "a'b#c", "\x00", "x/y:0", "{}[];,"])
def test_odd_names_of_tensors_survive(name: str) -> None:
    config = triton_config(subject(inputs=(TensorSpec(name=name, dtype="int64", shape=(-1, 1)),)))

    assert config.input[0].name == name


@pytest.mark.parametrize("name", ["0", "a.b_c-d", "9" * 128, "nul"])
def test_odd_names_of_models_are_one_folder(name: str) -> None:
    layout = triton_layout(subject(name=name), OPTIONS)

    assert triton_config(subject(name=name)).name == name
    assert [path.split("/")[0] for path in (*layout.texts, *layout.sources)] == [name, name]


def test_every_type_is_one_of_tritons() -> None:
    for dtype in TensorSpec.model_fields["dtype"].annotation.__args__:  # type: ignore[union-attr]
        config = triton_config(subject(inputs=(TensorSpec(name="x", dtype=dtype, shape=(-1, 2)),)))
        assert config.input[0].data_type != model_config_pb2.TYPE_INVALID


@pytest.mark.parametrize(
    ("kind", "facts", "file", "model_type", "classes", "proba"),
    [
        (
            FileFormat.XGBOOST,
            trees(objective="binary:logistic"),
            "xgboost.json",
            "xgboost_json",
            2,
            "true",
        ),
        (
            FileFormat.XGBOOST,
            trees(layout="ubj", objective="multi:softprob", classes=3),
            "xgboost.ubj",
            "xgboost_ubj",
            3,
            "true",
        ),
        (
            FileFormat.XGBOOST,
            trees(objective="reg:squarederror"),
            "xgboost.json",
            "xgboost_json",
            1,
            "false",
        ),
        (FileFormat.LIGHTGBM, trees(layout="text", objective="binary"), "model.txt", "lightgbm", 2, "true"),
    ],
)
def test_trees_run_on_the_fil_back_end(
    kind: FileFormat, facts: TreeFacts, file: str, model_type: str, classes: int, proba: str
) -> None:
    found = subject(kind, trees=facts, inputs=(), outputs=())

    config = triton_config(found)

    assert list(triton_layout(found, OPTIONS).sources) == [f"churn/14/{file}"]
    assert config.backend == "fil"
    assert (list(config.input[0].dims), list(config.output[0].dims)) == ([5], [classes])
    values = {name: value.string_value for name, value in config.parameters.items()}
    assert (values["model_type"], values["predict_proba"]) == (model_type, proba)


@pytest.mark.parametrize(
    "kind", [FileFormat.TORCH_EXPORT, FileFormat.SAFETENSORS, FileFormat.LITERT, FileFormat.CATBOOST]
)
def test_what_triton_cannot_load_is_refused_with_the_way_there(kind: FileFormat) -> None:
    with pytest.raises(InvalidInput) as refused:
        triton_layout(subject(kind), OPTIONS)

    (fault,) = refused.value.faults
    assert kind.value in str(fault.given)
    assert "ONNX" in str(fault.allowed)
    assert fault.fix


def test_a_linear_booster_and_trees_of_unknown_width_are_refused() -> None:
    for facts in (trees(booster="gblinear"), trees(features=None)):
        with pytest.raises(InvalidInput):
            triton_layout(subject(FileFormat.XGBOOST, trees=facts), OPTIONS)


# -------------------------------------------------------------------------------------------------- KServe


def service(found: ExportSubject, options: ExportOptions = OPTIONS, **where: Any) -> tuple[Any, Any]:
    given = {"zones": None, "node_terms": lambda _zones: []} | where
    layout = kserve_layout(found, options, **given)
    return yaml.safe_load(layout.texts["inferenceservice.yaml"]), layout


def test_onnx_is_served_from_a_triton_repository_by_the_v2_protocol() -> None:
    options = ExportOptions(storage_uri="s3://models/churn", cpus=1.5, memory_bytes=2 << 30, gpus=1)

    manifest, layout = service(subject(), options)

    model = manifest["spec"]["predictor"]["model"]
    assert (manifest["apiVersion"], manifest["kind"]) == ("serving.kserve.io/v1beta1", "InferenceService")
    assert model["modelFormat"] == {"name": "onnx"}
    assert (model["protocolVersion"], model["storageUri"]) == ("v2", "s3://models/churn")
    wanted = {"cpu": "1500m", "memory": str(2 << 30), "nvidia.com/gpu": "1"}
    assert model["resources"] == {"requests": wanted, "limits": wanted}
    assert list(layout.sources) == ["model/churn/14/model.onnx"]
    assert "KIND_GPU" in layout.texts["model/churn/config.pbtxt"]
    assert layout.notes == ()


def test_without_a_storage_address_it_has_one_that_kserve_refuses() -> None:
    manifest, layout = service(subject())

    address = manifest["spec"]["predictor"]["model"]["storageUri"]
    assert address == UNSET
    assert not address.startswith(("gs://", "s3://", "pvc://", "https://", "http://", "file://", "hf://"))
    assert "storageUri" in layout.notes[0]


def test_a_restricted_label_becomes_node_affinity_or_a_note() -> None:
    found = subject(label=Label(only=frozenset({"AE"}), classes=frozenset({"personal"})))
    term = {"matchExpressions": [{"key": "topology.kubernetes.io/zone", "operator": "In", "values": ["z"]}]}
    options = ExportOptions(storage_uri="pvc://a/b")

    placed, quiet = service(found, options, zones=["local"], node_terms=lambda zones: [term])
    unplaced, noted = service(found, options, zones=["local"])

    assert placed["metadata"]["annotations"]["falaj.dev/residency"] == "only AE; personal"
    required = placed["spec"]["predictor"]["affinity"]["nodeAffinity"]
    assert required["requiredDuringSchedulingIgnoredDuringExecution"] == {"nodeSelectorTerms": [term]}
    assert quiet.notes == ()
    assert "affinity" not in unplaced["spec"]["predictor"]
    assert "only AE" in noted.notes[0]


@pytest.mark.parametrize(
    ("kind", "layout_", "file"),
    [
        (FileFormat.XGBOOST, "json", "model.json"),
        (FileFormat.XGBOOST, "ubj", "model.ubj"),
        (FileFormat.LIGHTGBM, "text", "model.bst"),
    ],
)
def test_trees_are_one_file_for_mlserver(kind: FileFormat, layout_: str, file: str) -> None:
    manifest, layout = service(subject(kind, trees=trees(layout=layout_)))

    assert list(layout.sources) == [f"model/{file}"]
    assert manifest["spec"]["predictor"]["model"]["modelFormat"] == {"name": kind.value}


def test_names_become_labels_that_no_two_models_share() -> None:
    names = ["churn", "a.b", "a_b", "a-b", "9lives", "model-9lives", "x" * 128, "x" * 127]

    made = [service_name(name) for name in names]

    assert len(set(made)) == len(names)
    assert made[0] == "churn"
    for name in made:
        assert name[0].isalpha()
        assert len(name) <= 40
        assert name.replace("-", "").isalnum()
        assert not name.endswith("-")


# ---------------------------------------------------------------------------------------------------- edge


@pytest.mark.parametrize(
    ("inputs", "why"),
    [
        ((TensorSpec(name="x", dtype="float32", shape=(3, 4)),), "[3, 4]"),
        ((TensorSpec(name="x", dtype="float32", shape=()),), "[]"),
        ((TensorSpec(name="x", dtype="bfloat16", shape=(-1, 4)),), "bfloat16"),
        ((TensorSpec(name="x", dtype="float32", shape=(-1, 4), features=("a",)),), "1 columns"),
        (
            (
                TensorSpec(name="x", dtype="float32", shape=(-1, 1), features=("a",)),
                TensorSpec(name="z", dtype="float32", shape=(-1, 1), features=("a",)),
            ),
            "a twice",
        ),
        ((), "no inputs"),
    ],
)
def test_what_the_runner_cannot_feed_is_refused(inputs: tuple[TensorSpec, ...], why: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        edge_layout(subject(inputs=inputs))

    (fault,) = refused.value.faults
    assert why in str(fault.given)
    assert fault.fix


def test_trees_are_no_edge_bundle() -> None:
    with pytest.raises(InvalidInput) as refused:
        edge_layout(subject(FileFormat.XGBOOST, trees=trees()))

    assert "ONNX" in str(refused.value.faults[0].fix)
