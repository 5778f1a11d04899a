"""Each package that Falaj imports is declared, in the dependencies or in exactly one extra, and each extra is used."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

from packaging.requirements import Requirement

from falaj.assembly.images.lock import normalized, parse_lock
from falaj.extras import EXTRAS
from lock import pinned_versions, select

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "falaj"
COLLECTIONS = {"all", "demo", "dev"}
"""Extras that collect others, or what examples and tests import."""
OF_USERS = {"pandas"}
"""Imported only where the model that a user brings was made with it."""


def test_each_imported_module_is_declared_once() -> None:
    declared = {extra: set(packages) for extra, packages in extras().items()} | {"": dependencies()}

    owners = {
        module: [group for group, packages in declared.items() if packages & distributions(module)]
        for module in imported_modules() - OF_USERS
    }

    assert {module: groups for module, groups in owners.items() if len(groups) != 1} == {}


def test_each_extra_is_imported() -> None:
    unused = [extra for extra, modules in EXTRAS.items() if not modules.keys() & imported_modules()]

    assert unused == []


def test_errors_know_the_extras_of_pyproject() -> None:
    known = {extra: set(modules.values()) for extra, modules in EXTRAS.items()}

    assert known == extras()


def test_all_has_every_extra() -> None:
    (everything,) = project()["optional-dependencies"]["all"]

    assert Requirement(everything).extras == set(extras())


def test_the_lock_has_the_hashes_of_every_pin_but_torch() -> None:
    locked = parse_lock(select("dev"), name="requirements.lock")

    assert {normalized(each.name): each.version for each in locked} == pinned_versions()
    assert [each.pin for each in locked if not each.hashes] == []


def test_the_lock_of_the_base_package_has_its_dependencies_and_no_tests() -> None:
    locked = {normalized(each.name) for each in parse_lock(select("base"), name="requirements.lock")}

    assert dependencies() <= locked
    assert not {"pytest", "pandas", "scikit-learn"} & locked


def project() -> dict:  # type: ignore[type-arg]
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def dependencies() -> set[str]:
    return {distribution(each) for each in project()["dependencies"]}


def extras() -> dict[str, set[str]]:
    declared = project()["optional-dependencies"]
    return {
        extra: {distribution(each) for each in requirements}
        for extra, requirements in declared.items()
        if extra not in COLLECTIONS
    }


def distribution(requirement: str) -> str:
    return normalized(Requirement(requirement).name)


def distributions(module: str) -> set[str]:
    """Return the packages that have a module: several, where it is a namespace like google."""
    optional = {package for modules in EXTRAS.values() for name, package in modules.items() if name == module}
    return optional or {normalized(each) for each in installed().get(module, [])}


@cache
def installed() -> dict[str, list[str]]:
    return dict(packages_distributions())


@cache
def imported_modules() -> frozenset[str]:
    """Return the modules of others that the source imports, also inside functions."""
    found = {name.partition(".")[0] for path in SOURCE.rglob("*.py") for name in imports(path)}
    return frozenset(found - sys.stdlib_module_names - {"falaj"})


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
        elif isinstance(node, ast.Call) and called(node.func) == "import_module":
            yield from (each.value for each in node.args if isinstance(each, ast.Constant))


def called(function: ast.expr) -> str | None:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else None
