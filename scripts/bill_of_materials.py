"""Write the bill of materials of Falaj as CycloneDX 1.6 JSON: the packages of the base installation, as locked.

It is made from what is installed beside it, in the versions of constraints.txt; the same tree gives the same document.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, distribution, requires
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import quote
from uuid import NAMESPACE_URL, uuid5

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from falaj.registry.cards.bom import SCHEMA
from falaj.version import VERSION

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "constraints.txt"

JsonObject = dict[str, Any]


def main() -> int:
    if len(sys.argv) != 3:
        print("usage: bill_of_materials.py WHEEL TARGET", file=sys.stderr)
        return 2
    wheel, target = map(Path, sys.argv[1:])
    target.write_text(json.dumps(bill_of_materials(wheel), indent=2) + "\n")
    return 0


def bill_of_materials(wheel: Path) -> JsonObject:
    """Return the bill of a wheel: what it needs, what those packages need, and the licences that they declare."""
    needs = dependency_graph("falaj")
    locked = locked_versions()
    parts = {name: library(name, locked[name]) for name in sorted(needs) if name != "falaj"}
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    own = component("application", "falaj", VERSION) | {"hashes": [{"alg": "SHA-256", "content": digest}]}
    refs = {name: part["bom-ref"] for name, part in parts.items()} | {"falaj": own["bom-ref"]}
    return {
        "$schema": SCHEMA,
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid5(NAMESPACE_URL, f'falaj:{digest}')}",
        "version": 1,
        "metadata": {"component": own},
        "components": list(parts.values()),
        "dependencies": [
            {"ref": refs[name], "dependsOn": sorted(refs[need] for need in needs[name])}
            for name in sorted(needs)
        ],
    }


def dependency_graph(
    root: str, *, environment: Mapping[str, str] = MappingProxyType({})
) -> dict[str, set[str]]:
    """Return what each package needs, from `root` on, by the metadata of what is installed.

    `environment` replaces facts of this machine in markers. A package that is not installed here needs nothing.
    """
    graph, waiting = dict[str, set[str]](), [Requirement(root)]
    seen = set[tuple[str, frozenset[str]]]()
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        if (name, frozenset(wanted.extras)) in seen:
            continue
        seen.add((name, frozenset(wanted.extras)))
        needs = [
            need
            for need in map(Requirement, declared_needs(name))
            if need.marker is None
            or any(need.marker.evaluate({**environment, "extra": each}) for each in ("", *wanted.extras))
        ]
        graph.setdefault(name, set()).update(canonicalize_name(need.name) for need in needs)
        waiting += needs
    return graph


def declared_needs(name: str) -> list[str]:
    try:
        return requires(name) or []
    except PackageNotFoundError:
        return []


def locked_versions() -> dict[str, str]:
    pins = [line.split("==") for line in CONSTRAINTS.read_text().splitlines() if not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pins}


def library(name: str, version: str) -> JsonObject:
    declared = distribution(name).metadata.get("License-Expression")
    return component("library", name, version) | (
        {"licenses": [{"expression": declared}]} if declared else {}
    )


def component(kind: str, name: str, version: str) -> JsonObject:
    purl = f"pkg:pypi/{name}@{quote(version, safe='')}"
    return {"type": kind, "bom-ref": purl, "name": name, "version": version, "purl": purl}


if __name__ == "__main__":
    sys.exit(main())
