"""The bill of materials of Falaj is valid CycloneDX, and has all packages of the base installation."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

from cyclonedx.model.bom import Bom
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from bill_of_materials import bill_of_materials, locked_versions

ROOT = Path(__file__).parents[2]


def test_the_bill_is_valid_and_complete(tmp_path: Path) -> None:
    wheel = tmp_path / "falaj.whl"
    wheel.write_bytes(b"a wheel")

    document = bill_of_materials(wheel)

    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(json.dumps(document)) is None
    parsed = Bom.from_json(document)  # type: ignore[attr-defined]
    versions = {each.name: each.version for each in parsed.components}
    assert versions.items() <= locked_versions().items()
    assert direct_dependencies() <= versions.keys()
    assert {"torch", "pytest"} & versions.keys() == set()
    assert bill_of_materials(wheel) == document


def direct_dependencies() -> set[str]:
    """Return what pyproject.toml declares for this machine."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    wanted = map(Requirement, declared)
    return {canonicalize_name(each.name) for each in wanted if each.marker is None or each.marker.evaluate()}
