"""Facts of versions, model cards, bills of materials, and differences."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import safetensors.numpy
from cyclonedx.model.bom import Bom
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from markdown_it import MarkdownIt

from falaj.errors import Damaged, InvalidInput, NotFound
from falaj.governance.operations.caller import acting_as
from falaj.records.governance.identity import Role
from falaj.records.governance.residency import Label
from falaj.records.models.cards import CardFacts, OriginObject
from falaj.records.models.facts import PackagePin, TrainingHardware
from falaj.records.names import ObjectId
from falaj.records.registry import FileFormat, ModelFile, TensorSpec
from falaj.registry.cards.markdown import escaped, model_card
from falaj.registry.service import Models
from framework_models import litert_bytes
from model_files import onnx
from platforms import OwnPlatform

if TYPE_CHECKING:
    from conftest import MakeDataset, Register  # type: ignore[attr-defined]

FACTS: dict[str, Any] = {
    "inputs": (TensorSpec(name="features", dtype="float32", shape=(-1, 2), features=("calls", "minutes")),),
    "outputs": (TensorSpec(name="score", dtype="float32", shape=(-1,)),),
    "metrics": {"auc": 0.93, "log_loss": 0.2},
    "packages": (
        PackagePin(name="scikit-learn", version="1.9.0", sha256="a" * 64),
        PackagePin(name="torch", version="2.13.0+cpu", files_sha256="b" * 64),
    ),
    "hardware": TrainingHardware(machine="node-1", cpus=8, gpus=("NVIDIA H200", "NVIDIA H200")),
    "licence": "apache-2.0 or mit",
    "environment": {"python": "3.11.7"},
    "card": "Predicts *churn* of private customers.",
}
CATBOOST = Path(__file__).parents[2] / "data" / "catboost-categories.cbm"
HOSTILE = "<script>alert(1)</script>|`x`\n# Approved\n[a](javascript:alert(1))<img src=x onerror=alert(1)>"


@pytest.fixture
def complete(platform: OwnPlatform, models: Models, make_dataset: MakeDataset) -> str:
    """A version with all facts, and its example."""
    data = make_dataset("churn-train")
    run = platform.runs.start("churn", params={"depth": 4, "eta": 0.1})
    files = [platform.blobs.upload(iter([content])).id for content in (onnx(), b'{"inputs": []}')]
    made = models.register(
        "churn",
        files=files,
        paths=("model.onnx", "example.json"),
        training_set=data.id,
        run=run.id,
        example="example.json",
        **FACTS,
    )
    return made.reference


def validated(document: dict[str, Any]) -> Bom:
    """Return the document as the library reads it; it must satisfy the strict schema of CycloneDX 1.6."""
    text = json.dumps(document)
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    return Bom.from_json(json.loads(text))


def as_html(markdown: str) -> str:
    """Return Markdown as a renderer shows it that lets all HTML through, and all links."""
    renderer = MarkdownIt("commonmark").enable("table")
    renderer.validateLink = lambda url: True
    return renderer.render(markdown)


# ------------------------------------------------------------------------------------------------ facts


def test_facts_are_signed_with_the_version(complete: str, platform: OwnPlatform, models: Models) -> None:
    version = models.version(complete)

    assert version.packages == FACTS["packages"]
    assert version.hardware == FACTS["hardware"]
    assert version.licence == "Apache-2.0 OR MIT"
    assert (version.example, version.zone) == ("example.json", "local")
    assert version.residency == version.label
    platform.sql("UPDATE registry_versions SET manifest = replace(manifest, 'Apache-2.0', 'Unlicense')")
    with pytest.raises(Damaged, match="changed after it was signed"):
        models.card(complete)


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ({"licence": "My own"}, "licence"),
        ({"licence": "<script>"}, "licence"),
        ({"packages": [{"name": "../etc", "version": "1"}]}, "packages.0.name"),
        ({"packages": [{"name": "a_b", "version": "1"}, {"name": "A-b", "version": "2"}]}, "packages"),
        ({"packages": [{"name": "a", "version": "1", "sha256": "xyz"}]}, "packages.0.sha256"),
        ({"example": "model.onnx"}, "example"),
        ({"example": "other.json"}, "example"),
        ({"metrics": {"auc": float("nan")}}, "metrics.auc"),
        ({"metrics": {"auc": float("inf")}}, "metrics.auc"),
        ({"hardware": {"machine": "a\nb"}}, "hardware.machine"),
        ({"card": "x" * 50_000_000}, "card"),
    ],
    ids=["licence", "html", "path", "twice", "hash", "model", "missing", "nan", "inf", "lines", "huge"],
)
def test_false_facts_are_refused(
    light_platform: OwnPlatform, models: Models, register: Register, given: dict[str, Any], where: str
) -> None:
    with pytest.raises(InvalidInput) as refused:
        register(**given)

    assert refused.value.faults[0].where == where
    assert len(str(refused.value)) < 2000
    with pytest.raises(NotFound):
        models.show("churn")


# ------------------------------------------------------------------------------------------------- card


def test_a_card_has_every_fact_and_misses_none(complete: str, models: Models) -> None:
    card = models.card(complete)

    assert card.missing == ()
    assert card.facts.params == {"depth": "4", "eta": "0.1"}
    for words in (
        "# churn@1",
        "Apache\\-2.0 OR MIT",
        "churn\\-train",
        "2 × NVIDIA H200",
        "> Predicts *churn* of private customers.",
        "| auc | 0.93 |",
        "| scikit\\-learn | 1.9.0 |",
        "example.json",
        "any jurisdiction",
    ):
        assert words in card.markdown
    assert models.card(complete).sha256 == card.sha256


def test_a_card_says_what_is_missing(light_platform: OwnPlatform, models: Models, register: Register) -> None:
    register(metrics={"auc": 0.9})

    card = models.card("churn@1")

    expected = ("card", "licence", "training_set", "run", "inputs", "outputs", "packages", "hardware")
    assert card.missing == expected
    assert "Missing: card, licence" in card.markdown


def test_a_hostile_card_is_harmless_as_html(
    light_platform: OwnPlatform, models: Models, register: Register
) -> None:
    tensor = TensorSpec(name=HOSTILE, dtype="float32", shape=(-1, 1), features=(HOSTILE,))
    register(
        metrics={HOSTILE: 1.0},
        environment={HOSTILE: HOSTILE},
        inputs=(tensor,),
        hardware=TrainingHardware(machine=HOSTILE.replace("\n", " ")),
        card=HOSTILE,
    )

    shown = as_html(models.card("churn@1").markdown)

    assert_harmless(shown)
    assert re.findall(r"<h1>(.*?)</h1>", shown.partition("<blockquote>")[0]) == ["churn@1"]
    assert "Approved" in shown[shown.index("<blockquote>") : shown.index("</blockquote>")]


@pytest.mark.parametrize(
    "text",
    [
        "[a](javascript:alert(1))",
        "[a](JaVaScRiPt\\:alert(1))",
        "[a](&#106;avascript:alert(1))",
        "[a](javascript&colon;alert(1))",
        "[a]: javascript:alert(1)\n\n[a]",
        "<javascript:alert(1)>",
        "![a](data:text/html;base64,xx)",
        "<svg/onload=alert(1)>",
        "</td></table><script>alert(1)</script>",
        "a\u2028# Approved\u2029# Approved\x0b# Approved\r# Approved",
        "```\n</code><script>alert(1)</script>\n```",
        "    <script>alert(1)</script>",
        "```\nnever closed",
        "\x1b[31mred\x00",
    ],
)
def test_what_the_author_wrote_stays_in_its_section_and_runs_nothing(text: str) -> None:
    card = model_card(bare_facts(text=text, metrics={"auc": 0.9}))

    shown = as_html(card.markdown)

    assert_harmless(shown)
    assert "Approved" not in shown[: shown.index("<blockquote>")]
    assert "Approved" not in shown[shown.index("</blockquote>") :]
    assert "<td>auc</td>" in shown[shown.index("</blockquote>") :]
    assert "\x1b" not in card.markdown


def assert_harmless(html: str) -> None:
    tags = {tag.lower() for tag in re.findall(r"<\s*/?([a-zA-Z][a-zA-Z0-9]*)", html)}
    plain = {"h1", "h2", "p", "table", "thead", "tbody", "tr", "th", "td", "blockquote", "pre", "code"}
    assert tags - plain <= {"em", "strong", "a", "img", "ul", "ol", "li", "br"}
    links = re.findall(r'(?:href|src)="([^"]*)"', html)
    assert [link for link in links if re.match(r"(?i)\s*(javascript|vbscript|data|file):", link)] == []


def test_values_are_cut_and_kept_on_one_line() -> None:
    assert "\n" not in escaped("a\nb\u2028c|d")
    assert len(escaped("x" * 1_000_000)) < 400


def test_of_what_the_reader_may_not_see_the_id_alone_is_told(
    platform: OwnPlatform, models: Models, make_dataset: MakeDataset, register: Register
) -> None:
    platform.workspaces.create("secret")
    data = make_dataset("patients-of-one-ward", workspace="secret")
    register(training_set=data.id)
    viewer = platform.join("vera", Role.VIEWER)

    own = models.card("churn@1")
    with acting_as(viewer):
        theirs = models.card("churn@1")
        bom = models.bom("churn@1")

    assert own.facts.training_set == OriginObject(id=data.id, name="patients-of-one-ward", kind="dataset")
    assert theirs.facts.training_set == OriginObject(id=data.id)
    assert "patients" not in theirs.markdown
    assert "patients" not in json.dumps(bom.document)


# -------------------------------------------------------------------------------------------------- bom


def test_a_bill_of_materials_satisfies_cyclonedx(
    complete: str, models: Models, platform: OwnPlatform
) -> None:
    models.record_metrics(complete, on="churn-train", metrics={"auc": 0.91})
    found = models.bom(complete)
    parsed = validated(found.document)

    model = parsed.metadata.component
    assert model is not None
    assert (model.type.value, model.name, model.version) == ("machine-learning-model", "churn", "1")
    assert [each.value for each in model.licenses] == ["Apache-2.0 OR MIT"]
    kinds = {(each.type.value, each.name) for each in parsed.components}
    assert kinds == {
        *(("file", "model.onnx"), ("file", "example.json"), ("data", "churn-train")),
        *(("library", "scikit-learn"), ("library", "torch")),
    }
    hashes = {each.name: next(iter(each.hashes)).content for each in parsed.components if each.hashes}
    sums = {file.path: file.sha256 for file in models.version(complete).files}
    assert hashes == sums | {"scikit-learn": "a" * 64}
    purls = {each.name: str(each.purl) for each in parsed.components if each.purl}
    assert purls == {"scikit-learn": "pkg:pypi/scikit-learn@1.9.0", "torch": "pkg:pypi/torch@2.13.0%2Bcpu"}
    card = found.document["metadata"]["component"]["modelCard"]
    data = models.version(complete).training_set
    assert card["modelParameters"]["datasets"] == [{"ref": data}]
    measured = card["quantitativeAnalysis"]["performanceMetrics"]
    assert {"type": "auc", "value": "0.91", "slice": "churn-train"} in measured
    assert {"type": "auc", "value": "0.93"} in measured
    assert models.bom(complete) == found


def test_a_bill_of_materials_of_few_or_hostile_facts_is_valid(
    light_platform: OwnPlatform, models: Models, register: Register
) -> None:
    first = register()
    register(metrics={HOSTILE: 1e308}, environment={HOSTILE: HOSTILE}, card=HOSTILE, sources=(first.id,))

    for version in ("churn@1", "churn@2"):
        validated(models.bom(version).document)

    ancestors = models.bom("churn@2").document["metadata"]["component"]["pedigree"]["ancestors"]
    assert [each["name"] for each in ancestors] == ["churn@1"]


# ------------------------------------------------------------------------------------------------- diff


def test_two_versions_are_compared_in_everything(
    complete: str, platform: OwnPlatform, models: Models, register: Register
) -> None:
    run = platform.runs.start("churn", params={"depth": 6, "eta": 0.1})
    register(
        data=onnx(b"\x12\x03abd"),
        run=run.id,
        **FACTS
        | {
            "metrics": {"auc": 0.95, "accuracy": 0.8},
            "packages": (
                PackagePin(name="scikit-learn", version="1.9.1"),
                PackagePin(name="numpy", version="2.4"),
            ),
            "licence": "MIT",
            "hardware": TrainingHardware(machine="node-2", cpus=8),
            "inputs": (TensorSpec(name="features", dtype="float32", shape=(-1, 3)),),
            "card": "Predicts churn.",
        },
    )

    found = models.diff(complete, "churn@2")

    metrics = {each.name: (each.before, each.after, each.difference) for each in found.metrics}
    assert metrics["auc"] == (0.93, 0.95, pytest.approx(0.02))
    assert metrics["accuracy"] == (None, 0.8, None)
    assert metrics["log_loss"] == (0.2, None, None)
    facts = {each.name: (each.before, each.after) for each in found.facts}
    assert facts["licence"] == ("Apache-2.0 OR MIT", "MIT")
    assert facts["training set"] == ("churn-train", None)
    assert facts["hardware"][1] == "node-2, 8 CPUs"
    assert [(each.name, each.before, each.after) for each in found.params] == [("depth", "4", "6")]
    packages = {each.name: (each.before, each.after) for each in found.packages}
    assert packages["numpy"] == (None, "2.4")
    assert packages["torch"][1] is None
    assert packages["scikit-learn"] == (f"1.9.0 sha256:{'a' * 16}", "1.9.1")
    assert [each.name for each in found.files] == ["example.json", "model.onnx"]
    assert [each.name for each in found.signature] == ["input features"]
    assert "+Predicts churn." in found.card


def test_a_version_does_not_differ_from_itself(complete: str, models: Models) -> None:
    found = models.diff(complete, complete)

    assert (found.facts, found.files, found.signature, found.params, found.packages) == ((),) * 5
    assert {each.difference for each in found.metrics} == {0.0}


def test_long_texts_are_compared_in_bounded_time(
    light_platform: OwnPlatform, models: Models, register: Register
) -> None:
    register(card="a\nb\n" * 50_000)
    register(card="b\na\n" * 50_000)

    (words,) = models.diff("churn@1", "churn@2").card

    assert words == "the text differs: 100000 lines before, 100000 after"


@pytest.mark.parametrize("verb", ["card", "bom"])
def test_versions_of_others_and_unknown_ones_look_alike(
    platform: OwnPlatform, models: Models, register: Register, verb: str
) -> None:
    register()
    stranger = platform.join("sam")
    messages = []
    for version in ("churn@1", "churn@9"):
        with acting_as(stranger), pytest.raises(NotFound) as refused:
            getattr(models, verb)(version)
        messages.append(refused.value.message.replace(version, ""))

    assert messages[0] == messages[1]
    with acting_as(stranger), pytest.raises(NotFound):
        models.diff("churn@1", "churn@1")
    with pytest.raises(InvalidInput):
        getattr(models, verb)("Churn@1")


@pytest.mark.parametrize(
    ("path", "data"),
    [
        ("model.cbm", CATBOOST.read_bytes()),
        ("model.tflite", litert_bytes(np.ones((2, 1), "float32"), np.ones(1, "float32"))),
        ("model.safetensors", safetensors.numpy.save({"w": np.ones(3, "float32")})),
    ],
    ids=["catboost", "litert", "safetensors"],
)
def test_files_that_libraries_wrote_have_cards_bills_of_materials_and_exports(
    light_platform: OwnPlatform, models: Models, register: Register, path: str, data: bytes
) -> None:
    kind = {"cbm": "catboost", "tflite": "litert"}.get(path.rpartition(".")[2], "safetensors")
    made = register(data=data, path=path)

    card = models.card("churn@1")
    bom = validated(models.bom("churn@1").document)
    exported = models.export("churn@1", to="files")

    assert (made.format.value, card.facts.format.value) == (kind, kind)
    assert f"| format | {kind} |" in card.markdown
    files = [each for each in bom.components if each.name == path]
    assert [digest.content for each in files for digest in each.hashes] == [made.files[0].sha256]
    assert path in [each.path for each in exported.files]
    *_, checked = models.verify("churn@1")
    assert checked.ok


def bare_facts(**changed: Any) -> CardFacts:
    file = ModelFile(
        path="model.onnx", format=FileFormat.ONNX, blob=ObjectId("blob_1"), size_bytes=1, sha256="0" * 64
    )
    facts = CardFacts(
        version="churn@1",
        id=ObjectId("version_1"),
        format=FileFormat.ONNX,
        files=(file,),
        label=Label(),
        author="amal",
        created_at=datetime(2026, 5, 3, tzinfo=UTC),
        key="abc",
    )
    return facts.model_copy(update=changed)
