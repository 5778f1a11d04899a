"""Rules of the repository that no linter checks: names, sizes, pins, and which library may be imported where."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "falaj"
CODE = [SOURCE, ROOT / "tests", ROOT / "benchmarks", ROOT / "examples"]

VAGUE_WORDS = {"utils", "util", "helpers", "helper", "common", "manager", "base", "misc"}
LONGEST_FILE = 800
LONGEST_FUNCTION = 60
MOST_MODULES = 15

ONE_FILE_A_GROUP = frozenset({"src/falaj/apps/cli/commands", "src/falaj/ports"})
"""Folders that may be larger: each file is a command that users type, or a port."""

PICKLES = {"pickle", "cloudpickle", "dill", "shelve"}
INFRASTRUCTURE = {
    *("dbos", "deltalake", "duckdb", "lightkube", "lmdb"),
    *("obstore", "pkcs11", "psycopg", "pyspark", "redis"),
}
FRAMEWORKS = {
    "ai_edge_litert",
    "jax",
    "lightgbm",
    "onnxruntime",
    "openvino",
    "optuna",
    "tensorflow",
    "torch",
    "xgboost",
}


def test_generic_file_names_are_not_used() -> None:
    vague = [
        shown(path)
        for path in code_files(*CODE)
        if VAGUE_WORDS & set(re.split(r"[_/.]", shown(path).lower()))
    ]

    assert vague == []


def test_files_are_short() -> None:
    long = [
        f"{shown(path)}: {lines} lines"
        for path in code_files(SOURCE)
        if (lines := len(path.read_text().splitlines())) > LONGEST_FILE
    ]

    assert long == []


def test_functions_are_short() -> None:
    long = [
        f"{shown(path)}:{node.lineno} {node.name}: {lines} lines"
        for path in code_files(SOURCE)
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > LONGEST_FUNCTION
    ]

    assert long == []


def test_folders_are_small() -> None:
    large = {
        shown(folder): count
        for folder in packages()
        if (count := sum(path.name != "__init__.py" for path in folder.glob("*.py"))) > MOST_MODULES
    }

    assert {folder: count for folder, count in large.items() if folder not in ONE_FILE_A_GROUP} == {}


def test_a_class_name_is_used_once() -> None:
    places: dict[str, list[str]] = {}
    for path in code_files(SOURCE):
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(f"{shown(path)}:{node.lineno}")
    twice = {name: found for name, found in places.items() if len(found) > 1}

    assert twice == {}


def test_every_package_has_a_docstring() -> None:
    silent = [
        shown(folder)
        for folder in packages()
        if not (folder / "__init__.py").is_file() or not ast.get_docstring(parsed(folder / "__init__.py"))
    ]

    assert silent == []


def test_nothing_pickles() -> None:
    assert imports_of(PICKLES, SOURCE, ROOT / "benchmarks", ROOT / "examples") == []


def test_infrastructure_is_reached_through_drivers_only() -> None:
    outside = [found for found in imports_of(INFRASTRUCTURE, SOURCE) if "/drivers/" not in found]

    assert outside == []


def test_frameworks_are_imported_in_a_runtime_only() -> None:
    outside = [found for found in imports_of(FRAMEWORKS, SOURCE) if "/runtime/" not in found]

    assert outside == []


def test_changelog_has_an_unreleased_section() -> None:
    assert re.search(r"^## \[Unreleased\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_constraints_are_exact() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]

    assert "torch==2.13.0" in pins
    assert [pin for pin in pins if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!+]+", pin)] == []
    assert pins == sorted(pins, key=lambda pin: pin.split("==")[0].lower())


def test_continuous_integration_can_be_run() -> None:
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def packages() -> list[Path]:
    """Return the folders of the source with Python modules; alembic loads migrations by path, so they are left out."""
    folders = {path.parent for path in SOURCE.rglob("*.py")}
    return sorted(folder for folder in folders if "migrations" not in folder.parts)


def code_files(*folders: Path) -> Iterator[Path]:
    """Return the Python files below `folders`, without virtualenvs."""
    for folder in folders:
        yield from sorted(path for path in folder.rglob("*.py") if ".venvs" not in path.parts)


def imports_of(modules: set[str], *folders: Path) -> list[str]:
    """Return each import of one of `modules`, also inside functions, as "file:line module"."""
    return [
        f"{shown(path)}:{line} {module}"
        for path in code_files(*folders)
        for line, module in imports(parsed(path))
        if module.split(".")[0] in modules
    ]


def imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.lineno, node.module


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def shown(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()
