"""Writes the bill of materials of a version as CycloneDX 1.6 JSON. Pure: the same facts give the same document."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote
from uuid import NAMESPACE_URL, uuid5

from falaj.records.models.cards import CardFacts, ModelBom, OriginObject
from falaj.records.models.facts import PackagePin
from falaj.records.registry import ModelFile, TensorSpec
from falaj.version import VERSION

SCHEMA = "http://cyclonedx.org/schema/bom-1.6.schema.json"

JsonObject = dict[str, Any]


def bill_of_materials(facts: CardFacts) -> ModelBom:
    """Return what a version consists of: its files, the data and versions it was made from, and its packages."""
    files = [_file(each) for each in facts.files]
    data = [_data(each, facts) for each in _data_origins(facts)]
    libraries = [_library(each) for each in facts.packages]
    parts = [*files, *_code(facts), *data, *libraries]
    document = {
        "$schema": SCHEMA,
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid5(NAMESPACE_URL, f'falaj:{facts.id}')}",
        "version": 1,
        "metadata": {
            "timestamp": facts.created_at.isoformat(),
            "tools": {"components": [{"type": "application", "name": "falaj", "version": VERSION}]},
            "authors": [{"name": facts.author}],
            "component": _model(facts),
        },
        "components": parts,
        "dependencies": [
            {"ref": facts.id, "dependsOn": [each["bom-ref"] for each in parts]},
            *({"ref": each["bom-ref"]} for each in parts),
        ],
    }
    return ModelBom(version=facts.version, document=document)


def _model(facts: CardFacts) -> JsonObject:
    name, _, number = facts.version.rpartition("@")
    ancestors = [
        {"type": "machine-learning-model", "name": each.name or each.id, "properties": _ids(each)}
        for each in facts.sources
        if each.kind in ("model_version", "")
    ]
    return {
        "type": "machine-learning-model",
        "bom-ref": facts.id,
        "name": name,
        "version": number,
        **({"description": facts.text} if facts.text else {}),
        **({"licenses": [{"expression": facts.licence}]} if facts.licence else {}),
        **({"pedigree": {"ancestors": ancestors}} if ancestors else {}),
        "modelCard": _card(facts),
        "properties": _properties(dict(_facts(facts))),
    }


def _card(facts: CardFacts) -> JsonObject:
    metrics = [{"type": name, "value": repr(value)} for name, value in sorted(facts.metrics.items())]
    metrics += [
        {
            "type": name,
            "value": repr(value),
            "slice": each.on if each.job is None else f"{each.on}, computed for {each.target}",
        }
        for each in facts.measurements
        for name, value in sorted(each.metrics.items())
    ]
    parameters: JsonObject = {
        "datasets": [{"ref": each.id} for each in _data_origins(facts)],
        "inputs": [{"format": _tensor(each)} for each in facts.inputs],
        "outputs": [{"format": _tensor(each)} for each in facts.outputs],
    }
    card: JsonObject = {"modelParameters": {name: value for name, value in parameters.items() if value}}
    if metrics:
        card["quantitativeAnalysis"] = {"performanceMetrics": metrics}
    if facts.params:
        card["properties"] = _properties({f"param:{name}": value for name, value in facts.params.items()})
    return card


def _facts(facts: CardFacts) -> Iterator[tuple[str, str]]:
    yield "format", facts.format.value
    yield "residency", facts.label.describe()
    if facts.zone:
        yield "zone", facts.zone
    if facts.run is not None:
        yield "run", facts.run.id
    if facts.example:
        yield "example", facts.example
    if facts.code is not None:
        yield "code", facts.code.describe()
    if facts.hardware is not None:
        yield "hardware", facts.hardware.describe()
    yield "signed-by", facts.key
    yield from ((f"environment:{name}", value) for name, value in sorted(facts.environment.items()))


def _data_origins(facts: CardFacts) -> list[OriginObject]:
    found = [] if facts.training_set is None else [facts.training_set]
    found += [each for each in facts.sources if each.kind not in ("model_version", "")]
    return list({each.id: each for each in found}.values())


def _data(origin: OriginObject, facts: CardFacts) -> JsonObject:
    """A training set. Its classes are at most those of the version, whose label has come from it."""
    classes = ", ".join(sorted(facts.label.classes))
    described = {"type": "dataset", "name": origin.name or origin.id}
    return {
        "type": "data",
        "bom-ref": origin.id,
        "name": origin.name or origin.id,
        "data": [described | ({"classification": classes} if classes else {})],
        "properties": _ids(origin),
    }


def _file(file: ModelFile) -> JsonObject:
    return {
        "type": "file",
        "bom-ref": f"file:{file.path}",
        "name": file.path,
        "hashes": [{"alg": "SHA-256", "content": file.sha256}],
        "properties": _properties({"format": file.format.value, "size_bytes": str(file.size_bytes)}),
    }


def _library(package: PackagePin) -> JsonObject:
    name = package.name.lower().replace("_", "-")
    purl = f"pkg:pypi/{quote(name, safe='')}@{quote(package.version, safe='')}"
    found: JsonObject = {
        "type": "library",
        "bom-ref": purl,
        "name": package.name,
        "version": package.version,
        "purl": purl,
    }
    if package.sha256 is not None:
        found["hashes"] = [{"alg": "SHA-256", "content": package.sha256}]
    if package.files_sha256 is not None:
        found["properties"] = _properties({"files-sha256": package.files_sha256})
    return found


def _code(facts: CardFacts) -> list[JsonObject]:
    """The code of the network, where it is neither a file of the version nor one of its packages."""
    code = facts.code
    if code is None or (code.commit is None and code.archive is None):
        return []
    found: JsonObject = {"type": "file", "bom-ref": f"{facts.id}#code", "name": code.entry}
    if code.sha256 is not None:
        found["hashes"] = [{"alg": "SHA-256", "content": code.sha256}]
    stated = {"repository": code.repository, "commit": code.commit, "archive": code.archive}
    found["properties"] = _properties({name: value for name, value in stated.items() if value})
    return [found]


def _tensor(spec: TensorSpec) -> str:
    shape = ", ".join("any" if size < 0 else str(size) for size in spec.shape)
    return f"{spec.name}: {spec.dtype}[{shape}]"


def _ids(origin: OriginObject) -> list[JsonObject]:
    return _properties({"id": origin.id})


def _properties(values: dict[str, str]) -> list[JsonObject]:
    return [{"name": f"falaj:{name}", "value": value} for name, value in values.items()]
